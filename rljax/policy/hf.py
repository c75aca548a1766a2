"""Hugging Face safetensors directories to the policy's pytree and back.

The declaration of a parameter says which HF tensor it is and in which layout. Loading reads only the slices that this
process' devices hold; publishing yields one tensor at a time, saving keeps the tensors of one file in memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax.errors import parse_json
from rljax.policy.config import PolicyConfig
from rljax.policy.families import config_to_hf
from rljax.policy.layers import Stored
from rljax.policy.model import Params, abstract_params, stored_tensors
from rljax.sharding import fetch
from rljax.weights.checksum import Checksum, checksum, mixed, place_weights
from rljax.weights.region import Region
from rljax.weights.writer import Part

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)


class Leaf(NamedTuple):
    """One parameter of the pytree and its tensors in the files.

    Attributes:
      path: in the pytree.
      names: of the tensors, an array [leading] over the leading axes whose parts are tensors of their own.
      shape: of one such part.
      inputs: as ``Stored.inputs``.
    """

    path: tuple[str, ...]
    names: np.ndarray
    shape: tuple[int, ...]
    inputs: int | None

    @property
    def stacked(self) -> int:
        """Number of the leading axes."""
        return self.names.ndim

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Of one tensor of the file."""
        if self.inputs is None:
            return self.shape
        outputs = math.prod(self.shape[self.inputs :])
        return (outputs, math.prod(self.shape[: self.inputs])) if self.inputs else (outputs,)

    def to_hf(self, part: np.ndarray) -> np.ndarray:
        """A part, or a rectangle of one, as the file has it."""
        if not self.inputs:
            return np.ascontiguousarray(part if self.inputs is None else part.reshape(-1))
        return np.ascontiguousarray(part.reshape(math.prod(part.shape[: self.inputs]), -1).T)


def leaves_of(abstract: Params, stored: Mapping[tuple[str, ...], Stored]) -> Iterator[Leaf]:
    """The parameters of a pytree of ``jax.ShapeDtypeStruct``, in the order of the files."""
    for path, leaf in sorted(flatten_dict(abstract).items()):
        name, inputs = stored[path]
        leading = leaf.shape[: stored[path].stacked]
        names = np.empty(leading, object)
        for index in np.ndindex(leading):
            names[index] = name.format(*index)
        yield Leaf(path, names, leaf.shape[len(leading) :], inputs)


def _leaves(config: PolicyConfig) -> Iterator[Leaf]:
    return leaves_of(abstract_params(config), stored_tensors(config))


def _merged(bounds: Sequence[slice], shape: Sequence[int]) -> slice:
    """The slice of axes that are one in HF; only the first of them may be split (head_dim never is)."""
    width = math.prod(shape[1:])
    return slice(bounds[0].start * width, bounds[0].stop * width)


