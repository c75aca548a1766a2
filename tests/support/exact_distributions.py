"""The distributions that a policy in float32 has at the positions of a response, with logits in float64."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, lm_head_table
from rljax.rollout.types import Response


def distributions(
    params: dict, config: PolicyConfig, prompts: Sequence[np.ndarray], response: Response, temperature: float
) -> np.ndarray:
    """The log-probability of every token at each position of a response, float64 [t, v]."""
    prompt = prompts[response.prompt_index]
    ids = np.concatenate([prompt, response.token_ids])[None]
    arrays = jnp.asarray(ids), jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]
    hidden, _ = hidden_states(params, config, *arrays)
    rows = np.asarray(hidden[0, len(prompt) - 1 : -1], np.float64)
    logits = (rows @ np.asarray(lm_head_table(params), np.float64).T) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
