"""Conversion between Hugging Face safetensors directories and the pytree of a policy.

The declaration of a parameter names its HF tensor and the layout. Loading reads only the slices for the devices of this
process. ``hf_tensors`` yields one tensor at a time. Saving keeps the tensors of one file in memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError as SafetensorError
from safetensors import safe_open
from safetensors.numpy import save_file

from rljax.distributed.files import replacing
from rljax.errors import naming, parse_json
from rljax.policy.config import PolicyConfig, refuse_adapter
from rljax.policy.families import config_to_hf
from rljax.policy.layers import Declarations
from rljax.policy.model import Params, declared_params
from rljax.sharding import fetch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_HEAD, _TABLE, _ROWS = "lm_head.weight", "model.embed_tokens.weight", 4096
CHUNK_BYTES = 2**29
"""The most bytes that are transposed and copied to the host at once, unless one layer is larger."""

_OF_TEXT = ("model.language_model.", "model.")  # a part of the names of a model that reads images, too, and of ours
_THREADS = min(8, os.cpu_count() or 1)
_BLOCK = 2**20  # the elements whose finiteness is checked at a time
_DTYPES = ("F16", "BF16", "F32", "F64")
Label = TypeVar("Label")
_SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


class Leaf(NamedTuple):
    """One parameter of the pytree and its tensors in the files."""

    path: tuple[str, ...]  # the path in the pytree
    names: np.ndarray  # the names of its tensors, each a slice; the shape is that of the parameter's leading axes
    shape: tuple[int, ...]  # the shape of one slice
    inputs: int | None  # the layout of a tensor (HFTensor.inputs)
    wide: bool  # whether files hold it in float32 beside 16-bit tensors

    @property
    def stacked(self) -> int:
        """The number of leading axes whose slices are separate tensors."""
        return self.names.ndim

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in the file."""
        return tuple(part.stop for part in self.hf_slices([slice(0, size) for size in self.shape]))

    def hf_slices(self, bounds: Sequence[slice]) -> tuple[slice, ...]:
        """Converts bounds along the axes of a slice to bounds along the axes of its tensor in the file.

        Several axes of a slice may be one axis in the file. Only the first of them may be cut (head_dim never is).
        """
        if self.inputs is None:
            return tuple(bounds)
        cuts = (slice(self.inputs, None), slice(self.inputs)) if self.inputs else (slice(None),)
        widths = (math.prod(self.shape[cut][1:]) for cut in cuts)
        firsts = (bounds[cut][0] for cut in cuts)
        return tuple(slice(s.start * n, s.stop * n) for s, n in zip(firsts, widths, strict=True))

    def file_chunks(
        self, part: jax.Array, names: np.ndarray, dtype: Any, chunk_bytes: int
    ) -> Iterator[tuple[np.ndarray, jax.Array]]:
        """Yields the tensors of ``part`` with their names, in the layout of the file, a chunk of them at a time.

        The devices cast and transpose a chunk. If several processes hold ``part``, all of them must take all chunks.

        Args:
          part: The parameter, or a rectangle of it.
          names: The names of the tensors in ``part``; their shape is the shape of its leading axes.
          dtype: The dtype of the chunks.
          chunk_bytes: The most bytes of a chunk, unless one layer is larger. With several processes a chunk is a layer.

        Yields:
          The names of one chunk, and an array with one slice for each name.
        """
        layout = functools.partial(_file_layout, stacked=self.stacked, inputs=self.inputs, dtype=jnp.dtype(dtype))
        layers = part.shape[0] if self.stacked else 1
        fitting = chunk_bytes * layers // (part.size * jnp.dtype(dtype).itemsize)
        step = max(1, fitting) if part.is_fully_addressable else 1
        for start in range(0, layers, step):
            taken = min(step, layers - start)
            # The copy of the layers has a program of its own: fused with the transposition it is slow on a CPU.
            chunk = part if taken == layers else _layers(part, np.int32(start), taken)
            yield np.ravel(np.atleast_1d(names)[start : start + taken]), layout(chunk)

    def read(self, sources: Mapping[str, Any], dtype: Any, computes_in: Any, index: Any) -> np.ndarray:
        """Reads the part ``index`` of the parameter into ``dtype``. ``sources`` has the opened tensors by name.

        Raises ValueError if a value is not finite in the file, in ``dtype``, or after a cast to ``computes_in``.
        """
        names = np.asarray(self.names[index[: self.stacked]], object)
        bounds = [slice(*s.indices(n)) for s, n in zip(index[self.stacked :], self.shape, strict=True)]
        sizes = [bound.stop - bound.start for bound in bounds]
        result = np.empty((names.size, *sizes), dtype)

        def fill(whole: np.ndarray, name: str) -> None:
            part = sources[name][self.hf_slices(bounds)]
            # One copy casts the part and brings it into the layout of the policy.
            with np.errstate(over="ignore"):
                if self.inputs is None:
                    np.copyto(whole, part, casting="unsafe")
                else:
                    np.copyto(whole.reshape(part.shape[::-1]), part.T, casting="unsafe")
            _check_finite(name, whole, computes_in)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fill, result, np.ravel(names)))
        return result.reshape(*np.shape(names), *sizes)


