"""Attention of packed rows on an NVIDIA GPU: cuDNN's flash attention, each segment a sequence of its own.

cuDNN takes a packed row as sequences with offsets and lengths, so that no score across two of them exists. The public
``jax.nn.dot_product_attention`` has no argument for them; the private wrapper below it has, imported only here.
It needs compute capability 9.0 (Hopper) and 16-bit operands.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rljax.policy.attention_blocks import block_attention, head_axes
from rljax.sharding import on_each_device

TOKENS_PER_SEGMENT = 256
"""A row has room for one segment in so many tokens: cuDNN keeps the log-sum-exp of t places for each."""
FEWEST_SEGMENTS = 16
CAPABILITY, CUDNN = "9.0", 91000
"""Least compute capability of a GPU, and the version of cuDNN (9.10) that a program compiled ahead is traced for."""


def max_segments(t: int) -> int:
    """Segments of a row of ``t`` tokens that go through cuDNN."""
    return max(FEWEST_SEGMENTS, t // TOKENS_PER_SEGMENT)


def cudnn_attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    segment_ids: Int[Array, "b t"],
) -> Float[Array, "b t h k"]:
    """Causal attention inside each segment, as ``rljax.policy.attention.PackedAttention`` says.

    A device one of whose rows has more than ``max_segments`` segments computes ``block_attention`` instead. Whether the
    sums of the backward pass are made in the same order each time is the choice of XLA's flag
    ``xla_gpu_deterministic_ops``.

    Args:
      q: queries, bfloat16 or float16.
      k: keys, likewise.
      v: values, likewise.
      segment_ids: 0 for padding, otherwise equal for the tokens of one sequence, which stand together.
    """
    heads = head_axes(k)
    run = on_each_device(_rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(q, k, v, segment_ids)[0]


def _rows(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array]:
    most = max_segments(q.shape[1])
    starts, lengths, count = segment_offsets(segment_ids, most)
    inside = segment_ids > 0
    out = lax.cond(
        jnp.max(count) <= most,
        lambda q, k, v: _cudnn(q, k, v, starts, lengths),
        jax.checkpoint(lambda q, k, v: block_attention(q, k, v, segment_ids)),
        *(_zero_gradient_outside(x, inside) for x in (q, k, v)),
    )
    return (_zero_outside(out, inside),)


# cuDNN leaves the places of padding as it found them, in the output and in the gradients. With the two functions below
# they are 0, and no mask of the heads' shape is kept for the backward pass.


@jax.custom_vjp
def _zero_outside(x: Array, inside: Array) -> Array:
    return jnp.where(inside[:, :, None, None], x, 0)


@jax.custom_vjp
def _zero_gradient_outside(x: Array, inside: Array) -> Array:
    del inside
    return x


def _zero_bwd(inside: Array, d_x: Array) -> tuple[Array, None]:
    return jnp.where(inside[:, :, None, None], d_x, 0), None


_zero_outside.defvjp(lambda x, inside: (_zero_outside(x, inside), inside), _zero_bwd)
_zero_gradient_outside.defvjp(lambda x, inside: (x, inside), _zero_bwd)


def segment_offsets(
    segment_ids: Int[Array, "b t"], most: int
) -> tuple[Int[Array, "b most+1"], Int[Array, "b most"], Int[Array, " b"]]:
    """First token and length of each row's first ``most`` segments, -1 where there is none, and how many it has."""
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    inside = segment_ids > 0
    is_first = inside & (segment_ids != before)
    rank = jnp.cumsum(is_first, axis=1) - 1

    def of_row(inside: Array, is_first: Array, rank: Array) -> tuple[Array, Array]:
        starts = jnp.full(most + 1, -1, jnp.int32)
        starts = starts.at[jnp.where(is_first, rank, most)].set(jnp.arange(len(rank), dtype=jnp.int32))
        lengths = jnp.zeros(most, jnp.int32).at[rank].add(inside.astype(jnp.int32), mode="drop")
        return starts.at[most].set(-1), jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(inside, is_first, rank)
    return starts, lengths, rank[:, -1] + 1


def _cudnn(q: Array, k: Array, v: Array, starts: Array, lengths: Array) -> Array:
    wrapper = _wrapper()
    out: Array = wrapper.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[-1] ** -0.5,
        mask_type=wrapper.MaskType.PADDING_CAUSAL,
    )
    return out


def _wrapper() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
