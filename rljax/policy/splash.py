"""Attention of packed rows on a TPU by splash attention, the Pallas kernel of JAX.

The kernel tells sequences apart by segment ids, and has no mask for trees. A tree of two levels, a root and its
branches, takes two calls: each node sees itself, and each branch sees its root. Their outputs are joined by their
log-sum-exps. The backward pass calls the kernel's backward with the joined output and log-sum-exp, which determine the
probabilities of all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.flash import (
    LSE_NAME,
    OUT_NAME,
    Ends,
    KeyBlocks,
    Queries,
    head_axes,
    pad_ends,
    pad_rows,
    seen_blocks,
)
from rljax.sharding import on_each_device

LANES, _BLOCK = 128, 512
"""The lanes of a TPU's vector register, and the largest block (tokens). The block and the width of a head must be
multiples of the lanes."""


class Call(NamedTuple):
    """A call of the kernel for one row: a query sees the earlier keys that have its id."""

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
    """Computes ``rljax.policy.attention.PackedAttention``.

    Without ``trees`` the rows hold sequences that share nothing; with ``trees`` they hold trees of at most two levels.
    The kernel skips the blocks above the diagonal. Pairs of blocks without a query that sees a key are removed from its
    table at run time. The kernel takes no scale, so queries are scaled first and rounded to their dtype. Blocks have
    ``block`` tokens, a multiple of 128. None: 512, or less for a shorter row. With ``interpret`` the operations of the
    kernel run one by one, slowly, on any backend.
    """
    t = q.shape[1]
    block = block or min(_BLOCK, -(-t // LANES) * LANES)
    arrays = (*pad_rows(block, q, k, v), pad_ends(block, ends))
    heads = head_axes(k)
    of_row: Callable[..., Array] = _tree_row if trees else _row

    def rows(*arrays: Array) -> tuple[Array]:
        # Around a single row vmap leaves no loop, and XLA need not copy the kernel's log-sum-exps to read them.
        return (jax.vmap(lambda *row: of_row(*row, block, interpret))(*arrays),)

    run = on_each_device(rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(*arrays)[0][:, :t]


def _row(q: Array, k: Array, v: Array, ends: Array, block: int, interpret: bool) -> Float[Array, "t h k"]:
    call = Call(ends, ends, seen_blocks(ends.reshape(-1, block)))
    out = _kernel(q, block, call, interpret)(*_by_heads(_scaled(q), k, v), segment_ids=_segment_ids(call))
    return jnp.swapaxes(out, 0, 1)


def calls_of_trees(ends: Int[Array, " t"], block: int) -> list[Call]:
    """Returns the two calls for a row of trees of at most two levels, whose blocks have ``block`` tokens.

    Neighbours in a node have equal ends. All tokens of a tree lie before the end of its first token.
    """
    before = jnp.pad(ends, (1, 0), constant_values=-1)[:-1]
    node = jnp.cumsum(ends != before)
    tree_end = jax.lax.cummax(ends)
    is_first = (tree_end != jnp.pad(tree_end, (1, 0), constant_values=-1)[:-1]) & (ends > 0)
    is_root = (node == jax.lax.cummax(jnp.where(is_first, node, 0))) & (ends > 0)
    inside = (ends > 0) & ~is_root
    queries, keys = jnp.where(inside, tree_end, 0), jnp.where(is_root, tree_end, -1)
    return [
        Call(node, node, _equal_blocks(node, node, block)),
        Call(queries, keys, _equal_blocks(queries, keys, block)),
    ]


def _equal_blocks(queries: Array, keys: Array, block: int) -> Bool[Array, "n n"]:
    """Marks the pairs of a query block and a key block whose ranges of positive ids overlap."""

    def range_of(ids: Array) -> tuple[Array, Array]:
        ids = ids.reshape(-1, block)
        return jnp.min(jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max), axis=1), jnp.max(ids, axis=1)

    (first_q, last_q), (first_k, last_k) = range_of(queries), range_of(keys)
    return (first_q[:, None] <= last_k[None, :]) & (first_k[None, :] <= last_q[:, None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tree_row(q: Array, k: Array, v: Array, ends: Array, block: int, interpret: bool) -> Float[Array, "t h k"]:
    return _tree_row_fwd(q, k, v, ends, block, interpret)[0]


def _tree_row_fwd(
    q: Array, k: Array, v: Array, ends: Array, block: int, interpret: bool
) -> tuple[Array, tuple[Array, ...]]:
    arrays = _by_heads(_scaled(q), k, v)
    outs, sums = [], []
    for call in calls_of_trees(ends, block):
        out, (lse,) = _kernel(q, block, call, interpret, residuals=True)(*arrays, segment_ids=_segment_ids(call))
        outs.append(out.astype(jnp.float32))
        sums.append(lse)
    # A query without keys in a call has a log-sum-exp there of about -1e38, and so no weight.
    lse = jnp.logaddexp(*sums)
    out = sum(each * jnp.exp(part - lse)[..., None] for each, part in zip(outs, sums, strict=True)).astype(q.dtype)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return jnp.swapaxes(out, 0, 1), (q, k, v, ends, out, lse)


def _tree_row_bwd(
    block: int, interpret: bool, saved: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    backward: Any = splash._splash_attention_bwd  # its public form refuses a log-sum-exp of several calls
    q, k, v, ends, out, lse = saved
    d_heads = jnp.swapaxes(d_out, 0, 1)
    grads = []
    for call in calls_of_trees(ends, block):
        kernel = _kernel(q, block, call, interpret)
        settings = kernel.kwargs
        infos = (kernel.dq_mask_info, kernel.dkv_mask_info)
        saved_there = (*_by_heads(_scaled(q), k, v), _segment_ids(call), None, out, lse, *infos)
        found = backward(
            False,
            settings["mask_value"],
            False,
            settings["block_sizes"],
            None,
            settings["mask_function"],
            None,
            interpret,
            saved_there,
            d_heads,
        )
        grads.append([x.astype(jnp.float32) for x in found[3:6]])
    d_q, d_k, d_v = (jnp.swapaxes(a + b, 0, 1) for a, b in zip(*grads, strict=True))
    return (d_q * q.shape[-1] ** -0.5).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_tree_row.defvjp(_tree_row_fwd, _tree_row_bwd)


def _scaled(q: Array) -> Array:
    return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)


def _by_heads(*arrays: Float[Array, "t h k"]) -> tuple[Float[Array, "h t k"], ...]:
    return tuple(jnp.swapaxes(x, 0, 1) for x in arrays)


def _segment_ids(call: Call) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return SegmentIds(call.queries, call.keys)


def _kernel(q: Float[Array, "t h k"], block: int, call: Call, interpret: bool, *, residuals: bool = False) -> Any:
    """Builds the kernel for a row. Pairs of blocks that ``call.seen`` does not mark are empty.

    ``residuals``: Whether the kernel returns the log-sum-exps, too; then it has no gradient.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask, MultiHeadMask

    t, num_heads, _ = q.shape
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
