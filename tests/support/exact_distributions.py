"""The distributions that a policy in float32 has at the positions of a response, with logits in float64."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, lm_head_table
from rljax.policy.score import segment_ends
from rljax.rollout.types import Response

MULTIPLE = 32  # rows are padded to a multiple of this number of tokens, so that few lengths are compiled


@functools.partial(jax.jit, static_argnames="config")
def states(params, config, tokens, segments):
    return hidden_states(params, config, tokens, segment_ends(segments), jnp.arange(tokens.shape[1])[None])[0]


def distributions(
    params: dict, config: PolicyConfig, prompts: Sequence[np.ndarray], response: Response, temperature: float
) -> np.ndarray:
    """Returns the log-probability of every token at each position of a response, float64 [t, v]."""
    prompt = prompts[response.prompt_index]
    ids = np.concatenate([prompt, response.response])
    tokens, segments = np.zeros((2, 1, -(-len(ids) // MULTIPLE) * MULTIPLE), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    hidden = np.asarray(states(params, config, tokens, segments), np.float64)
    rows = hidden[0, len(prompt) - 1 : len(ids) - 1]
    logits = (rows @ np.asarray(lm_head_table(params), np.float64).T) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
