"""Attention of packed rows on a TPU by splash attention, the Pallas kernel of JAX, with segment ids.

The kernel skips the blocks above the diagonal. At run time, this module also removes pairs of blocks that share no
segment from its table. The kernel takes no scale, so queries are scaled first and rounded to their dtype.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rljax.policy.flash import OUT_NAME, Keys, Queries, SegmentIds, head_axes, pad_rows, shared_blocks
from rljax.sharding import on_each_device

LANES = 128
"""The lanes of a vector register. The block size and the width of a head must be multiples of it."""
MAX_BLOCK = 512


def splash_attention(
    q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, block: int | None = None, interpret: bool = False
) -> Queries:
    """Computes causal attention inside each segment: an implementation of ``rljax.policy.attention.PackedAttention``.

    Args:
      block: The block size in tokens, a multiple of 128. None: 512, or less for a shorter row.
      interpret: Whether to run the operations of the kernel one by one, slowly, on any backend.
    """
    t = q.shape[1]
    block = block or min(MAX_BLOCK, -(-t // LANES) * LANES)
    arrays = pad_rows(block, q, k, v, segment_ids)
    heads = head_axes(k)

    def rows(*arrays: Array) -> tuple[Array]:
        return (lax.map(lambda row: _row(row, block, interpret), arrays),)

    run = on_each_device(rows, (heads, heads, heads, ("rows", "tokens")), (heads,), rows=q.shape[0])
    return run(*arrays)[0][:, :t]


def _row(arrays: tuple[Array, ...], block: int, interpret: bool) -> Float[Array, "t h k"]:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    q, k, v, segment_ids = arrays
    kernel = _kernel(q.shape[0], q.shape[1], block, shared_blocks(segment_ids.reshape(-1, block)), interpret)
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    out = kernel(*(jnp.swapaxes(x, 0, 1) for x in (scaled, k, v)), segment_ids=SegmentIds(segment_ids, segment_ids))
    return jnp.swapaxes(out, 0, 1)


def _kernel(t: int, num_heads: int, block: int, shared: Array, interpret: bool) -> Any:
    """Builds the kernel for a row of ``t`` tokens. Pairs of blocks that share no segment are marked as empty."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask, MultiHeadMask

    sizes: Any = [block] * 8  # of queries and keys, in the forward and in both backward passes
    kernel = splash.make_splash_mha(
        MultiHeadMask([CausalMask((t, t))] * num_heads),
        block_sizes=splash.BlockSizes(*sizes),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=OUT_NAME,
        interpret=interpret,
    )
    # A block on the diagonal is never empty, because a query without any key would divide by zero.
    kept = shared | jnp.eye(t // block, dtype=bool)

    def cut(info: Any) -> Any:
        return info._replace(block_mask=jnp.where(kept[None], info.block_mask, 0))

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash.SplashAttentionKernel(*map(cut, infos), **kernel.kwargs)