def on_host_ahead(chunks: Iterable[tuple[Label, jax.Array]]) -> Iterator[tuple[Label, np.ndarray]]:
    """Yields labelled arrays on the host. The devices make and copy the next one while the caller uses the last."""

    def started() -> Iterator[tuple[Label, jax.Array]]:
        for label, chunk in chunks:
            if chunk.is_fully_addressable:
                chunk.copy_to_host_async()
            yield label, chunk

    for one, _ in itertools.pairwise(itertools.chain(started(), [None])):
        if one is not None:
            yield one[0], fetch(one[1])


_layers = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)


@functools.partial(jax.jit, static_argnames=("stacked", "inputs", "dtype"))
def _file_layout(layers: jax.Array, stacked: int, inputs: int | None, dtype: Any) -> jax.Array:
    """Casts layers to ``dtype`` and transposes them to the layout of the file; ``inputs`` as in ``HFTensor.inputs``."""
    cast, shape = layers.astype(dtype), layers.shape[stacked:]
    if not inputs:
        return cast.reshape(-1, *(shape if inputs is None else [math.prod(shape)]))
    return jnp.swapaxes(cast.reshape(-1, math.prod(shape[:inputs]), math.prod(shape[inputs:])), 1, 2)


def _check_finite(name: str, read: np.ndarray, computes_in: Any) -> None:
    """Raises ValueError if a value is not finite, as ``read`` or after a cast to ``computes_in``."""
    flat, largest = read.reshape(-1), float(jnp.finfo(computes_in).max)
    blocks = (flat[start : start + _BLOCK].astype(np.float32, copy=False) for start in range(0, flat.size, _BLOCK))
    if all(-largest <= block.min() and block.max() <= largest for block in blocks):  # False if one of them is NaN
        return
    with np.errstate(over="ignore"):
        cast = read.astype(computes_in)
    if not np.isfinite(cast.astype(float)).all():
        raise ValueError(f"tensor {name!r} holds values that are NaN, infinite, or beyond the range of {cast.dtype}")


def leaves_of(params: Declarations) -> Iterator[Leaf]:
    """Yields the parameters of a pytree, in the order of the files."""
    for path, (shape, _, stored) in sorted(params.items()):
        names = stored.names(shape)
        yield Leaf(path, names, shape[names.ndim :], stored.inputs, stored.wide)


def policy_leaves(config: PolicyConfig) -> Iterator[Leaf]:
    """Yields the parameters of a policy, in the order of the files."""
    return leaves_of(declared_params(config))


def _open_sources(directory: Path) -> dict[str, Any]:
    """Opens the tensors of a directory, by HF name. A tensor has ``get_shape()`` and is read when it is indexed.

    Raises ValueError if there are no weights, or two sets of them, or an adapter beside them.
    """
    refuse_adapter(directory)
    index_path, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index_path.is_file():
        files = _files_of_index(index_path)
        if single.is_file() and files != [SINGLE_NAME]:
            raise ValueError(f"{directory} has {SINGLE_NAME}, and {INDEX_NAME} names other files: delete one of them")
    elif single.is_file():
        files = [SINGLE_NAME]
    else:
        remedy = "transformers' save_pretrained makes them from pytorch_model.bin"
        raise ValueError(f"no weights in {directory}: neither {SINGLE_NAME} nor {INDEX_NAME} exists; {remedy}")
    return {name: tensor for file in files for name, tensor in open_tensors(directory / file).items()}