def _read(source: Any, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray:
    """The part ``index`` of one tensor's parameter, from a slice of a safetensors file."""
    shape, inputs = leaf.shape, leaf.inputs
    bounds = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    if inputs is None:
        return source[tuple(bounds)]
    sizes = [bound.stop - bound.start for bound in bounds]
    if inputs == 0:
        return source[_merged(bounds, shape)].reshape(sizes)
    part = source[_merged(bounds[inputs:], shape[inputs:]), _merged(bounds[:inputs], shape[:inputs])]
    return part.T.reshape(sizes)


def _read_leaf(sources: Mapping[str, Any], leaf: Leaf, dtype: Any, index: Any) -> np.ndarray:
    """The part ``index`` of a parameter, from the file's slices by name."""
    names = leaf.names[index[: leaf.stacked]]
    parts = [_read(sources[name], leaf, index[leaf.stacked :]).astype(dtype) for name in np.ravel(names)]
    return np.stack(parts).reshape(*np.shape(names), *parts[0].shape)


def _open_sources(directory: Path) -> dict[str, Any]:
    """A slice of the file (``get_shape()``, ``[index]``), read when it is indexed, for each tensor by its HF name."""
    index_path = directory / INDEX_NAME
    if index_path.is_file():
        files = _files_of_index(index_path)
    elif (directory / SINGLE_NAME).is_file():
        files = [SINGLE_NAME]
    else:
        raise ValueError(f"no weights in {directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")
    sources: dict[str, Any] = {}
    for name in files:
        if not (directory / name).is_file():
            raise ValueError(f"{index_path} names {name}, which is not there")
        sources |= open_tensors(directory / name)
    return sources


def open_tensors(file: Path) -> dict[str, Any]:
    """As ``_open_sources``, of one safetensors file that is there. Raises ValueError when it cannot be read."""
    try:
        handle = safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 (it is not a mapping)


def _files_of_index(path: Path) -> list[str]:
    """The files that an index names. Raises ValueError when it names none, or one outside its own directory."""
    try:
        index = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: weight_map must name files beside it, got {file!r:.80}")
    return sorted(set(weight_map.values()))


def load_params(
    directory: str | Path, config: PolicyConfig, shardings: Params | None = None, dtype: Any = jnp.float32
) -> Params:
    """Reads a safetensors directory (single or sharded with an index), by default into float32 masters.

    Args:
      directory: the HF directory; tensors of any float dtype.
      config: its shape, from ``read_config``.
      shardings: a NamedSharding at each leaf; None puts everything on the default device.
      dtype: that the parameters are rounded to.

    Raises:
      ValueError: a tensor is missing or has another shape; the message names it with got and expected.
    """
    sources = _open_sources(Path(directory))
    return read_leaves(sources, _leaves(config), shardings, dtype, directory=directory, said_by="config.json")


def read_leaves(
    sources: Mapping[str, Any],
    leaves: Iterable[Leaf],
    shardings: Params | None,
    dtype: Any,
    *,
    directory: str | Path,
    said_by: str,
) -> Params:
    """The pytree of ``leaves`` from the files' slices by name.

    Args:
      sources: name -> slice of a safetensors file.
      leaves: from ``leaves_of``.
      shardings: as in ``load_params``, like the next.
      dtype: of the result.
      directory: of the files, for errors.
      said_by: the file that the expected shapes come from, likewise.

    Raises:
      ValueError: as ``load_params``.
    """
    placed = flatten_dict(shardings or {})
    params = {}
    for leaf in leaves:
        for name in np.ravel(leaf.names):
            if name not in sources:
                raise ValueError(f"{directory}: tensor {name!r} is missing")
            found = tuple(sources[name].get_shape())
            if found != leaf.hf_shape:
                raise ValueError(
                    f"{directory}: tensor {name!r} has shape {found}, expected {leaf.hf_shape} from {said_by}"
                )
        whole = leaf.names.shape + leaf.shape
        read = functools.partial(_read_leaf, sources, leaf, jnp.dtype(dtype))
        if shardings is None:
            params[leaf.path] = jnp.asarray(read((slice(None),) * len(whole)))
        else:
            params[leaf.path] = jax.make_array_from_callback(whole, placed[leaf.path], read)
    return unflatten_dict(params)


def hf_tensors(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields ``(HF name, array)`` in a fixed order, in ``dtype``; one leaf at a time is on the host.

    Where several processes hold the parameters, all of them take all tensors, which are gathered layer by layer. A tied
    head is not yielded: the file has no tensor of its own for it.
    """
    leaves = flatten_dict(params)
    for leaf in _leaves(config):
        parts = _host_parts(jnp.asarray(leaves[leaf.path]), leaf.stacked, jnp.dtype(dtype))
        for name, part in zip(np.ravel(leaf.names), parts, strict=True):
            yield name, leaf.to_hf(part)


def hf_parts(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[Part]:
    """Yields the parts of the HF tensors, in ``dtype``, that this process's devices hold; one leaf at a time is cast.

    Of several copies of a part one process yields one, so that the parts of all processes are each tensor once. All
    processes that hold the parameters call it.
    """
    leaves = flatten_dict(params)
    for leaf in _leaves(config):
        cast = jnp.asarray(leaves[leaf.path]).astype(dtype)
        for shard in cast.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [slice(*s.indices(n)) for s, n in zip(shard.index, cast.shape, strict=True)]
            names = leaf.names[tuple(bounds[: leaf.stacked])]
            content = np.asarray(shard.data)
            region = _hf_region(leaf, bounds[leaf.stacked :])
            parts = content.reshape(-1, *content.shape[leaf.stacked :])
            for name, part in zip(np.ravel(names), parts, strict=True):
                yield Part(str(name), leaf.hf_shape, region, leaf.to_hf(part))


def _hf_region(leaf: Leaf, bounds: list[slice]) -> Region:
    """Where in its HF tensor a part of a parameter lies."""
    shape, inputs = leaf.shape, leaf.inputs
    if inputs:
        rows, columns = _merged(bounds[inputs:], shape[inputs:]), _merged(bounds[:inputs], shape[:inputs])
        stride = math.prod(shape[:inputs])
    elif inputs == 0 or len(shape) == 1:
        rows, columns, stride = slice(0, 1), _merged(bounds, shape), math.prod(shape)
    else:
        rows, columns, stride = bounds[0], _merged(bounds[1:], shape[1:]), math.prod(shape[1:])
    return Region(rows.start, rows.stop - rows.start, columns.start, columns.stop - columns.start, stride)


def _host_parts(leaf: jax.Array, stacked: int, dtype: Any) -> Iterator[np.ndarray]:
    """The parts of a parameter with ``stacked`` leading axes, on the host; the parameter itself without any."""
    if leaf.is_fully_addressable:
        yield from np.asarray(leaf.astype(dtype)).reshape(-1, *leaf.shape[stacked:])
    elif not stacked:
        yield fetch(leaf.astype(dtype))
    else:
        for index in range(leaf.shape[0]):
            layer = fetch(_layer(leaf, np.int32(index), dtype))
            yield from layer.reshape(-1, *leaf.shape[stacked:])


@functools.partial(jax.jit, static_argnums=2)
def _layer(leaf: jax.Array, index: Any, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False).astype(dtype)


def hf_checksums(params: Params, config: PolicyConfig, dtype: Any) -> dict[str, Checksum]:
    """The checksum of each tensor that ``hf_tensors`` yields, taken on the devices.

    Raises:
      RuntimeError: a tensor holds a value that is not finite in ``dtype``; the message names it.
    """
    leaves, flat = list(_leaves(config)), flatten_dict(params)
    layouts = tuple((leaf.stacked, leaf.inputs) for leaf in leaves)
    sums = fetch(_leaf_sums([flat[leaf.path] for leaf in leaves], layouts, jnp.dtype(dtype)))
    found = {}
    for leaf, columns in zip(leaves, sums, strict=True):
        for name, (finite, *of_name) in zip(np.ravel(leaf.names), np.reshape(columns, (4, -1)).T.tolist(), strict=True):
            if not finite:
                raise RuntimeError(f"tensor {name!r} holds values that are not finite in {jnp.dtype(dtype).name}")
            found[name] = checksum(math.prod(leaf.shape), *of_name)
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _leaf_sums(
    leaves: list[jax.Array], layouts: tuple[tuple[int, int | None], ...], dtype: Any
) -> list[tuple[jax.Array, ...]]:
    """Of each tensor that a parameter's part is: whether all is finite, and the checksum's sums (int32).

    ``layouts`` has the leading axes and ``Stored.inputs`` of each parameter.
    """

    def sums(leaf: jax.Array, stacked: int, inputs: int | None) -> tuple[jax.Array, ...]:
        cast = leaf.astype(dtype)
        axes = tuple(range(stacked, leaf.ndim))
        words = jax.lax.bitcast_convert_type(cast, jnp.uint16 if dtype.itemsize == 2 else jnp.int32).astype(jnp.int32)
        first, second = mixed(words)
        places = _hf_places(leaf.shape[stacked:], inputs or 0)
        placed = first * place_weights(places)[(None,) * stacked]
        return jnp.isfinite(cast).all(axes), *(jnp.sum(each, axes, dtype=jnp.int32) for each in (first, second, placed))

    return [sums(leaf, *layout) for leaf, layout in zip(leaves, layouts, strict=True)]


def _hf_places(shape: tuple[int, ...], inputs: int) -> jax.Array:
    """The flat index (int32, mod 2^32) in the HF tensor of each element of a leaf without layers."""

    def flat(axes: range) -> jax.Array:
        index = jnp.zeros(shape, jnp.int32)
        for axis in axes:
            index = index * shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return index

    return flat(range(inputs, len(shape))) * math.prod(shape[:inputs]) + flat(range(inputs))


def _shard_plan(config: PolicyConfig, itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file; a tensor that is larger than the limit has its own file."""
    plan: list[list[str]] = [[]]
    room = max_shard_bytes
    for leaf in _leaves(config):
        size = math.prod(leaf.shape) * itemsize
        for name in np.ravel(leaf.names):
            if plan[-1] and size > room:
                plan.append([])
                room = max_shard_bytes
            plan[-1].append(name)
            room -= size
    return plan


def save_params(
    directory: str | Path,
    params: Params,
    config: PolicyConfig,
    dtype: Any = jnp.float32,
    *,
    side_files_from: str | Path | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes an ordinary HF directory: config.json, safetensors (sharded with an index above ``max_shard_bytes``).

    Args:
      directory: made when missing; its weight files are replaced.
      params: the pytree.
      config: its shape.
      dtype: of the tensors in the file.
      side_files_from: a directory whose tokenizer and generation files are copied, too.
      max_shard_bytes: largest weight file.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    stale = {*out.glob("model*.safetensors"), out / INDEX_NAME}
    plan = _shard_plan(config, jnp.dtype(dtype).itemsize, max_shard_bytes)
    tensors = hf_tensors(params, config, dtype)
    weight_map = {}
    for i, names in enumerate(plan):
        file = SINGLE_NAME if len(plan) == 1 else f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors"
        # Written under another name: after an interrupted save there is the old file or the new one, complete.
        save_file(dict(itertools.islice(tensors, len(names))), out / (file + ".partial"), metadata={"format": "pt"})
        (out / (file + ".partial")).rename(out / file)
        stale.discard(out / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(plan) > 1:
        total = sum(leaf.size for leaf in jax.tree.leaves(params)) * jnp.dtype(dtype).itemsize
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
