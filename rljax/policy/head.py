"""Log-probabilities and entropies of tokens from hidden states, without [n, v] logits in memory.

Forward and backward pass go through the vocabulary in chunks with a running maximum (online log-sum-exp). They keep no
logits. Only a CPU keeps the logits of few tokens. Values of tokens are float32 and never rounded to the input dtype. A
chunk takes an equal part of every vocabulary shard, so a table that is split over ``tp`` is never gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.policy.layers import opaque
from rljax.sharding import axis_size, constrain, gradient_sum_dtype

# The vocabulary of Qwen is 151,936 = 16 x 9,496. A vocabulary of up to this size is one chunk.
MAX_CHUNK = 9_496
MAX_STORED = 2**27
"""The largest number of logits that a CPU keeps for the backward pass (512 MiB). It computes more of them again."""
_Chunk = tuple[Array, Array, Array | None]  # rows [c, d], their indices [c], and their logits [n, c] if they are kept


class TokenScores(NamedTuple):
    """The scores of tokens, float32, and other results of a forward. A value that was not asked for is None."""

    logprobs: Float[Array, "*b"]  # the log-probability of each target (nats)
    entropy: Any = None  # float32 [*b], the entropy of each target's distribution (nats)
    tops: Float[Array, "*b k"] | None = None  # the log-probabilities of given ids (nats); -inf for no token
    collision: Float[Array, "*b"] | None = None  # the sum of the squared probabilities of all tokens, without gradient
    stats: Any = None  # the ``ForwardStats`` of a forward over packed rows
    # The log-probabilities of all tokens that may follow each place, without gradient. Only ``ExactPass`` gives them.
    log_softmax: Float[Array, "*b v"] | None = None
    routes: Any = None  # the ``PackedBatch.routes`` that the forward chose


class _Static(NamedTuple):
    """The arguments that are the same for all tokens."""

    temperature: float
    chunks: int
    shards: int  # the number of vocabulary shards
    collision: bool  # whether to add up squares
    stored: bool  # the value of ``Kernels.stored_logits``
    sums_in: Any  # the dtype in which devices add up the gradient of the table


class _Sums(NamedTuple):
    """The sums over the chunks so far, for each token; None where they were not asked for."""

    top: Array  # the largest logit so far
    total: Array  # the sum of exp(l - top)
    weighted: Array  # the sum of exp(l - top) * (l - top)
    picked: Array  # the logit of the target
    tops: Array | None  # the logits of the ids [n, k]
    squares: Array | None  # the sum of exp(l - top) ** 2


def vocabulary_chunks(vocab_size: int, max_chunk: int = MAX_CHUNK) -> int:
    """Returns the smallest number of equal chunks of a vocabulary, with at most ``max_chunk`` entries each.

    The number is at most four times ``ceil(vocab_size / max_chunk)``. If there is none, the result is 1.
    """
    smallest = -(-vocab_size // max_chunk)
    return next((c for c in range(smallest, min(vocab_size, 4 * smallest) + 1) if vocab_size % c == 0), 1)


def are_few_logits(tokens: int, vocab_size: int) -> bool:
    """Returns whether a CPU keeps the logits of this number of tokens for the backward pass."""
    return tokens * vocab_size <= MAX_STORED


def matmul_precision(dtype: Any) -> str | None:
    """Returns the precision of products in ``dtype``: "highest" for float32, which would be rounded, else None."""
    return "highest" if jnp.dtype(dtype) == jnp.float32 else None


def head_operands(hidden: Array, table: Array, dtype: Any) -> tuple[Array, Array]:
    """Casts both arrays to ``dtype`` (None: no cast), from the values that they have in their own dtypes.

    Two casts in succession are not enough, because XLA may drop both (xla_allow_excess_precision). The product would
    then use the float32 masters instead of the published 16-bit values.
    """
    if dtype is None:
        return hidden, table

    def upcast(x: Array) -> Array:
        kept = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x.astype(dtype), kept.nexp, kept.nmant)

    return upcast(hidden), upcast(table)


def _product(spec: str, a: Array, b: Array, dtype: Any = jnp.float32) -> Array:
    return jnp.einsum(spec, a, b, precision=matmul_precision(b.dtype), preferred_element_type=dtype)


def _logits(hidden: Array, table: Array, temperature: float) -> Float[Array, "n c"]:
    return _product("nd,cd->nc", hidden, table) / temperature


def all_logits(hidden: Float[Array, "n d"], table: Float[Array, "v d"], dtype: Any = None) -> Float[Array, "n v"]:
    """Computes the logits of the whole vocabulary, float32. ``dtype``: The argument of ``head_operands``."""
    return _logits(*head_operands(hidden, table, dtype), 1.0)


def _split(table: Array, chunks: int, shards: int) -> tuple[Array, Array]:
    """Returns chunks of rows [chunks, c, d], each with an equal part of each shard, and their indices [chunks, c]."""
    v, d = table.shape
    rows = table.reshape(shards, chunks, v // (shards * chunks), d)
    index = jnp.arange(v).reshape(rows.shape[:3])
    rows, index = (jnp.moveaxis(part, 1, 0) for part in (rows, index))
    return constrain(rows.reshape(chunks, -1, d), None, "vocab", "embed"), index.reshape(chunks, -1)


def _gathered(rows: Array) -> Array:
    return constrain(rows, "vocab", None)


def _places(ids: Array, index: Array, vocab_size: int, shards: int) -> Array:
    """Returns the index of each id in each shard's piece of a chunk, int32 [n, shards, k].

    ``index`` [c] has the ids of the chunk: successive ids from ``index[0]`` on in each shard, one shard after another.
    The result is the width of a piece where the piece lacks the id.
    """
    of_shard, width = vocab_size // shards, len(index) // shards
    shard, within = ids // of_shard, ids % of_shard - index[0]
    is_here = _known(ids, vocab_size) & (within >= 0) & (within < width)
    is_in = is_here[:, None, :] & (shard[:, None, :] == jnp.arange(shards)[None, :, None])
    return jnp.where(is_in, within[:, None, :], width)


def _known(ids: Array, vocab_size: int) -> Array:
    return (ids >= 0) & (ids < vocab_size)


def _pick(logits: Array, places: Array) -> Array:
    """Returns the logit [n, k] of each id in the chunk, by its index in ``places``; 0 if the chunk lacks it."""
    # No operation crosses the parts. XLA's partitioner ends the process at a gather from parts of several devices if
    # another mesh axis is manual.
    parts = logits.reshape(*places.shape[:2], -1)
    return _over_parts(lambda part, at: part.at[at].get(mode="fill", fill_value=0.0))(parts, places).sum(axis=1)


def _add_at(logits: Array, places: Array, values: Array) -> Array:
    """Adds ``values`` [n, k] to the logits of the ids, by their indices in ``places``."""
    parts, every = logits.reshape(*places.shape[:2], -1), jnp.broadcast_to(values[:, None, :], places.shape)
    added = _over_parts(lambda part, at, value: part.at[at].add(value, mode="drop"))(parts, places, every)
    return added.reshape(logits.shape)


def _over_parts(f: Callable[..., Array]) -> Callable[..., Array]:
    return jax.vmap(jax.vmap(f))


def _forward(
    hidden: Array, table: Array, targets: Array, ids: Array | None, static: _Static, keep: bool = False
) -> tuple[TokenScores, Array, Array | None]:
    """Computes the scores of the targets, the log-sum-exp, float32 [n], and the logits [chunks, n, c] to ``keep``."""
    temperature, chunks, shards, collision, stored, _ = static

    def body(state: _Sums, chunk: tuple[Array, Array]) -> tuple[_Sums, Array | None]:
        top, total, weighted, picked, tops, squares = state
        rows, index = _gathered(chunk[0]), chunk[1]
        (logits,) = opaque(_logits(hidden, rows, temperature))  # the sums below read them
        new_top = jnp.maximum(top, logits.max(axis=-1))
        scale = jnp.exp(top - new_top)
        shifted = logits - new_top[:, None]
        weights = jnp.exp(shifted)
        # weighted is sum(exp(l - top) * (l - top)). Raising top by s changes it by -s * total.
        before = jnp.where(total > 0, weighted + (top - new_top) * total, 0.0) * scale
        weighted = before + jnp.sum(weights * shifted, -1)
        total = total * scale + weights.sum(axis=-1)
        if stored:
            picked += _pick(logits, _places(targets[:, None], index, table.shape[0], shards))[:, 0]
        else:
            picked += jnp.sum(jnp.where(targets[:, None] == index[None, :], logits, 0.0), axis=-1)
        if ids is not None and tops is not None:
            tops = tops + _pick(logits, _places(ids, index, table.shape[0], shards))
        if squares is not None:
            squares = squares * scale**2 + jnp.sum(weights**2, axis=-1)
        return _Sums(new_top, total, weighted, picked, tops, squares), logits if keep else None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = _Sums(
        jnp.full(targets.shape, -jnp.finfo(jnp.float32).max),
        *(zeros, zeros, zeros),
        tops=None if ids is None else jnp.zeros(ids.shape, jnp.float32),
        squares=zeros if collision else None,
    )
    sums, logits = jax.lax.scan(body, start, _split(table, chunks, shards))
    log_total = jnp.log(sums.total)
    logprobs, entropy = sums.picked - sums.top - log_total, log_total - sums.weighted / sums.total
    lse = sums.top + log_total
    scores = TokenScores(logprobs, entropy)
    if ids is not None and sums.tops is not None:
        tops = sums.tops - sums.top[:, None] - log_total[:, None]
        scores = scores._replace(tops=jnp.where(_known(ids, table.shape[0]), tops, -jnp.inf))
    if sums.squares is not None:
        scores = scores._replace(collision=sums.squares / sums.total**2)
    return scores, lse, logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _token_logprobs(hidden: Array, table: Array, targets: Array, ids: Array | None, static: _Static) -> TokenScores:
    return _forward(hidden, table, targets, ids, static)[0]


def _token_logprobs_fwd(
    hidden: Array, table: Array, targets: Array, ids: Array | None, static: _Static
) -> tuple[TokenScores, tuple[Any, ...]]:
    keep = static.stored and are_few_logits(targets.size, table.shape[0])
    scores, lse, logits = _forward(hidden, table, targets, ids, static, keep=keep)
    return scores, (hidden, table, targets, ids, scores.entropy, lse, logits)


def _token_logprobs_bwd(
    static: _Static, saved: tuple[Any, ...], cotangents: TokenScores
) -> tuple[Array, Array, None, None]:
    temperature, chunks, shards, *_ = static
    hidden, table, targets, ids, entropy, lse, kept = saved
    d_logprob, d_entropy = cotangents.logprobs, cotangents.entropy
    # An id that is not in the vocabulary has no gradient, even if its cotangent is NaN.
    d_tops = None if cotangents.tops is None else jnp.where(_known(ids, table.shape[0]), cotangents.tops, 0.0)

    def body(d_hidden: Array, chunk: _Chunk) -> tuple[Array, Array]:
        rows, index, logits = _gathered(chunk[0]), *chunk[1:]
        logp = (_logits(hidden, rows, temperature) if logits is None else logits) - lse[:, None]
        p = jnp.exp(logp)
        hit = targets[:, None] == index[None, :]
        # d logp(target)/d logit = 1[target] - p;  d entropy/d logit = -p * (log p + entropy).
        d_logits = d_logprob[:, None] * (hit - p) - d_entropy[:, None] * p * (logp + entropy[:, None])
        if d_tops is not None:
            d_logits = d_logits - d_tops.sum(axis=-1, keepdims=True) * p
            d_logits = _add_at(d_logits, _places(ids, index, table.shape[0], shards), d_tops)
        d_logits = (d_logits / temperature).astype(rows.dtype)
        d_hidden += _product("nc,cd->nd", d_logits, rows)
        d_rows = constrain(_product("nc,nd->cd", d_logits, hidden, static.sums_in), "vocab", "embed")
        return d_hidden, d_rows.astype(rows.dtype)

    zeros = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, d_rows = jax.lax.scan(body, zeros, (*_split(table, chunks, shards), kept))
    d_table = jnp.moveaxis(d_rows.reshape(chunks, shards, -1, table.shape[1]), 0, 1)
    return d_hidden.astype(hidden.dtype), d_table.reshape(table.shape), None, None


_token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)


def token_logprobs(
    hidden: Float[Array, "*b d"],
    table: Float[Array, "v d"],
    targets: Int[Array, "*b"],
    ids: Int[Array, "*b k"] | None = None,
    *,
    temperature: float = 1.0,
    dtype: Any = None,
    max_chunk: int = MAX_CHUNK,
    collision: bool = False,
    stored: bool = False,
) -> TokenScores:
    """Computes the log-probability of each target and the entropy of its distribution, both float32 (nats).

    Args:
      hidden: The states after the final norm.
      table: The rows of the LM head, one for each vocabulary entry.
      targets: The ids of the tokens to score.
      ids: The ids of k more tokens to score in each distribution. An id that is not in the vocabulary, such as -1,
        gets -inf and no gradient. None: no others.
      temperature: The divisor of the logits, positive.
      dtype: The dtype of the operands of forward and backward products (``precision.lm_head_dtype``), cast by
        ``head_operands``. None: the dtypes of the inputs. Sums and logits are always float32.
      max_chunk: The largest number of vocabulary rows, on each vocabulary shard, whose logits are in memory at once.
      collision: Whether to compute the sum of the squared probabilities of each distribution.
      stored: The value of ``Kernels.stored_logits``.

    Returns:
      The scores. ``tops`` is None without ``ids``, and ``collision`` is None unless it was asked for.

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
    others = None if ids is None else ids.reshape(-1, ids.shape[-1])
    static = _Static(float(temperature), chunks, shards, collision, stored, gradient_sum_dtype(table.dtype))
    scores = _token_logprobs(flat, table, targets.reshape(-1), others, static)
    return jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[1:]), scores)
