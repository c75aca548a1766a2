"""Log-probabilities of given tokens that the embedded engine computes in one pass, as it computes a prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params
from rljax.rollout.decoding import prefill
from rljax.rollout.likeliest import next_tokens


def prefill_logprobs(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "g s"],
    lengths: Int[Array, " g"],
    temperature: Float[Array, ""],
    *,
    cache_dtype: Any,
    lm_head_dtype: Any,
) -> Float[Array, "s g"]:
    """Returns the log-probability of each token but the first, computed in one pass as prompts are.

    ``tokens`` are padded on the left. Row i of the result has the log-probabilities of the tokens at place i + 1. The
    last row has no meaning. The head computes one row at a time, as a step of ``decode`` does.
    """
    hidden, _, _ = prefill(params, config, tokens, lengths, cache_dtype)
    keys = jax.random.split(jax.random.key(0), len(tokens))  # nothing is drawn

    def column(given: tuple[Array, Array]) -> Array:
        return next_tokens(params, given[0], keys, temperature, False, given[1], lm_head_dtype).logprobs

    return jax.lax.map(column, (jnp.moveaxis(hidden, 1, 0), jnp.roll(tokens, -1, axis=1).T))
