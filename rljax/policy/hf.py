"""Hugging Face safetensors directories to the policy's pytree and back.

One table says which HF tensor each leaf comes from and in which layout. Loading reads only the slices that this
process' devices hold; publishing yields one tensor at a time, saving keeps the tensors of one file in memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax.checks import parse_json
from rljax.checksum import Checksum, checksum, mixed, place_weights
from rljax.policy.config import PolicyConfig, config_to_hf
from rljax.policy.qwen3 import Params, abstract_params
from rljax.rollout.weights.region import Region
from rljax.rollout.weights.writer import Part
from rljax.sharding import fetch

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

# Leaf path -> (HF name, input axes). A linear layer is [in, out] here and [out, in] in HF, and HF has the heads and
# head_dim as one axis; input axes counts those of our leaf (without layers) that are HF's second. 0: stored as it is.
_TENSORS: dict[tuple[str, ...], tuple[str, int]] = {
    ("embed",): ("model.embed_tokens.weight", 0),
    ("layers", "attention_norm", "scale"): ("model.layers.{}.input_layernorm.weight", 0),
    ("layers", "attention", "query"): ("model.layers.{}.self_attn.q_proj.weight", 1),
    ("layers", "attention", "key"): ("model.layers.{}.self_attn.k_proj.weight", 1),
    ("layers", "attention", "value"): ("model.layers.{}.self_attn.v_proj.weight", 1),
    ("layers", "attention", "output"): ("model.layers.{}.self_attn.o_proj.weight", 2),
    ("layers", "attention", "query_norm", "scale"): ("model.layers.{}.self_attn.q_norm.weight", 0),
    ("layers", "attention", "key_norm", "scale"): ("model.layers.{}.self_attn.k_norm.weight", 0),
    ("layers", "mlp_norm", "scale"): ("model.layers.{}.post_attention_layernorm.weight", 0),
    ("layers", "mlp", "gate"): ("model.layers.{}.mlp.gate_proj.weight", 1),
    ("layers", "mlp", "up"): ("model.layers.{}.mlp.up_proj.weight", 1),
    ("layers", "mlp", "down"): ("model.layers.{}.mlp.down_proj.weight", 1),
    ("final_norm", "scale"): ("model.norm.weight", 0),
    ("lm_head",): ("lm_head.weight", 0),
}


def _hf_shape(shape: tuple[int, ...], inputs: int) -> tuple[int, ...]:
    return (math.prod(shape[inputs:]), math.prod(shape[:inputs])) if inputs else shape


def _merged(bounds: Sequence[slice], shape: Sequence[int]) -> slice:
    """The slice of axes that are one in HF; only the first of them may be split (head_dim never is)."""
    width = math.prod(shape[1:])
    return slice(bounds[0].start * width, bounds[0].stop * width)


def _read(source: Any, inputs: int, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    """The part ``index`` of one layer's leaf of our ``shape``, from a slice of a safetensors file."""
    bounds = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=True)]
    if not inputs:
        return source[tuple(bounds)]
    part = source[_merged(bounds[inputs:], shape[inputs:]), _merged(bounds[:inputs], shape[:inputs])]
    return part.T.reshape([bound.stop - bound.start for bound in bounds])


