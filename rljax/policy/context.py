"""Splits a packed row over the devices of the mesh axis ``context``.

Each of n devices has one of n equal pieces of a row of t tokens, in order. The policy works on folded arrays [b n,
t / n, ...], in which the piece of each device is a row of its own. So only mixers know that these rows belong together.
To see a whole row, the devices exchange tokens for heads (all-to-all, as in DeepSpeed Ulysses, arXiv 2309.14509). Each
device then has all tokens of 1 / n of the query heads. Heads of zeros are added until n divides their number.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rljax.sharding import axis_size, constrain

AXIS = "context"
"""The mesh axis that splits the tokens of a row."""


def whole_rows(*arrays: Array) -> tuple[Array, ...]:
    """Gathers int32 arrays [b, t], so that each device has its rows whole. The arrays travel as one array."""
    stacked = constrain(jnp.stack(arrays, axis=2), "batch_rows", None, None)
    return tuple(stacked[:, :, i] for i in range(len(arrays)))


def fold(x: Array, parts: int) -> Array:
    """Makes each device's part of a row a row of its own: [b, t, ...] becomes [b * parts, t / parts, ...].

    Raises:
      ValueError: ``parts`` does not divide the t tokens, or the mesh does not divide the number of rows b.
    """
    if parts == 1:
        return x
    (rows, tokens, *rest), ways = x.shape, axis_size("batch_rows")
    if tokens % parts or rows % ways:
        raise ValueError(
            f"mesh.context = {parts} splits rows into {parts} pieces, and the mesh splits their number into {ways} "
            f"parts; got {rows} rows of {tokens} tokens"
        )
    x = constrain(x, "batch_rows", *[None] * (x.ndim - 1))
    pieces = x.reshape(ways, rows // ways, parts, tokens // parts, *rest)
    # The rows of a group of devices lie side by side, so that each device has its part of every row of the group.
    of_devices = jnp.swapaxes(pieces, 1, 2)
    return constrain(of_devices.reshape(rows * parts, tokens // parts, *rest), "rows", *[None] * (x.ndim - 1))


def unfold(x: Array, parts: int) -> Array:
    """Reverses ``fold``: [b * parts, t / parts, ...] becomes [b, t, ...]. Devices that shared a row have it whole."""
    if parts == 1:
        return x
    (rows, tokens, *rest), ways = x.shape, axis_size("batch_rows")
    x = constrain(x, "rows", *[None] * (x.ndim - 1))
    of_devices = x.reshape(ways, parts, rows // (ways * parts), tokens, *rest)
    whole = constrain(of_devices, "batch_rows", *[None] * (of_devices.ndim - 1))
    pieces = jnp.swapaxes(whole, 1, 2)
    return constrain(pieces.reshape(rows // parts, tokens * parts, *rest), "batch_rows", *[None] * (x.ndim - 1))


def gather_tokens(x: Array) -> Array:
    """Joins the arrays [b, t / parts, ...] of the devices that share rows to [b, t, ...], in the order of tokens.

    It is called on each device (``sharding.on_each_device``).
    """
    return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)


def heads_of_device(parts: int, num_heads: int, kv_heads: int) -> int:
    """Returns the number of query heads that each of ``parts`` devices computes if they exchange tokens for heads.

    They are whole groups of query heads, or heads of one group. If ``parts`` times their number is above ``num_heads``,
    the last devices have fewer heads or none, and compute zeros instead.

    Raises:
      ValueError: ``parts`` is less than ``kv_heads`` and does not divide it.

    >>> heads_of_device(8, 32, 8), heads_of_device(8, 12, 2)
    (4, 2)
    """
    if kv_heads % parts == 0:
        return num_heads // parts
    if parts < kv_heads:
        fitting = max(size for size in range(1, parts) if kv_heads % size == 0)
        raise ValueError(
            f"mesh.context = {parts} must divide the {kv_heads} key-value heads of a device, or be at least "
            f"{kv_heads}; set it to {fitting}"
        )
    group, fewest = num_heads // kv_heads, -(-num_heads // parts)
    return next(heads for heads in range(fewest, group + 1) if group % heads == 0)


def device_heads(num_heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Returns the numbers of query heads and key-value heads of a device. ``tp`` devices split only whole groups."""
    ways = tp if kv_heads % tp == 0 else 1
    return num_heads // ways, kv_heads // ways


def exchange_heads(q: Array, k: Array, v: Array, parts: int) -> tuple[Array, Array, Array]:
    """Exchanges folded queries, keys and values [b, t / parts, h, k] for whole rows of this device's heads, in order.

    It is called on each device (``sharding.on_each_device``). The device gets ``heads_of_device`` query heads, and the
    key-value heads that these attend to.
    """
    num_heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads % parts == 0:
        whole_q, whole_k, whole_v = whole_tokens([q, k, v], parts)
        return whole_q, whole_k, whole_v
    heads = heads_of_device(parts, num_heads, kv_heads)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, heads * parts - num_heads), (0, 0)))
    (whole_q,) = whole_tokens([padded], parts)
    own = jnp.minimum(jax.lax.axis_index(AXIS) * heads // (num_heads // kv_heads), kv_heads - 1)
    # Keys and values travel as one array.
    whole = jax.lax.dynamic_slice_in_dim(gather_tokens(jnp.concatenate([k, v], axis=-1)), own, 1, axis=2)
    whole_k, whole_v = jnp.split(whole, 2, axis=-1)
    return whole_q, whole_k, whole_v


def whole_tokens(arrays: list[Array], parts: int) -> list[Array]:
    """Exchanges arrays [b, t / parts, h, ...] for arrays [b, t, h / parts, ...]. They travel as one array.

    It is called on each device (``sharding.on_each_device``).
    """
    rows, tokens = arrays[0].shape[:2]
    of_devices = jnp.concatenate([x.reshape(rows, tokens, parts, -1) for x in arrays], axis=3)
    pieces = jnp.moveaxis(_all_to_all(jnp.moveaxis(of_devices, 2, 0)), 0, 1)
    ends = np.cumsum([math.prod(x.shape[2:]) // parts for x in arrays])
    split = jnp.split(pieces.reshape(rows, tokens * parts, -1), ends[:-1].tolist(), axis=2)
    return [each.reshape(rows, tokens * parts, -1, *x.shape[3:]) for each, x in zip(split, arrays, strict=True)]


def exchange_back(x: Array, parts: int, num_heads: int) -> Array:
    """Exchanges whole rows of this device's heads [b, t, h', k] for all heads of its tokens [b, t / parts, h, k]."""
    rows, tokens, heads, width = x.shape
    pieces = x.reshape(rows, parts, tokens // parts, heads, width)
    own = jnp.moveaxis(_all_to_all(jnp.moveaxis(pieces, 1, 0)), 0, 2)
    return own.reshape(rows, tokens // parts, heads * parts, width)[:, :, :num_heads]


def _all_to_all(x: Array) -> Array:
    """Sends slice i of the first axis to device i. The result has the slices for this device, by their sender."""
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