def open_tensors(file: Path) -> dict[str, Any]:
    """Opens the tensors of a safetensors file, by their names in a text model. Raises ValueError if it is damaged."""
    try:
        handle = safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return {key.replace(*_OF_TEXT): handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 (not a mapping)


def _files_of_index(path: Path) -> list[str]:
    """Returns the files that an index names. Raises ValueError if it names no file, or a file that is not beside it."""
    with naming(path):
        index = parse_json(path.read_bytes())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: weight_map must name files beside it, got {file!r:.80}")
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not path.with_name(file).is_file()]:
        raise ValueError(f"{path} names {missing[0]}, which does not exist")
    return files


def load_params(
    directory: str | Path,
    config: PolicyConfig,
    shardings: Params | None = None,
    dtype: Any = jnp.float32,
    *,
    computes_in: Any = None,
) -> Params:
    """Reads a safetensors directory (one file, or several with an index), by default into float32 masters.

    The tensors may be F16, BF16, F32 or F64. ``shardings`` has a NamedSharding at each leaf. Without it everything is
    on the default device. ``computes_in`` is the dtype to which the parameters will be cast, or None for ``dtype``.

    Raises:
      ValueError: A tensor is missing, or has another shape or dtype. A value is not finite in the file, in ``dtype`` or
        in ``computes_in``. The head of a tied policy differs from its embedding table.
    """
    sources = _open_sources(Path(directory))
    if config.tie_word_embeddings and not _is_tied(sources):
        raise ValueError(
            f"{directory}: config.json has tie_word_embeddings = true, but tensor {_HEAD!r} is not {_TABLE!r}: set it "
            "to false, or delete the tensor"
        )
    said: Any = {"directory": directory, "shapes_from": "config.json"}
    return read_leaves(sources, policy_leaves(config), shardings, dtype, computes_in=computes_in, **said)


def _is_tied(sources: Mapping[str, Any]) -> bool:
    """Returns whether the files have no head, or a head that equals the embedding table (if both can be read)."""
    head, table = sources.get(_HEAD), sources.get(_TABLE)
    if head is None or table is None or table.get_dtype() not in _DTYPES:
        return True
    if head.get_shape() != table.get_shape() or head.get_dtype() not in _DTYPES:
        return False
    rows = table.get_shape()[0]
    parts = (slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS))
    return all(np.array_equal(head[part].astype(float), table[part].astype(float), equal_nan=True) for part in parts)


def read_leaves(
    sources: Mapping[str, Any],
    leaves: Iterable[Leaf],
    shardings: Params | None,
    dtype: Any,
    *,
    directory: str | Path,
    shapes_from: str,
    computes_in: Any = None,
) -> Params:
    """Reads the pytree of ``leaves`` (``leaves_of``) in ``dtype``. ``sources`` are tensors from ``open_tensors``.

    ``shardings`` and ``computes_in`` are as in ``load_params``. Messages name the ``directory`` of the files, and
    ``shapes_from`` as the origin of the expected shapes.

    Raises:
      ValueError: A tensor is missing, or has another shape or dtype, or a value that is not finite. The message names
        the tensor. Names, shapes and dtypes of all tensors are checked before the first one is read.
    """
    placed = flatten_dict(shardings or {})
    params, leaves = {}, list(leaves)
    for leaf in leaves:
        for name in np.ravel(leaf.names):
            if name not in sources:
                raise ValueError(f"{directory}: tensor {name!r} is missing{_said_packed(name, sources)}")
            shape, stored = tuple(sources[name].get_shape()), sources[name].get_dtype()
            where = f"{directory}: tensor {name!r} has"
            if stored not in _DTYPES:
                raise ValueError(f"{where} dtype {stored}, expected one of {', '.join(_DTYPES)}")
            if shape != leaf.hf_shape:
                raise ValueError(f"{where} shape {shape}, expected {leaf.hf_shape} from {shapes_from}")
    for leaf in leaves:
        whole = leaf.names.shape + leaf.shape
        read = functools.partial(leaf.read, sources, jnp.dtype(dtype), jnp.dtype(computes_in or dtype))
        with naming(directory):
            if shardings is None:
                params[leaf.path] = jnp.asarray(read((slice(None),) * len(whole)))
            else:
                params[leaf.path] = jax.make_array_from_callback(whole, placed[leaf.path], read)
    return unflatten_dict(params)


