"""The tensors of a publish: the parts that the devices of this process hold, and the checksums of whole tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import CHUNK_BYTES, on_host_ahead, policy_leaves
from rljax.policy.model import Params
from rljax.sharding import fetch
from rljax.weights.format import Checksum, TensorRegion
from rljax.weights.sums import mixed, place_weights
from rljax.weights.writer import Part


def hf_parts(params: Params, config: PolicyConfig, dtype: Any) -> Iterator[Part]:
    """Yields the parts of the Hugging Face tensors that the devices of this process hold, in ``dtype``.

    Two chunks at a time are on the host. If a part has several copies, only one process yields it. So the parts of all
    processes together cover each tensor once. All processes that hold the parameters must make this call.
    """
    for (names, shape, region), chunk in on_host_ahead(_shard_chunks(params, config, dtype)):
        for name, part in zip(names, chunk, strict=True):
            yield Part(name, shape, region, part)


def _shard_chunks(
    params: Params, config: PolicyConfig, dtype: Any
) -> Iterator[tuple[tuple[np.ndarray, tuple[int, ...], TensorRegion], jax.Array]]:
    """Yields chunks of this process's shards. A label has the names, the shape of a whole tensor, and the region."""
    flat = flatten_dict(params)
    for leaf in policy_leaves(config):
        whole = jnp.asarray(flat[leaf.path])
        for shard in whole.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [slice(*s.indices(n)) for s, n in zip(shard.index, whole.shape, strict=True)]
            *rows, columns = leaf.hf_slices(bounds[leaf.stacked :])
            row = rows[0] if rows else slice(0, 1)
            region = TensorRegion(
                row.start, row.stop - row.start, columns.start, columns.stop - columns.start, leaf.hf_shape[-1]
            )
            of_shard = np.asarray(leaf.names[tuple(bounds[: leaf.stacked])], object)
            for names, chunk in leaf.file_chunks(shard.data, of_shard, dtype, CHUNK_BYTES):
                yield (names, leaf.hf_shape, region), chunk


def hf_checksums(params: Params, config: PolicyConfig, dtype: Any) -> dict[str, Checksum]:
    """Computes the checksum of each tensor that ``hf_tensors`` yields, on the devices.

    Raises:
      RuntimeError: A tensor holds a value that is not finite in ``dtype``. The message names it.
    """
    leaves, flat = list(policy_leaves(config)), flatten_dict(params)
    sums = [fetch(_leaf_sums(flat[leaf.path], leaf.stacked, leaf.inputs, jnp.dtype(dtype))) for leaf in leaves]
    checksums = {}
    for leaf, columns in zip(leaves, sums, strict=True):
        for name, (finite, *of_name) in zip(np.ravel(leaf.names), np.reshape(columns, (4, -1)).T.tolist(), strict=True):
            if not finite:
                raise RuntimeError(f"tensor {name!r} holds values that are not finite in {jnp.dtype(dtype).name}")
            checksums[name] = Checksum.from_sums(math.prod(leaf.shape), *of_name)
    return checksums


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _leaf_sums(leaf: jax.Array, stacked: int, inputs: int | None, dtype: Any) -> tuple[jax.Array, ...]:
    """Computes for each tensor of a parameter whether all values are finite (1 or 0), and the checksum's sums, int32.

    ``stacked`` is the number of leading axes, and ``inputs`` the ``HFTensor.inputs`` of the parameter.
    """
    cast = leaf.astype(dtype)
    axes = tuple(range(stacked, leaf.ndim))
    words = jax.lax.bitcast_convert_type(cast, jnp.uint16 if dtype.itemsize == 2 else jnp.int32).astype(jnp.int32)
    first, second = mixed(words)
    places = _hf_places(leaf.shape[stacked:], inputs or 0)
    placed = first * place_weights(places)[(None,) * stacked]
    # One reduction reads the parameter once and writes no array of its size. Four would take twenty times as long.
    numbers = (jnp.isfinite(cast).astype(jnp.int32), first, second, placed)
    finite, *sums = jax.lax.reduce(numbers, (jnp.int32(1), *[jnp.int32(0)] * 3), _and_added, axes)
    return finite, *sums


def _and_added(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the minimum of the first numbers, and the sums of the others."""
    return jnp.minimum(one[0], other[0]), *(a + b for a, b in zip(one[1:], other[1:], strict=True))


def _hf_places(shape: tuple[int, ...], inputs: int) -> jax.Array:
    """Returns the flat index in the HF tensor (int32, mod 2^32) of each element of one layer of a parameter."""

    def flat(axes: range) -> jax.Array:
        index = jnp.zeros(shape, jnp.int32)
        for axis in axes:
            index = index * shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return index

    return flat(range(inputs, len(shape))) * math.prod(shape[:inputs]) + flat(range(inputs))
