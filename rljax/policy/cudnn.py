"""Attention of packed rows on an NVIDIA GPU by cuDNN's flash attention, with each segment as a sequence.

cuDNN takes a packed row as sequences with offsets and lengths, and computes no score across two of them. The public
``jax.nn.dot_product_attention`` has no arguments for offsets. The private wrapper below it has; only this module
imports it. The kernel needs 16-bit operands and a compute capability from 9.0 (Hopper) to 11.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.flash import Ends, KeyBlocks, Queries, Triple, block_attention, head_axes
from rljax.policy.levels import join_levels, number_runs, two_levels
from rljax.sharding import on_each_device

TOKENS_PER_SEGMENT, TOKENS_PER_NODE = 256, 64
"""A row may hold one segment for every 256 of its tokens, or one node of a tree for every 64. cuDNN keeps log-sum-exps
of a whole row's length for each segment, but for a node only for a short time."""
FEWEST_SEGMENTS = 16
"""The number of segments that a row of any length may hold."""
_NO_KEYS = -1e38
CAPABILITY, CUDNN = "9.0", 91000
"""The lowest compute capability of a GPU, and the cuDNN version (9.10) for ahead-of-time compilation."""


def max_segments(t: int, *, trees: bool = False) -> int:
    """Returns the most segments, or nodes of ``trees``, of a row of ``t`` tokens that cuDNN computes, with padding."""
    return max(FEWEST_SEGMENTS, t // (TOKENS_PER_NODE if trees else TOKENS_PER_SEGMENT))


class Spans(NamedTuple):
    """Contiguous tokens of each row, one span for each of its sequences."""

    starts: Int[Array, "b most+1"]  # the first token of each span; -1 where there is no span, and at the end
    lengths: Int[Array, "b most"]  # the tokens of each span; -1 where there is no span


class LevelCall(NamedTuple):
    """The arguments of a call of cuDNN, in which the queries of a sequence see the keys of the same sequence."""

    queries: Spans
    keys: Spans
    mask: str  # "PADDING_CAUSAL" if a query sees the keys up to its own place in the sequence, "PADDING" if it sees all
    ranks: Int[Array, "b t"]  # the number of each token's sequence in its row
    is_query: Bool[Array, "b t"]  # whether the token's query is in the call
    is_key: Bool[Array, "b t"]  # whether the token's key is in the call


def cudnn_attention(q: Queries, k: KeyBlocks, v: KeyBlocks, ends: Ends, *, trees: bool = False) -> Queries:
    """Computes attention of packed rows: an implementation of ``rljax.policy.attention.PackedAttention``.

    Without ``trees`` the rows hold sequences that share nothing; with ``trees`` they hold trees of at most two levels.
    Queries, keys and values are bfloat16 or float16. The padding of a row counts as a segment, because cuDNN leaves
    tokens outside of all segments unwritten. To set them to 0 would read every head once more. A device with a row of
    more than ``max_segments`` segments computes ``block_attention`` instead. XLA's flag ``xla_gpu_deterministic_ops``
    decides whether the backward pass sums in the same order each time.
    """
    heads = head_axes(k)
    rows = functools.partial(_rows, trees=trees)
    run = on_each_device(rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(q, k, v, ends)[0]


def _rows(q: Array, k: Array, v: Array, ends: Array, *, trees: bool) -> tuple[Array]:
    most = max_segments(q.shape[1], trees=trees)
    nodes, count = call_of_segments(ends, most)

    def by_cudnn(q: Array, k: Array, v: Array) -> Any:
        if not trees:
            return _call(q, k, v, nodes)
        return join_levels(functools.partial(calls_of_trees, most=most), _forward, _backward, q, k, v, ends)

    in_blocks = jax.checkpoint(lambda q, k, v: block_attention(q, k, v, ends))
    return (lax.cond(jnp.max(count) <= most, by_cudnn, in_blocks, q, k, v),)


def spans_of(ranks: Int[Array, "b t"], inside: Bool[Array, "b t"], most: int) -> Spans:
    """Returns the span of the tokens ``inside`` with each rank below ``most``; tokens of other ranks are left out."""

    def of_row(ranks: Array, inside: Array) -> Spans:
        which, t = jnp.where(inside, ranks, most), ranks.shape[0]
        starts = jnp.full(most + 1, t, jnp.int32).at[which].min(jnp.arange(t, dtype=jnp.int32), mode="drop")
        lengths = jnp.zeros(most, jnp.int32).at[which].add(1, mode="drop")
        is_there = lengths > 0
        return Spans(jnp.where(jnp.pad(is_there, (0, 1)), starts, -1), jnp.where(is_there, lengths, -1))

    return jax.vmap(of_row)(ranks, inside)


def call_of_segments(ends: Int[Array, "b t"], most: int) -> tuple[LevelCall, Int[Array, " b"]]:
    """Returns the call in which each token sees its own segment, and the number of segments of each row.

    Only the first ``most`` segments of a row are in the call. Neighbouring tokens of padding are a segment, too.
    """
    ranks, every = number_runs(ends) - 1, jnp.ones(ends.shape, bool)
    spans = spans_of(ranks, every, most)
    return LevelCall(spans, spans, "PADDING_CAUSAL", ranks, every, every), ranks[:, -1] + 1


def calls_of_trees(ends: Int[Array, "b t"], most: int) -> list[LevelCall]:
    """Returns the two calls for rows of trees of at most two levels, which have at most ``most`` nodes."""
    levels = two_levels(ends)
    trees = levels.trees - 1
    branches = spans_of(trees, levels.is_branch, most)
    is_key = levels.is_root & (jnp.take_along_axis(branches.lengths, trees, axis=1, mode="fill", fill_value=-1) > 0)
    roots = spans_of(trees, is_key, most)
    nodes, _ = call_of_segments(ends, most)
    return [nodes, LevelCall(branches, roots, "PADDING", trees, levels.is_branch, is_key)]


def _call(q: Array, k: Array, v: Array, call: LevelCall, **residuals: bool) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    wrapper: Any = fused_attention_stablehlo
    (q_offsets, q_seqlen), (kv_offsets, kv_seqlen) = call.queries, call.keys
    places = {"q_seqlen": q_seqlen, "kv_seqlen": kv_seqlen, "q_offsets": q_offsets, "kv_offsets": kv_offsets}
    settings = {"scale": q.shape[-1] ** -0.5, "mask_type": wrapper.MaskType[call.mask]}
    return wrapper.dot_product_attention(q, k, v, **places, **settings, **residuals)


def _forward(q: Array, k: Array, v: Array, call: LevelCall) -> tuple[Array, Float[Array, "b t h"]]:
    # For each sequence of all rows, one after another, cuDNN gives the log-sum-exps of its queries from place 0 on.
    out, of_sequences = _call(q, k, v, call, return_residual=True)
    numbers = (jnp.cumsum(call.queries.lengths.reshape(-1) > 0) - 1).reshape(call.queries.lengths.shape)
    number = jnp.take_along_axis(numbers, call.ranks, axis=1, mode="clip")
    place = jnp.arange(q.shape[1])[None] - jnp.take_along_axis(call.queries.starts, call.ranks, axis=1, mode="clip")
    lse = of_sequences[jnp.where(call.is_query, number, 0), :, jnp.where(call.is_query, place, 0)]
    is_query = call.is_query[..., None]
    return jnp.where(is_query[..., None], out, 0), jnp.where(is_query, lse, _NO_KEYS)


def _backward(q: Array, k: Array, v: Array, call: LevelCall, out: Array, lse: Array, d_out: Array) -> Triple:
    from jax._src.cudnn import fused_attention_stablehlo

    wrapper: Any = fused_attention_stablehlo
    (b, most), t = call.queries.lengths.shape, q.shape[1]
    (sequences,) = jnp.nonzero(call.queries.lengths.reshape(-1) > 0, size=b * most, fill_value=0)
    starts = call.queries.starts[:, :-1].reshape(-1)[sequences]
    places = jnp.clip(starts[:, None] + jnp.arange(t)[None], 0, t - 1)
    of_sequences = jnp.swapaxes(lse[(sequences // most)[:, None], places], 1, 2)
    none = jnp.zeros(0, q.dtype)
    spans = (call.queries.lengths, call.keys.lengths, call.queries.starts, call.keys.starts)
    # From jax 0.12 on there is one more argument.
    modified = {"score_mod": None} if "score_mod" in inspect.signature(wrapper.dot_product_attention).parameters else {}
    found = wrapper._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, none, *spans, none, none, of_sequences, out, d_out),
        scale=q.shape[-1] ** -0.5,
        **{"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "sliding_window_length": None},
        mask_type=wrapper.MaskType[call.mask],
        layout=wrapper.AttentionLayout.BTNH.value,
        **modified,
    )
    written = (call.is_query, call.is_key, call.is_key)
    d_q, d_k, d_v = (jnp.where(is_in[..., None, None], x, 0) for x, is_in in zip(found, written, strict=True))
    return d_q, d_k, d_v