def _said_packed(name: str, sources: Iterable[str]) -> str:
    """Returns advice for a missing tensor of experts that transformers has packed into one tensor, or ""."""
    above, experts, _ = name.partition(".experts.")
    parts = [other.removeprefix(above + experts) for other in sources if experts and other.startswith(above + experts)]
    packed = [part for part in parts if not part[:1].isdigit()]
    if not packed:
        return ""
    return f": {above + experts + packed[0]!r} packs its layer's experts; save the model with save_original_format=True"


def hf_tensors(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields ``(HF name, array)`` in a fixed order, in ``dtype``. Two chunks at a time are on the host.

    If several processes hold the parameters, all of them must take all tensors, which are gathered layer by layer. A
    tied head is not yielded, because the file has no tensor for it.
    """
    return host_tensors(params, policy_leaves(config), dtype)


def host_tensors(
    params: Params, leaves: Iterable[Leaf], dtype: Any, chunk_bytes: int = CHUNK_BYTES, *, keeps_wide: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of ``leaves`` as ``hf_tensors`` does; with ``keeps_wide``, the ``wide`` ones in float32."""
    flat = flatten_dict(params)
    kept = ((leaf, jnp.float32 if keeps_wide and leaf.wide else dtype) for leaf in leaves)
    chunks = (leaf.file_chunks(jnp.asarray(flat[leaf.path]), leaf.names, into, chunk_bytes) for leaf, into in kept)
    for names, chunk in on_host_ahead(itertools.chain.from_iterable(chunks)):
        yield from zip(names, chunk, strict=True)


def _shard_plan(config: PolicyConfig, itemsize: int, max_shard_bytes: int) -> tuple[list[list[str]], int]:
    """Returns the tensors of each file, by name, and all bytes. A tensor above the limit has a file of its own."""
    plan: list[list[str]] = [[]]
    room, total = max_shard_bytes, 0
    for leaf in policy_leaves(config):
        size = math.prod(leaf.shape) * (4 if leaf.wide else itemsize)
        for name in np.ravel(leaf.names):
            if plan[-1] and size > room:
                plan.append([])
                room = max_shard_bytes
            plan[-1].append(name)
            room, total = room - size, total + size
    return plan, total


def save_params(
    directory: str | Path,
    params: Params,
    config: PolicyConfig,
    dtype: Any = jnp.float32,
    *,
    side_files_from: str | Path | None = None,
    stop_token_ids: Sequence[int] = (),
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes an HF directory: config.json, and safetensors in one file or, above ``max_shard_bytes``, in several.

    The directory is created if it is missing, and its weight files are replaced. The tensors have ``dtype``, but
    the parameters declared as ``wide`` are float32.

    Args:
      side_files_from: A directory whose tokenizer and generation files are copied. None: no files are copied.
      stop_token_ids: The tokens that end a response, for generation_config.json. Empty: the copied file stays as it is.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    stale = {*out.glob("model*.safetensors"), out / INDEX_NAME}
    plan, total = _shard_plan(config, jnp.dtype(dtype).itemsize, max_shard_bytes)
    tensors = host_tensors(params, policy_leaves(config), dtype, keeps_wide=True)
    weight_map = {}
    for i, names in enumerate(plan):
        file = SINGLE_NAME if len(plan) == 1 else f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        with replacing(out / file) as partial:
            save_file(dict(itertools.islice(tensors, len(names))), partial, metadata={"format": "pt"})
        stale.discard(out / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
        stale.discard(out / INDEX_NAME)
    for path in stale:
        path.unlink(missing_ok=True)
    (out / "config.json").write_text(json.dumps(config_to_hf(config, jnp.dtype(dtype).name), indent=2))
    if side_files_from is not None and Path(side_files_from).resolve() != out.resolve():
        for side in _SIDE_FILES:
            if (Path(side_files_from) / side).is_file():
                shutil.copyfile(Path(side_files_from) / side, out / side)
    if stop_token_ids:
        generation = out / "generation_config.json"
        settings = parse_json(generation.read_bytes()) if generation.is_file() else {}
        generation.write_text(json.dumps(settings | {"eos_token_id": list(stop_token_ids)}, indent=2))
