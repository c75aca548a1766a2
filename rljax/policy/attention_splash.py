"""Attention of packed rows on a TPU: splash attention, the Pallas kernel of JAX, with segment ids.

The kernel skips blocks above the diagonal; its table of blocks is cut down here, at run time, by those that share no
segment. It takes no scale: queries are scaled first and rounded to their dtype.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rljax.policy.attention_blocks import OUT_NAME, head_axes, pad_rows, shared_blocks
from rljax.sharding import on_each_device

LANES = 128
"""Of a vector register: a block is a multiple of it, and so must a head's width be."""
MAX_BLOCK = 512


def splash_attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    segment_ids: Int[Array, "b t"],
    *,
    block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b t h k"]:
    """Causal attention inside each segment, as ``rljax.policy.attention.PackedAttention`` says.

    Args:
      q: queries.
      k: keys.
      v: values.
      segment_ids: 0 for padding, otherwise equal for the tokens of one sequence, which stand together.
      block: tokens of a block, a multiple of 128; None: 512, or what a shorter row fills.
      interpret: run the kernel's operations one by one on any backend, slowly.
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
    """The kernel of a row of ``t`` tokens whose pairs of blocks that share no segment are marked as empty."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import CausalMask, MultiHeadMask

    kernel = splash.make_splash_mha(
        MultiHeadMask([CausalMask((t, t))] * num_heads),
        block_sizes=_block_sizes(block),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=OUT_NAME,
        interpret=interpret,
    )
    # A block on the diagonal always counts: a query without any key would divide by zero.
    kept = shared | jnp.eye(t // block, dtype=bool)

    def cut(info: Any) -> Any:
        return info._replace(block_mask=jnp.where(kept[None], info.block_mask, 0))

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash.SplashAttentionKernel(*map(cut, infos), **kernel.kwargs)


def _block_sizes(block: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    forward = {"block_q": block, "block_kv": block, "block_kv_compute": block}
    dkv = {"block_q_dkv": block, "block_kv_dkv": block, "block_kv_dkv_compute": block}
    return BlockSizes(**forward, **dkv, block_q_dq=block, block_kv_dq=block)  # type: ignore[arg-type]
