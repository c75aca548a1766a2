"""The next token of each row: from the whole distribution or a cut one, with the likeliest tokens as a report."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rljax.policy.head import head_operands, matmul_precision
from rljax.policy.model import Params, lm_head_table
from rljax.policy.score import over_support
from rljax.rollout.types import NOISE_SEED, InjectConfig, SamplingParams


class Selection(NamedTuple):
    """The tokens that can be sampled and those that are reported. Each selection needs a compilation of its own."""

    reported: int = 0  # the number of likeliest tokens that are reported at each position
    top_k: int = 0  # the most tokens that can be sampled at a position, or 0 where all can
    # The least probability of all tokens that can be sampled together, among the tokens that ``top_k`` leaves.
    top_p: float = 1.0
    # The least probability of a token that can be sampled, as a share of the likeliest token's probability.
    min_p: float = 0.0
    greedy: bool = False  # whether the likeliest token is taken; the log-probabilities are then those at temperature 1


ALL = Selection()
"""All tokens can be sampled, and none is reported."""


def selection_of(sampling: SamplingParams) -> Selection:
    """Returns the selection of a request. Greedy sampling takes the likeliest token, so it is never cut."""
    if sampling.temperature == 0.0:
        return Selection(sampling.reported, greedy=True)
    return Selection(sampling.reported, sampling.top_k, sampling.top_p, sampling.min_p)


def support(logits: Float[Array, "b v"], selection: Selection) -> tuple[Int[Array, "b k"], Float[Array, "b k"]]:
    """Returns the tokens that can be sampled, likeliest first, and their logits.

    The cut has three steps, in vLLM's order and with its definitions:

    1. ``min_p``: A token stays if its probability is at least ``min_p`` times the likeliest token's.
    2. ``top_k``: The ``top_k`` likeliest of these tokens stay. Of equally likely tokens the one with the lowest id
       comes first. vLLM without Triton differs: it keeps every token that is as likely as the last one.
    3. ``top_p``: The distribution is renormalised over these tokens. A token stays if all likelier tokens together have
       a probability below ``top_p``. So the likeliest token always stays.

    A token that does not stay has the id -1 and the logit -inf.

    Args:
      logits: The logits divided by the temperature, or log-probabilities.
      selection: The cut. Its ``top_k`` is k, and above 0.
    """
    values, ids = jax.lax.top_k(logits, selection.top_k)
    stays = jnp.ones(values.shape, bool)
    if selection.min_p > 0.0:
        stays = values >= values[:, :1] + math.log(selection.min_p)
    if selection.top_p < 1.0:
        probabilities = jax.nn.softmax(jnp.where(stays, values, -jnp.inf))
        likelier = jnp.pad(jnp.cumsum(probabilities, axis=-1)[:, :-1], ((0, 0), (1, 0)))
        stays &= likelier < selection.top_p
    return jnp.where(stays, ids, -1).astype(jnp.int32), jnp.where(stays, values, -jnp.inf)


def token_key(seed: Array, numbers: Int[Array, " m"], position: Array) -> Array:
    """Returns the random key of one token, which depends only on these numbers.

    Args:
      seed: The seed of the request.
      numbers: The numbers that name the response.
      position: The position of the token in the response, from 0.
    """
    key = jax.random.key(seed)
    for number in (*numbers, position):
        key = jax.random.fold_in(key, number)
    return key


def with_noise(
    logits: Float[Array, "b v"], keys: Array, temperature: Array, inject: InjectConfig | None
) -> Float[Array, "b v"]:
    """Adds Gaussian noise, of standard deviation ``inject.logit_noise`` / ``temperature``, to logits divided by it.

    Each row has noise of its own, from its random key and ``NOISE_SEED``. Without noise the logits stay as they are.
    """
    if inject is None or not inject.logit_noise:
        return logits
    own = jax.vmap(jax.random.fold_in, (0, None))(keys, np.uint32(NOISE_SEED))
    normal = jax.vmap(lambda key: jax.random.normal(key, logits.shape[1:]))(own)
    return logits + inject.logit_noise / temperature * normal


class NextTokens(NamedTuple):
    """The next token of each row."""

    tokens: Int[Array, " b"]  # the token ids
    # The arrays [b, ...] of the tokens by their names in ``tokens.COLUMNS``. The log-probabilities are those of the
    # distribution that is sampled from. The likeliest tokens are there where some are reported.
    arrays: dict[str, Array]


def sample_support(keys: Array, logits: Float[Array, "b v"], selection: Selection) -> NextTokens:
    """Samples a token of each row from the cut distribution that ``support`` makes, with a random key for each row.

    The log-probabilities are normalised over the tokens that stay, by the trainer's own function (``over_support``).
    """
    ids, values = support(logits, selection)
    places = jax.vmap(jax.random.categorical)(keys, values)
    token, value = (jnp.take_along_axis(x, places[:, None], axis=-1)[:, 0] for x in (ids, values))
    scored = over_support(value, values, ids)
    tops = scored.tops
    assert tops is not None
    arrays = {"rollout_logprobs": scored.logprobs}
    if selection.reported:
        arrays |= {"top_ids": ids[:, : selection.reported], "top_logprobs": tops[:, : selection.reported]}
    return NextTokens(token, arrays)


def draw_tokens(
    logits: Float[Array, "b v"],
    total: Array | float,
    keys: Array | None,
    selection: Selection,
    forced: Int[Array, " b"] | None = None,
) -> NextTokens:
    """Samples a token of each row, or takes the ``forced`` one, from logits at the temperature of the request.

    ``total`` is the logarithm of the sum of each row's exponentials: 0.0 for log-probabilities. The other arguments and
    the result are as in ``next_tokens``.
    """
    if selection.top_k:
        assert keys is not None
        cut = sample_support(keys, logits, selection)
        return cut if forced is None else cut._replace(tokens=jnp.where(forced < 0, cut.tokens, forced))
    if selection.greedy:
        tokens = jnp.argmax(logits, axis=-1)
    elif keys is not None:
        tokens = jax.vmap(jax.random.categorical)(keys, logits)
    else:
        assert forced is not None
        tokens = forced
    tokens = tokens if forced is None else jnp.where(forced < 0, tokens, forced)
    arrays = {"rollout_logprobs": jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - total}
    if selection.reported:
        values, ids = jax.lax.top_k(logits, selection.reported)
        arrays |= {"top_ids": ids.astype(jnp.int32), "top_logprobs": values - jnp.reshape(total, (-1, 1))}
    return NextTokens(tokens.astype(jnp.int32), arrays)


def next_tokens(
    params: Params,
    hidden: Float[Array, "b d"],
    keys: Array | None,
    temperature: Array,
    forced: Int[Array, " b"] | None,
    lm_head_dtype: Any,
    selection: Selection = ALL,
    inject: InjectConfig | None = None,
) -> NextTokens:
    """Computes logits, and samples the next token of each row or takes the ``forced`` one.

    Args:
      params: The weights in the rollout dtype.
      hidden: The hidden states of the last tokens, after the final norm.
      keys: The random key of each row, or None if every token is forced.
      temperature: The sampling temperature.
      forced: The token that each row takes, -1 where one is sampled, or None if all are sampled.
      lm_head_dtype: The dtype in which the LM head computes, or None for the dtype of ``hidden``.
      selection: The tokens that can be sampled and those that are reported.
      inject: The noise that is put on the logits of sampled tokens, or None.

    Returns:
      The tokens with their log-probabilities in the distribution that is sampled from. In a cut distribution the
      log-probability of a forced token has no meaning.
    """
    hidden, table = head_operands(hidden, lm_head_table(params), lm_head_dtype)
    exactness = matmul_precision(table.dtype)
    logits = jnp.einsum("bd,vd->bv", hidden, table, precision=exactness, preferred_element_type=jnp.float32)
    # This rounds to the head's dtype. XLA may drop a cast there and back (xla_allow_excess_precision).
    kept = jnp.finfo(hidden.dtype)
    logits = jax.lax.reduce_precision(logits, kept.nexp, kept.nmant)
    logits = logits if selection.greedy else logits / temperature
    if keys is not None and not selection.greedy:
        logits = with_noise(logits, keys, temperature, inject)
    return draw_tokens(logits, jax.nn.logsumexp(logits, axis=-1), keys, selection, forced)
