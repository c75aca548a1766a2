"""Splits a packed row over the devices of the mesh axis ``context``, in zigzag order.

A row of t tokens is cut into 2 n blocks for n devices. Device i has the blocks i and 2 n - 1 - i. A late block has more
keys to attend to than an early one. In this order all devices have equally many pairs of a query and a key. The policy
works on folded arrays [b n, t / n, ...], in which the part of each device is a row of its own. So only mixers know that
these rows belong together. Attention has two ways to see a whole row, and a delta net only the first one:

- The devices exchange tokens for heads (all-to-all, as in DeepSpeed Ulysses, arXiv 2309.14509). Each device then has
  all tokens of 1 / n of the query heads, which is even work for any kernel.
- Each device gathers the keys and values of all tokens, for its own queries (``flash.block_attention``). This is for
  heads that n does not divide. A kernel that cannot do this adds heads of zeros until n divides the number.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rljax.sharding import axis_size, constrain

AXIS = "context"
"""The mesh axis that splits the tokens of a row."""


def zigzag_blocks(parts: int) -> Int[np.ndarray, "parts 2"]:
    """Returns the two blocks of a row, of 2 * ``parts``, that each device has.

    >>> zigzag_blocks(2).tolist()
    [[0, 3], [1, 2]]
    """
    first = np.arange(parts)
    return np.stack([first, 2 * parts - 1 - first], axis=1)


def zigzag(x: Array, axis: int) -> Array:
    """Reorders the axis of all 2 n blocks of a row to one of n devices and one of their 2 blocks, [..., n, 2, ...]."""
    early, late = jnp.split(x, 2, axis=axis)
    return jnp.stack([early, jnp.flip(late, axis)], axis=axis + 1)


def from_zigzag(x: Array, axis: int) -> Array:
    """Reverses ``zigzag``: the axes of n devices and of their 2 blocks become one of 2 n blocks in order."""
    early, late = (jax.lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.concatenate([early, jnp.flip(late, axis)], axis=axis)


def whole_rows(*arrays: Array) -> tuple[Array, ...]:
    """Gathers int32 arrays [b, t] over the devices that share a row. They travel as one array."""
    stacked = constrain(jnp.stack(arrays, axis=2), "batch_rows", None, None)
    return tuple(stacked[:, :, i] for i in range(len(arrays)))


def fold(x: Array, parts: int) -> Array:
    """Makes the part of each device a row of its own: [b, t, ...] becomes [b * parts, t / parts, ...].

    Raises:
      ValueError: ``parts`` devices cannot share a row of t tokens, or the mesh does not divide the rows.
    """
    if parts == 1:
        return x
    (rows, tokens, *rest), ways = x.shape, axis_size("batch_rows")
    if tokens % (2 * parts) or rows % ways:
        raise ValueError(
            f"mesh.context = {parts} splits rows into {2 * parts} blocks, and the mesh splits their number into {ways} "
            f"parts; got {rows} rows of {tokens} tokens"
        )
    x = constrain(x, "batch_rows", *[None] * (x.ndim - 1))
    blocks = x.reshape(ways, rows // ways, 2 * parts, tokens // (2 * parts), *rest)
    # The rows of a group of devices lie side by side, so that each device has its part of every row of the group.
    of_devices = jnp.swapaxes(zigzag(blocks, 2), 1, 2)
    return constrain(of_devices.reshape(rows * parts, tokens // parts, *rest), "rows", *[None] * (x.ndim - 1))


def unfold(x: Array, parts: int) -> Array:
    """Reverses ``fold``: [b * parts, t / parts, ...] becomes [b, t, ...], with whole rows on each of their devices."""
    if parts == 1:
        return x
    (rows, tokens, *rest), ways = x.shape, axis_size("batch_rows")
    x = constrain(x, "rows", *[None] * (x.ndim - 1))
    of_devices = x.reshape(ways, parts, rows // (ways * parts), 2, tokens // 2, *rest)
    whole = constrain(of_devices, "batch_rows", *[None] * (of_devices.ndim - 1))
    blocks = from_zigzag(jnp.swapaxes(whole, 1, 2), 2)
    return constrain(blocks.reshape(rows // parts, tokens * parts, *rest), "batch_rows", *[None] * (x.ndim - 1))


def gather_keys(k: Array, v: Array, parts: int) -> tuple[Array, Array]:
    """Gathers keys and values [b, t / parts, g, k] of the devices that share rows, as [b, t, g, k] in order.

    It is called on each device (``sharding.on_each_device``). Keys and values travel as one array.
    """
    if parts == 1:
        return k, v
    whole = gather_tokens(jnp.concatenate([k, v], axis=-1))
    return whole[..., : k.shape[-1]], whole[..., k.shape[-1] :]


def gather_tokens(x: Array) -> Array:
    """Gathers an array [b, t / parts, ...] of the devices that share rows, as [b, t, ...] in order.

    It is called on each device (``sharding.on_each_device``).
    """
    rows, tokens, *rest = x.shape
    every = jax.lax.all_gather(x.reshape(rows, 2, tokens // 2, *rest), AXIS, axis=1)
    return from_zigzag(every, 1).reshape(rows, -1, *rest)


def scatter_keys(d_k: Array, d_v: Array, parts: int) -> tuple[Array, Array]:
    """Adds up the gradients of gathered keys and values over the devices of a row. Each device keeps its part."""
    if parts == 1:
        return d_k, d_v
    blocks = jnp.concatenate([d_k, d_v], axis=-1)
    rows, tokens, *rest = blocks.shape
    of_devices = zigzag(blocks.reshape(rows, 2 * parts, tokens // (2 * parts), *rest), 1)
    own = jax.lax.psum_scatter(of_devices, AXIS, scatter_dimension=1).reshape(rows, tokens // parts, *rest)
    return own[..., : d_k.shape[-1]], own[..., d_k.shape[-1] :]


def own_pairs(table: Int[np.ndarray, "parts pairs 3"]) -> Int[Array, "pairs 3"]:
    """Returns this device's part of a table, whose first axis is over the devices that share a row."""
    every = jnp.asarray(table)
    return every[0] if len(table) == 1 else every[jax.lax.axis_index(AXIS)]


