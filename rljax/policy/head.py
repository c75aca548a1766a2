"""Log-probabilities and entropies of tokens from hidden states, without [n, v] logits in memory.

Forward and backward pass go through the vocabulary in chunks with a running maximum (online log-sum-exp), and keep no
logits. Values of tokens are float32 and never rounded to the input dtype. A chunk takes an equal part of every
vocabulary shard, so a table that is split over ``tp`` is never gathered.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.sharding import axis_size, constrain

# The vocabulary of Qwen is 151,936 = 16 x 9,496. A vocabulary of up to this size is one chunk.
MAX_CHUNK = 9_496
_Sums = tuple[Array, Array, Array, Array]
_Static = tuple[float, int, int]  # temperature, number of chunks, number of vocabulary shards


def vocabulary_chunks(vocab_size: int, max_chunk: int = MAX_CHUNK) -> int:
    """Returns the smallest number of equal chunks of at most ``max_chunk``.

    If no divisor of ``vocab_size`` is between that number and four times it, the result is 1.
    """
    smallest = -(-vocab_size // max_chunk)
    return next((c for c in range(smallest, min(vocab_size, 4 * smallest) + 1) if vocab_size % c == 0), 1)


def matmul_precision(dtype: Any) -> str | None:
    """Returns "highest" for float32, whose products accelerators would round to fewer bits, and else the default."""
    return "highest" if jnp.dtype(dtype) == jnp.float32 else None


def head_operands(hidden: Array, table: Array, dtype: Any) -> tuple[Array, Array]:
    """Casts both to ``dtype`` (None: no cast) without changing the values that they have in their own dtypes.

    A pair of casts is not enough, because XLA may drop it (xla_allow_excess_precision). The product would then use the
    float32 masters instead of the published 16-bit values.
    """
    if dtype is None:
        return hidden, table

    def upcast(x: Array) -> Array:
        kept = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x.astype(dtype), kept.nexp, kept.nmant)

    return upcast(hidden), upcast(table)


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=matmul_precision(b.dtype), preferred_element_type=jnp.float32)


def _logits(hidden: Array, table: Array, temperature: float) -> Float[Array, "n c"]:
    return _product("nd,cd->nc", hidden, table) / temperature


def _split(table: Array, chunks: int, shards: int) -> tuple[Array, Array]:
    """Returns chunks of rows [chunks, c, d], each with an equal part of each shard, and their indices [chunks, c]."""
    v, d = table.shape
    rows = table.reshape(shards, chunks, v // (shards * chunks), d)
    index = jnp.arange(v).reshape(rows.shape[:3])
    rows, index = (jnp.moveaxis(part, 1, 0) for part in (rows, index))
    return constrain(rows.reshape(chunks, -1, d), None, "vocab", "embed"), index.reshape(chunks, -1)


def _gathered(rows: Array) -> Array:
    return constrain(rows, "vocab", None)


def _forward(hidden: Array, table: Array, targets: Array, static: _Static) -> tuple[Array, Array, Array]:
    """Computes the log-probability of the target, the entropy and the log-sum-exp, float32 [n] each."""
    temperature, chunks, shards = static

    def body(state: _Sums, chunk: tuple[Array, Array]) -> tuple[_Sums, None]:
        top, total, weighted, picked = state
        rows, index = _gathered(chunk[0]), chunk[1]
        logits = _logits(hidden, rows, temperature)
        new_top = jnp.maximum(top, logits.max(axis=-1))
        scale = jnp.exp(top - new_top)
        shifted = logits - new_top[:, None]
        weights = jnp.exp(shifted)
        # weighted is sum(exp(l - top) * (l - top)). Raising top by s changes it by -s * total.
        before = jnp.where(total > 0, weighted + (top - new_top) * total, 0.0) * scale
        weighted = before + jnp.sum(weights * shifted, -1)
        total = total * scale + weights.sum(axis=-1)
        picked += jnp.sum(jnp.where(targets[:, None] == index[None, :], logits, 0.0), axis=-1)
        return (new_top, total, weighted, picked), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full(targets.shape, -jnp.finfo(jnp.float32).max), zeros, zeros, zeros)
    (top, total, weighted, picked), _ = jax.lax.scan(body, start, _split(table, chunks, shards))
    log_total = jnp.log(total)
    return picked - top - log_total, log_total - weighted / total, top + log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logprobs(hidden: Array, table: Array, targets: Array, static: _Static) -> tuple[Array, Array]:
    return _forward(hidden, table, targets, static)[:2]


def _token_logprobs_fwd(hidden: Array, table: Array, targets: Array, static: _Static) -> tuple[Any, tuple[Array, ...]]:
    logprobs, entropy, lse = _forward(hidden, table, targets, static)
    return (logprobs, entropy), (hidden, table, targets, entropy, lse)


def _token_logprobs_bwd(static: _Static, saved: tuple[Array, ...], cotangents: Any) -> tuple[Array, Array, None]:
    temperature, chunks, shards = static
    hidden, table, targets, entropy, lse = saved
    d_logprob, d_entropy = cotangents

    def body(d_hidden: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, index = _gathered(chunk[0]), chunk[1]
        logp = _logits(hidden, rows, temperature) - lse[:, None]
        p = jnp.exp(logp)
        hit = targets[:, None] == index[None, :]
        # d logp(target)/d logit = 1[target] - p;  d entropy/d logit = -p * (log p + entropy).
        d_logits = d_logprob[:, None] * (hit - p) - d_entropy[:, None] * p * (logp + entropy[:, None])
        d_logits = (d_logits / temperature).astype(rows.dtype)
        d_hidden += _product("nc,cd->nd", d_logits, rows)
        d_rows = constrain(_product("nc,nd->cd", d_logits, hidden), "vocab", "embed")
        return d_hidden, d_rows.astype(rows.dtype)

    zeros = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, d_rows = jax.lax.scan(body, zeros, _split(table, chunks, shards))
    d_table = jnp.moveaxis(d_rows.reshape(chunks, shards, -1, table.shape[1]), 0, 1)
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
    """Computes the log-probability of each target and the entropy of its distribution, both float32 (nats).

    Args:
      hidden: The states after the final norm.
      table: The rows of the LM head, one for each vocabulary entry.
      temperature: The divisor of the logits, positive.
      dtype: The dtype of the operands of forward and backward products (``precision.lm_head_dtype``), cast by
        ``head_operands``. None: the dtypes of the inputs. Sums and logits are always float32.
      max_chunk: The largest number of vocabulary rows, on each vocabulary shard, whose logits are in memory at once.

    Raises:
      ValueError: The temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    flat, table = head_operands(hidden.reshape(-1, hidden.shape[-1]), table, dtype)
    shards = axis_size("vocab")
    if table.shape[0] % shards:  # The table is not split.
        shards = 1
    chunks = vocabulary_chunks(table.shape[0] // shards, max_chunk)
    logprobs, entropy = _token_logprobs(flat, table, targets.reshape(-1), (float(temperature), chunks, shards))
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)
