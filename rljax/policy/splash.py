"""Attention of packed rows on a TPU by splash attention, the Pallas kernel of JAX.

The kernel tells sequences apart by segment ids, and has no mask for trees, which take a call for each level.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.flash import OUT_NAME, Ends, KeyBlocks, Queries, Triple, head_axes, pad_rows, seen_blocks
from rljax.policy.levels import join_levels, two_levels
from rljax.sharding import on_each_device

LANES, _BLOCK = 128, 512
"""The lanes of a TPU's vector register, and the largest block (tokens). The block and the width of a head must be
multiples of the lanes."""


class Call(NamedTuple):
    """The arguments of a call of the kernel for one row. A query sees the keys up to its place that have its id."""

    queries: Int[Array, " t"]  # the id of each query
    keys: Int[Array, " t"]  # the id of each key
    seen: Bool[Array, "n n"]  # the pairs of a query block and a key block that may have equal ids


def splash_attention(
    q: Queries,
    k: KeyBlocks,
    v: KeyBlocks,
    ends: Ends,
    *,
    block: int | None = None,
    interpret: bool = False,
    trees: bool = False,
) -> Queries:
    """Computes attention of packed rows: an implementation of ``rljax.policy.attention.PackedAttention``.

    Without ``trees`` the rows hold sequences that share nothing; with ``trees`` they hold trees of at most two levels.
    The kernel skips the blocks above the diagonal. Pairs of blocks without a query that sees a key are removed from its
    table at run time. The kernel takes no scale, so queries are scaled first and rounded to their dtype. Blocks have
    ``block`` tokens, a multiple of 128. None: 512, or less for a shorter row. With ``interpret`` the operations of the
    kernel run one by one, slowly, on any backend.
    """
    t = q.shape[1]
    block = block or min(_BLOCK, -(-t // LANES) * LANES)
    arrays = pad_rows(block, q, k, v, ends)
    heads = head_axes(k)

    def of_row(q: Array, k: Array, v: Array, ends: Array) -> Float[Array, "t h k"]:
        scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
        q, k, v = (jnp.swapaxes(x, 0, 1) for x in (scaled, k, v))
        return jnp.swapaxes((_trees if trees else _sequences)(q, k, v, ends, block, interpret), 0, 1)

    def rows(*arrays: Array) -> tuple[Array]:
        # Around a single row vmap leaves no loop, and XLA need not copy the kernel's log-sum-exps to read them.
        return (jax.vmap(of_row)(*arrays),)

    run = on_each_device(rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(*arrays)[0][:, :t]


def _sequences(q: Array, k: Array, v: Array, ends: Array, block: int, interpret: bool) -> Float[Array, "h t k"]:
    call = Call(ends, ends, seen_blocks(ends.reshape(-1, block)))
    out: Array = _kernel(q, block, call, interpret)(q, k, v, segment_ids=_segment_ids(call))
    return out


def _trees(q: Array, k: Array, v: Array, ends: Array, block: int, interpret: bool) -> Float[Array, "h t k"]:
    def forward(q: Array, k: Array, v: Array, call: Call) -> tuple[Array, Array]:
        kernel = _kernel(q, block, call, interpret, residuals=True)
        out, (lse,) = kernel(q, k, v, segment_ids=_segment_ids(call))
        return out, lse  # the log-sum-exp of a query without keys is about -1e38

    backward = functools.partial(_backward, block=block, interpret=interpret)
    calls = functools.partial(calls_of_trees, block=block)
    return join_levels(calls, forward, backward, q, k, v, ends)


def calls_of_trees(ends: Int[Array, " t"], block: int) -> list[Call]:
    """Returns the two calls for a row of trees of at most two levels, whose blocks have ``block`` tokens."""
    levels = two_levels(ends)
    of_trees = jnp.where(levels.is_branch, levels.trees, 0), jnp.where(levels.is_root, levels.trees, -1)
    return [Call(*ids, _equal_blocks(*ids, block)) for ids in ((levels.nodes, levels.nodes), of_trees)]


def _equal_blocks(queries: Array, keys: Array, block: int) -> Bool[Array, "n n"]:
    """Marks the pairs of a query block and a key block whose ranges of positive ids overlap."""

    def range_of(ids: Array) -> tuple[Array, Array]:
        ids = ids.reshape(-1, block)
        return jnp.min(jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max), axis=1), jnp.max(ids, axis=1)

    (first_q, last_q), (first_k, last_k) = range_of(queries), range_of(keys)
    return (first_q[:, None] <= last_k[None, :]) & (first_k[None, :] <= last_q[:, None])


def _backward(
    q: Array, k: Array, v: Array, call: Call, out: Array, lse: Array, d_out: Array, *, block: int, interpret: bool
) -> Triple:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    backward: Any = splash._splash_attention_bwd  # its public form refuses a log-sum-exp of several calls
    kernel = _kernel(q, block, call, interpret)
    value, sizes, function = (kernel.kwargs[name] for name in ("mask_value", "block_sizes", "mask_function"))
    saved = (q, k, v, _segment_ids(call), None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
    found = backward(False, value, False, sizes, None, function, None, interpret, saved, d_out)
    d_q, d_k, d_v = found[3:6]
    return d_q, d_k, d_v


def _segment_ids(call: Call) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return SegmentIds(call.queries, call.keys)


def _kernel(q: Float[Array, "h t k"], block: int, call: Call, interpret: bool, *, residuals: bool = False) -> Any:
    """Builds the kernel for a row. Pairs of blocks that ``call.seen`` does not mark are empty.

    ``residuals``: Whether the kernel returns the log-sum-exps, too; then it has no gradient.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask, MultiHeadMask

    num_heads, t, _ = q.shape
    sizes: Any = [block] * 8  # of queries and keys, in the forward and in both backward passes
    kernel = splash.make_splash_mha(
        MultiHeadMask([CausalMask((t, t))] * num_heads),
        block_sizes=splash.BlockSizes(*sizes),
        save_residuals=residuals,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=None if residuals else OUT_NAME,
        interpret=interpret,
    )
    # A block on the diagonal is never empty, because a query without any key would divide by zero. The tables of the
    # backward pass have keys before queries, so the pairs are marked in both orders.
    below = jnp.tril(call.seen)
    kept = below | below.T | jnp.eye(t // block, dtype=bool)

    def cut(info: Any) -> Any:
        return info._replace(block_mask=jnp.where(kept[None], info.block_mask, 0))

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash.SplashAttentionKernel(*map(cut, infos), **kernel.kwargs)
