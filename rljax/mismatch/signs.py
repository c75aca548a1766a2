"""Signs that a sampler's log-probabilities belong to other responses than the recorded ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FILL_TOKENS = 8
"""The fewest equal numbers that show a constant in the place of log-probabilities."""
FILL_SPREAD = 0.1
"""The least standard deviation of the other side's numbers at the places of such a constant (nats)."""
WORSE_THAN_UNIFORM = 8.0
"""The least surprise of a side that finds tokens less likely than random ones (nats). A uniform guess over 3,000 tokens
has this surprise, and vocabularies have 32,000 tokens and more."""
_ROUNDING = 1e-3  # nats; smaller log-probabilities of certain tokens may be equal because of their rounding
_UNCERTAIN = 0.01  # nats; larger log-probabilities depend on every token before them
_FEWEST = 8  # the fewest different numbers above _UNCERTAIN that are not equal by chance


def find_repeats(
    prompts: Sequence[np.ndarray], tokens: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]
) -> list[list[int]]:
    """Finds responses that repeat a response to another prompt: equal tokens with log-probabilities equal to the bit.

    A response whose log-probabilities are all 0, or as small as the rounding of a certain token, repeats nothing.

    Args:
      prompts: The token ids of the prompt of each response, int32 [p].
      tokens: The sampled token ids of each response, int32 [r].
      logprobs: The sampler's log-probability of each of these tokens (nats), float32 [r].

    Returns:
      The sets of equal responses, each as the list of their indices.
    """
    sets: dict[tuple[bytes, bytes], list[int]] = {}
    for i, (ids, values) in enumerate(zip(tokens, logprobs, strict=True)):
        sets.setdefault((ids.tobytes(), values.tobytes()), []).append(i)
    return [
        equal
        for equal in sets.values()
        if len(equal) > 1
        and np.abs(logprobs[equal[0]]).max(initial=0.0) > _ROUNDING
        and len({prompts[i].tobytes() for i in equal}) > 1
    ]


def is_no_chance(logprobs: np.ndarray) -> bool:
    """Returns whether chance cannot give responses to two different prompts these log-probabilities.

    It can for a short response: logits in 16 bits leave few log-probabilities for a choice between two tokens.
    """
    return len(np.unique(logprobs[np.abs(logprobs) > _UNCERTAIN])) >= _FEWEST


def find_constants(logprobs: Sequence[np.ndarray]) -> list[int]:
    """Returns the indices of the vectors, [r] each, of at least ``FILL_TOKENS`` numbers that are all equal."""
    return [i for i, vector in enumerate(logprobs) if len(vector) >= FILL_TOKENS and (vector == vector[0]).all()]
