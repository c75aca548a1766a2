"""From hidden states to the log-probability of each token and the entropy, without the [n, v] table in memory.

The vocabulary is walked in chunks with a running maximum (online log-sum-exp); the backward pass walks it again and
never keeps logits. Values are float32 and exact to rounding: nothing per token is ever rounded to the input dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# 151,936 (Qwen) = 16 x 9,496. A vocabulary up to this size is one chunk.
MAX_CHUNK = 9_496


def vocabulary_chunks(vocab_size: int, max_chunk: int = MAX_CHUNK) -> int:
    """The fewest equal chunks no larger than ``max_chunk``; a vocabulary with no such divisor is one chunk."""
    smallest = -(-vocab_size // max_chunk)
    return next((c for c in range(smallest, min(vocab_size, 4 * smallest) + 1) if vocab_size % c == 0), 1)


def _logits(hidden: Array, table: Array, temperature: float) -> Float[Array, "n c"]:
    return jnp.einsum("nd,cd->nc", hidden, table, preferred_element_type=jnp.float32) / temperature


def _forward(
    hidden: Array, table: Array, targets: Array, temperature: float, chunks: int
) -> tuple[Array, Array, Array]:
    """(log-probability of target, entropy, log-sum-exp), float32 [n] each."""
    n = hidden.shape[0]
    size = table.shape[0] // chunks

    def body(
        state: tuple[Array, Array, Array, Array], chunk: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array, Array, Array], None]:
        top, total, weighted, picked = state
        rows, start = chunk
        logits = _logits(hidden, rows, temperature)
        new_top = jnp.maximum(top, logits.max(axis=-1))
        scale = jnp.exp(top - new_top)
        weights = jnp.exp(logits - new_top[:, None])
        # weighted holds sum(exp(l - top) * (l - top)): shifting top by s moves it by -s * total.
        shifted = jnp.where(total > 0, weighted + (top - new_top) * total, 0.0) * scale
        weighted = shifted + jnp.sum(weights * (logits - new_top[:, None]), axis=-1)
        total = total * scale + weights.sum(axis=-1)
        local = targets - start
        here = (local >= 0) & (local < size)
        value = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, None], axis=-1)[:, 0]
        return (new_top, total, weighted, jnp.where(here, value, picked)), None

    zeros = jnp.zeros((n,), jnp.float32)
    start = (jnp.full((n,), -jnp.finfo(jnp.float32).max), zeros, zeros, zeros)
    chunked = (table.reshape(chunks, size, -1), jnp.arange(chunks) * size)
    (top, total, weighted, picked), _ = jax.lax.scan(body, start, chunked)
    log_total = jnp.log(total)
    return picked - top - log_total, log_total - weighted / total, top + log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(
    hidden: Array, table: Array, targets: Array, temperature: float, chunks: int
) -> tuple[Array, Array]:
    return _forward(hidden, table, targets, temperature, chunks)[:2]


def _token_logprobs_fwd(
    hidden: Array, table: Array, targets: Array, temperature: float, chunks: int
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logprobs, entropy, lse = _forward(hidden, table, targets, temperature, chunks)
    return (logprobs, entropy), (hidden, table, targets, entropy, lse)


def _token_logprobs_bwd(
    temperature: float, chunks: int, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    hidden, table, targets, entropy, lse = saved
    d_logprob, d_entropy = cotangents
    size = table.shape[0] // chunks

    def body(d_hidden: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, start = chunk
        logp = _logits(hidden, rows, temperature) - lse[:, None]
        p = jnp.exp(logp)
        hit = targets[:, None] - start == jnp.arange(size)[None, :]
        # d logp(target)/d logit = 1[target] - p;  d entropy/d logit = -p * (log p + entropy).
        d_logits = d_logprob[:, None] * (hit - p) - d_entropy[:, None] * p * (logp + entropy[:, None])
        d_logits = (d_logits / temperature).astype(rows.dtype)
        d_hidden += jnp.einsum("nc,cd->nd", d_logits, rows, preferred_element_type=jnp.float32)
        d_rows = jnp.einsum("nc,nd->cd", d_logits, hidden, preferred_element_type=jnp.float32)
        return d_hidden, d_rows.astype(rows.dtype)

    chunked = (table.reshape(chunks, size, -1), jnp.arange(chunks) * size)
    d_hidden, d_table = jax.lax.scan(body, jnp.zeros(hidden.shape, jnp.float32), chunked)
    return d_hidden.astype(hidden.dtype), d_table.reshape(table.shape), None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)


def token_logprobs(
    hidden: Float[Array, "*b d"],
    table: Float[Array, "v d"],
    targets: Int[Array, "*b"],
    *,
    temperature: float = 1.0,
    dtype: Any = None,
    max_chunk: int = MAX_CHUNK,
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Log-probability of each target and the entropy of its distribution, both float32.

    Args:
      hidden: states after the final norm.
      table: LM head rows, one per vocabulary entry.
      targets: the tokens whose log-probability is wanted.
      temperature: logits are divided by it first; positive.
      dtype: compute the products in this dtype (``lm_head_dtype``); None keeps that of the inputs. Accumulation is
        float32 either way.
      max_chunk: most vocabulary rows whose logits exist at once.

    Raises:
      ValueError: temperature not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    dtype = dtype or hidden.dtype
    flat = hidden.reshape(-1, hidden.shape[-1]).astype(dtype)
    chunks = vocabulary_chunks(table.shape[0], max_chunk)
    logprobs, entropy = _token_logprobs(flat, table.astype(dtype), targets.reshape(-1), float(temperature), chunks)
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)
