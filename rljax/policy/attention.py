"""Grouped-query attention over packed rows and over a key-value cache; scores and softmax in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.attention_blocks import block_attention

ONE_PIECE = 1024
"""Longest row (tokens) whose scores exist all at once."""
_MASKED = -1e30


def segment_mask(segment_ids: Int[Array, "b t"]) -> Bool[Array, "b t t"]:
    """Causal inside each segment: ``mask[b, i, j]`` says that token i attends to token j."""
    t = segment_ids.shape[1]
    causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
    return causal[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attend(
    q: Float[Array, "b t h k"], k: Float[Array, "b s g k"], v: Float[Array, "b s g k"], mask: Bool[Array, "b t s"]
) -> Float[Array, "b t h k"]:
    """Softmax attention of h query heads on g key-value heads (h a multiple of g), head i on key-value head i // (h/g).

    Works on any backend and any float dtype: the contractions accumulate in float32. A query whose mask is empty
    attends to all tokens equally; the caller must mask its output.
    """
    b, t, h, d = q.shape
    groups = k.shape[2]
    grouped = q.reshape(b, t, groups, h // groups, d)
    scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, k, preferred_element_type=jnp.float32) * d**-0.5
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrts,bsgk->btgrk", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, h, d).astype(q.dtype)


def packed_attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g k"],
    segment_ids: Int[Array, "b t"],
) -> Float[Array, "b t h k"]:
    """Causal attention inside each segment of packed rows, on any backend.

    Rows of up to ``ONE_PIECE`` tokens are computed in one piece, longer ones block by block (``block_attention``). The
    output of a padding token is finite and means nothing.
    """
    if q.shape[1] <= ONE_PIECE:
        return attend(q, k, v, segment_mask(segment_ids))
    return block_attention(q, k, v, segment_ids)