def _read_leaf(sources: list[Any], inputs: int, shape: tuple[int, ...], index: Any) -> np.ndarray:
    """The part ``index`` of a leaf in float32; a leaf with a leading layers axis has one source a layer."""
    if len(index) == len(shape):
        return _read(sources[0], inputs, shape, index).astype(np.float32)
    layers = [_read(source, inputs, shape, index[1:]) for source in sources[index[0]]]
    return np.stack(layers).astype(np.float32)


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
        try:
            handle = safe_open(directory / name, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{directory / name} cannot be read: {error}") from error
        sources |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 (it is not a mapping)
    return sources


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


def _leaves(config: PolicyConfig) -> Iterator[tuple[tuple[str, ...], list[str], tuple[int, ...], int]]:
    """(path, HF names, our shape of what one name has, input axes) of each leaf in the order of the files."""
    for path, leaf in sorted(flatten_dict(abstract_params(config)).items()):
        name, inputs = _TENSORS[path]
        stacked = path[0] == "layers"
        names = [name.format(i) for i in range(config.num_layers)] if stacked else [name]
        yield path, names, leaf.shape[stacked:], inputs


def load_params(directory: str | Path, config: PolicyConfig, shardings: Params | None = None) -> Params:
    """Reads a safetensors directory (single or sharded with an index) into float32 masters.

    Args:
      directory: the HF directory; tensors of any float dtype.
      config: its shape, from ``read_config``.
      shardings: a NamedSharding at each leaf; None puts everything on the default device.

    Raises:
      ValueError: a tensor is missing or has another shape; the message names it with got and expected.
    """
    sources = _open_sources(Path(directory))
    placed = flatten_dict(shardings or {})
    params = {}
    for path, names, shape, inputs in _leaves(config):
        for name in names:
            if name not in sources:
                raise ValueError(f"{directory}: tensor {name!r} is missing")
            found, expected = tuple(sources[name].get_shape()), _hf_shape(shape, inputs)
            if found != expected:
                raise ValueError(
                    f"{directory}: tensor {name!r} has shape {found}, expected {expected} from config.json"
                )
        whole = (len(names), *shape) if path[0] == "layers" else shape
        read = functools.partial(_read_leaf, [sources[name] for name in names], inputs, shape)
        if shardings is None:
            params[path] = jnp.asarray(read((slice(None),) * len(whole)))
        else:
            params[path] = jax.make_array_from_callback(whole, placed[path], read)
    return unflatten_dict(params)


def hf_tensors(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields ``(HF name, array)`` in a fixed order, in ``dtype``; one leaf at a time is on the host.

    Where several processes hold the parameters, all of them take all tensors, which are gathered layer by layer. A tied
    head is not yielded: the file has no tensor of its own for it.
    """
    leaves = flatten_dict(params)
    for path, names, shape, inputs in _leaves(config):
        layers = _host_layers(jnp.asarray(leaves[path]), path[0] == "layers", jnp.dtype(dtype))
        for name, array in zip(names, layers, strict=True):
            yield name, np.ascontiguousarray(array.reshape(math.prod(shape[:inputs]), -1).T if inputs else array)


def hf_parts(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[Part]:
    """Yields the parts of the HF tensors, in ``dtype``, that this process's devices hold; one leaf at a time is cast.

    Of several copies of a part one process yields one, so that the parts of all processes are each tensor once. All
    processes that hold the parameters call it.
    """
    leaves = flatten_dict(params)
    for path, names, shape, inputs in _leaves(config):
        stacked = path[0] == "layers"
        cast = jnp.asarray(leaves[path]).astype(dtype)
        hf_shape = _hf_shape(shape, inputs)
        for shard in cast.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [slice(*s.indices(n)) for s, n in zip(shard.index, cast.shape, strict=True)]
            layers = range(cast.shape[0])[bounds[0]] if stacked else [0]
            content = np.asarray(shard.data)
            for name, array in zip((names[i] for i in layers), content if stacked else [content], strict=True):
                region = _hf_region(bounds[int(stacked) :], shape, inputs)
                matrix = array.reshape(region.width, region.rows).T if inputs else array
                yield Part(name, hf_shape, region, np.ascontiguousarray(matrix))


def _hf_region(bounds: Sequence[slice], shape: tuple[int, ...], inputs: int) -> Region:
    """Where in the HF tensor a part of one layer's leaf lies."""
    if inputs:
        rows, columns = _merged(bounds[inputs:], shape[inputs:]), _merged(bounds[:inputs], shape[:inputs])
        stride = math.prod(shape[:inputs])
    elif len(shape) == 1:
        rows, columns, stride = slice(0, 1), bounds[0], shape[0]
    else:
        rows, columns, stride = bounds[0], _merged(bounds[1:], shape[1:]), math.prod(shape[1:])
    return Region(rows.start, rows.stop - rows.start, columns.start, columns.stop - columns.start, stride)


def _host_layers(leaf: jax.Array, stacked: bool, dtype: Any) -> Iterator[np.ndarray]:
    """The layers of a stacked leaf, or the leaf itself, on the host."""
    if leaf.is_fully_addressable:
        host = np.asarray(leaf.astype(dtype))
        yield from host if stacked else [host]
    elif not stacked:
        yield fetch(leaf.astype(dtype))
    else:
        for index in range(leaf.shape[0]):
            yield fetch(_layer(leaf, np.int32(index), dtype))


@functools.partial(jax.jit, static_argnums=2)
def _layer(leaf: jax.Array, index: Any, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False).astype(dtype)


def hf_checksums(params: Params, config: PolicyConfig, dtype: Any) -> dict[str, Checksum]:
    """The checksum of each tensor that ``hf_tensors`` yields, taken on the devices.

    Raises:
      RuntimeError: a tensor holds a value that is not finite in ``dtype``; the message names it.
    """
    leaves, flat = list(_leaves(config)), flatten_dict(params)
    stacked = tuple(path[0] == "layers" for path, *_ in leaves)
    inputs = tuple(axes for *_, axes in leaves)
    sums = fetch(_leaf_sums([flat[path] for path, *_ in leaves], stacked, inputs, jnp.dtype(dtype)))
    found = {}
    for (_, names, shape, _), columns in zip(leaves, sums, strict=True):
        for name, (finite, *of_name) in zip(names, np.reshape(columns, (4, -1)).T.tolist(), strict=True):
            if not finite:
                raise RuntimeError(f"tensor {name!r} holds values that are not finite in {jnp.dtype(dtype).name}")
            found[name] = checksum(math.prod(shape), *of_name)
    return found


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _leaf_sums(
    leaves: list[jax.Array], stacked: tuple[bool, ...], inputs: tuple[int, ...], dtype: Any
) -> list[tuple[jax.Array, ...]]:
    """Of each leaf, and of each layer of a stacked one: whether all is finite, and the checksum's sums (int32)."""

    def sums(leaf: jax.Array, stack: bool, inputs: int) -> tuple[jax.Array, ...]:
        cast = leaf.astype(dtype)
        axes = tuple(range(int(stack), leaf.ndim))
        words = jax.lax.bitcast_convert_type(cast, jnp.uint16 if dtype.itemsize == 2 else jnp.int32).astype(jnp.int32)
        first, second = mixed(words)
        weights = place_weights(_hf_places(leaf.shape[int(stack) :], inputs))
        placed = first * (weights[None] if stack else weights)
        return jnp.isfinite(cast).all(axes), *(jnp.sum(each, axes, dtype=jnp.int32) for each in (first, second, placed))

    return [sums(*each) for each in zip(leaves, stacked, inputs, strict=True)]


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
    for _, names, shape, _ in _leaves(config):
        size = math.prod(shape) * itemsize
        for name in names:
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
