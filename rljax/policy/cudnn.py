"""Attention of packed rows on an NVIDIA GPU by cuDNN's flash attention, with each segment as a sequence.

cuDNN takes a packed row as sequences with offsets and lengths, and computes no score across two of them. The public
``jax.nn.dot_product_attention`` has no arguments for offsets. The private wrapper below it has; only this module
imports it. The kernel needs compute capability 9.0 (Hopper) and 16-bit operands.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from rljax.policy.flash import Ends, KeyBlocks, Queries, block_attention, head_axes
from rljax.sharding import on_each_device

TOKENS_PER_SEGMENT = 256
"""A row may hold one segment for so many tokens. cuDNN keeps a log-sum-exp of the whole row for each segment."""
FEWEST_SEGMENTS = 16
"""The number of segments that a row of any length may hold."""
CAPABILITY, CUDNN = "9.0", 91000
"""The lowest compute capability of a GPU, and the cuDNN version (9.10) for ahead-of-time compilation."""


def max_segments(t: int) -> int:
    """Returns the largest number of segments for which cuDNN computes a row of ``t`` tokens. Padding is one of them."""
    return max(FEWEST_SEGMENTS, t // TOKENS_PER_SEGMENT)


def cudnn_attention(q: Queries, k: KeyBlocks, v: KeyBlocks, ends: Ends) -> Queries:
    """Computes attention along each path: an implementation of ``rljax.policy.attention.PackedAttention``.

    The rows hold sequences that share nothing, so ``ends`` tell the segments apart.
    Queries, keys and values are bfloat16 or float16. The padding of a row counts as a segment, because cuDNN leaves
    tokens outside of all segments unwritten. To set them to 0 would read every head once more. A device with a row of
    more than ``max_segments`` segments computes ``block_attention`` instead. XLA's flag ``xla_gpu_deterministic_ops``
    decides whether the backward pass sums in the same order each time.
    """
    heads = head_axes(k)
    run = on_each_device(_rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(q, k, v, ends)[0]


def _rows(q: Array, k: Array, v: Array, ends: Array) -> tuple[Array]:
    most = max_segments(q.shape[1])
    starts, lengths, count = segment_offsets(ends, most)
    out = lax.cond(
        jnp.max(count) <= most,
        lambda q, k, v: _cudnn(q, k, v, starts, lengths),
        jax.checkpoint(lambda q, k, v: block_attention(q, k, v, ends)),
        *(q, k, v),
    )
    return (out,)


def segment_offsets(
    ends: Int[Array, "b t"], most: int
) -> tuple[Int[Array, "b most+1"], Int[Array, "b most"], Int[Array, " b"]]:
    """Finds the segments of each row. Neighbouring tokens of padding are a segment, too.

    Returns the first token and the length of the first ``most`` segments of each row, -1 where there is no segment; and
    the number of segments of each row.
    """
    before = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    is_first = ends != before
    rank = jnp.cumsum(is_first, axis=1) - 1

    def of_row(is_first: Array, rank: Array) -> tuple[Array, Array]:
        starts = jnp.full(most + 1, -1, jnp.int32)
        starts = starts.at[jnp.where(is_first, rank, most)].set(jnp.arange(len(rank), dtype=jnp.int32))
        lengths = jnp.zeros(most, jnp.int32).at[rank].add(1, mode="drop")
        return starts.at[most].set(-1), jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(is_first, rank)
    return starts, lengths, rank[:, -1] + 1


def _cudnn(q: Array, k: Array, v: Array, starts: Array, lengths: Array) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo

    wrapper: Any = fused_attention_stablehlo
    places = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": starts, "kv_offsets": starts}
    causal = wrapper.MaskType.PADDING_CAUSAL
    out: Array = wrapper.dot_product_attention(q, k, v, **places, scale=q.shape[-1] ** -0.5, mask_type=causal)
    return out