def heads_of_device(parts: int, num_heads: int, kv_heads: int) -> int | None:
    """Returns the number of query heads that each of ``parts`` devices computes if they exchange tokens for heads.

    They are whole groups of query heads, or heads of one group. If the number does not divide ``num_heads``, some
    devices have fewer heads or none, and compute zeros instead. None: there is no such number.

    >>> heads_of_device(8, 32, 8), heads_of_device(8, 12, 2), heads_of_device(3, 32, 8)
    (4, 2, None)
    """
    group = num_heads // kv_heads
    if kv_heads % parts == 0:
        return num_heads // parts
    fewest = -(-num_heads // parts)
    return next((heads for heads in range(fewest, group + 1) if group % heads == 0), None)


def device_heads(num_heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Returns the numbers of query heads and key-value heads of a device. Only whole groups are split over ``tp``."""
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
    heads = heads_of_device(parts, num_heads, kv_heads) or num_heads
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, heads * parts - num_heads), (0, 0)))
    (whole_q,) = whole_tokens([padded], parts)
    own = jnp.minimum(jax.lax.axis_index(AXIS) * heads // (num_heads // kv_heads), kv_heads - 1)
    whole_k, whole_v = (jax.lax.dynamic_slice_in_dim(x, own, 1, axis=2) for x in gather_keys(k, v, parts))
    return whole_q, whole_k, whole_v


def whole_tokens(arrays: list[Array], parts: int) -> list[Array]:
    """Exchanges arrays [b, t / parts, h, ...] for arrays [b, t, h / parts, ...]. They travel as one array.

    It is called on each device (``sharding.on_each_device``).
    """
    rows, tokens = arrays[0].shape[:2]
    of_devices = jnp.concatenate([x.reshape(rows, 2, tokens // 2, parts, -1) for x in arrays], axis=4)
    blocks = from_zigzag(jnp.moveaxis(_all_to_all(jnp.moveaxis(of_devices, 3, 0)), 0, 1), 1)
    ends = np.cumsum([math.prod(x.shape[2:]) // parts for x in arrays])
    split = jnp.split(blocks.reshape(rows, tokens * parts, -1), ends[:-1].tolist(), axis=2)
    return [each.reshape(rows, tokens * parts, -1, *x.shape[3:]) for each, x in zip(split, arrays, strict=True)]


def exchange_back(x: Array, parts: int, num_heads: int) -> Array:
    """Exchanges whole rows of this device's heads [b, t, h', k] for all heads of its tokens [b, t / parts, h, k]."""
    rows, tokens, heads, width = x.shape
    of_devices = zigzag(x.reshape(rows, 2 * parts, tokens // (2 * parts), heads, width), 1)
    own = jnp.moveaxis(_all_to_all(jnp.moveaxis(of_devices, 1, 0)), 0, 3)
    return own.reshape(rows, tokens // parts, heads * parts, width)[:, :, :num_heads]


def _all_to_all(x: Array) -> Array:
    """Sends slice i of the first axis to device i. The result has the slices for this device, by their sender."""
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
