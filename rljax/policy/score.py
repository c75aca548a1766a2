"""Log-probabilities of tokens: ``logprobs[b, t]`` belongs to ``tokens[b, t]``, given the tokens before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.head import matmul_precision, token_logprobs
from rljax.policy.kernels import ON_ANY_BACKEND, Kernels
from rljax.policy.model import ForwardStats, Params, Remat, cast_params, hidden_states, lm_head_table
from rljax.sharding import fetch


class Scores(NamedTuple):
    """The results of a forward over packed rows, float32."""

    logprobs: Float[Array, "b t"]  # nats; 0 at position 0 of a segment and on padding
    entropy: Float[Array, "b t"]  # nats; 0 at position 0 of a segment and on padding
    stats: ForwardStats
    tops: Float[Array, "b t k"] | None = None  # log-probabilities of given token ids; -inf where the id is -1
    collision: Float[Array, "b t"] | None = None  # the sum of squared probabilities, without gradient


def packed_logprobs(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    *,
    temperature: float = 1.0,
    lm_head_dtype: Any = None,
    remat: Remat = "none",
    kernels: Kernels = ON_ANY_BACKEND,
    choices: Int[Array, "b t l k"] | None = None,
) -> Scores:
    """Computes the log-probability of each token given the tokens before it in its segment, and the entropy there.

    ``hidden_states`` describes the arguments that are not below.

    Args:
      temperature: The temperature of the scored distribution, positive.
      lm_head_dtype: The dtype of the operands of the LM head's products. None: the dtypes of hidden states and table.

    Returns:
      The scores. ``logprobs[b, t]`` belongs to ``tokens[b, t]``.
    """
    rows = (tokens, segment_ids, positions)
    hidden, stats = hidden_states(params, config, *rows, remat=remat, kernels=kernels, choices=choices)
    # The state at t-1 predicts token t. The last state of a row predicts nothing.
    logprobs, entropy = token_logprobs(
        hidden[:, :-1], lm_head_table(params), tokens[:, 1:], temperature=temperature, dtype=lm_head_dtype
    )
    inside = (positions > 0) & (segment_ids > 0)
    logprobs, entropy = (jnp.where(inside, jnp.pad(x, ((0, 0), (1, 0))), 0.0) for x in (logprobs, entropy))
    return Scores(logprobs, entropy, stats)


@functools.lru_cache(maxsize=8)
def make_scorer(
    config: PolicyConfig, dtype: Any, *, temperature: float = 1.0, multiple: int = 64
) -> Callable[[Params, Sequence[np.ndarray]], list[np.ndarray]]:
    """Builds a function ``score(params, sequences) -> logprobs`` for checks outside the training step.

    The function takes float32 masters and casts them to ``dtype``. It returns one vector for each sequence, and
    ``logprobs[i][0]`` is 0. Rows are padded to a multiple of ``multiple`` tokens, and their number to a power of two,
    so that few shapes are compiled. Equal arguments give the same function; the last eight functions are kept.
    """

    @jax.jit
    def run(params: Params, tokens: Array, segment_ids: Array) -> Array:
        with jax.default_matmul_precision(matmul_precision(dtype)):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            cast = cast_params(params, dtype)
            return packed_logprobs(cast, config, tokens, segment_ids, positions, temperature=temperature).logprobs

    def score(params: Params, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        if not sequences:
            return []
        width = -(-max(len(s) for s in sequences) // multiple) * multiple
        rows = 1 << (len(sequences) - 1).bit_length()
        tokens = np.zeros((rows, width), np.int32)
        segments = np.zeros((rows, width), np.int32)
        for i, sequence in enumerate(sequences):
            tokens[i, : len(sequence)] = sequence
            segments[i, : len(sequence)] = 1
        logprobs = fetch(run(params, tokens, segments))
        return [logprobs[i, : len(sequence)] for i, sequence in enumerate(sequences)]

    return score
