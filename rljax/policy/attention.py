"""Grouped-query attention over packed rows and over a key-value cache; scores and softmax in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Above this many query positions a row's scores are computed, and recomputed, in chunks: memory t * chunk, not t * t.
QUERY_CHUNK = 1024
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
    """Causal attention inside each segment of packed rows.

    Rows longer than ``QUERY_CHUNK`` (and a multiple of it) go through query chunks that are recomputed in the backward
    pass; shorter ones in one piece.
    """
    t = q.shape[1]
    if t <= QUERY_CHUNK or t % QUERY_CHUNK:
        return attend(q, k, v, segment_mask(segment_ids))
    key_index = jnp.arange(t)

    @jax.checkpoint
    def one_chunk(start: Int[Array, ""]) -> Float[Array, "b c h k"]:
        query = jax.lax.dynamic_slice_in_dim(q, start, QUERY_CHUNK, axis=1)
        segment = jax.lax.dynamic_slice_in_dim(segment_ids, start, QUERY_CHUNK, axis=1)
        causal = (start + jnp.arange(QUERY_CHUNK))[:, None] >= key_index[None, :]
        return attend(query, k, v, causal[None] & (segment[:, :, None] == segment_ids[:, None, :]))

    chunks = jax.lax.map(one_chunk, jnp.arange(0, t, QUERY_CHUNK))
    return jnp.moveaxis(chunks, 0, 1).reshape(q.shape)
