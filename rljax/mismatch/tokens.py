"""The tokens of a batch, read once: two log-probabilities per token and a mask, checked, cut in sequences."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, namespace_of
from rljax.mismatch.sequences import Sequences, read_sequences

LARGEST_LOGPROB = 1e8
"""Beyond this (nats, either sign) a log-probability counts as not finite.

Some engines write the lowest float, -3.4e38, for -inf; summed, two of those would be infinite.
"""


@dataclass(frozen=True)
class Tokens:
    """What every measurement and correction takes. Outside ``valid`` every number is 0, so that no NaN can leak."""

    xp: ModuleType  # numpy or jax.numpy
    trainer: Any  # [b, t] log-probability under the trainer (nats)
    rollout: Any  # [b, t] log-probability under the rollout engine (nats)
    log_ratio: Any  # [b, t] trainer - rollout (nats)
    valid: Any  # [b, t] bool: in the mask and finite on both sides (within LARGEST_LOGPROB)
    nonfinite: Any  # [b, t] bool: in the mask and not finite on either side
    sequences: Sequences  # of the valid tokens
    mask_sequences: Sequences  # of the valid and the nonfinite tokens

    @property
    def mask(self) -> Any:
        """[b, t] bool: the response mask."""
        return self.valid | self.nonfinite


def read_tokens(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> Tokens:
    """Read a batch. Works under jit, grad (no gradient), vmap, scan and with rows sharded over Auto mesh axes.

    Args:
      trainer_logprobs: [b, t] float, log-probability of each token under the trainer (nats).
      rollout_logprobs: [b, t] float, the same under the rollout engine.
      response_mask: [b, t] bool, int or float; a token counts where it is not 0. Holes are allowed.
      sequence_ids: None when each row is one sequence; else int [b, t] in 0 .. num_sequences - 1, several sequences
        to a row, all of each in one row. Values outside the mask are ignored.
      num_sequences: static int, given with ``sequence_ids``.

    Raises:
      ValueError: the shapes differ or are not two-dimensional, or the sequences are not as above.
    """
    shape = np.shape(trainer_logprobs)
    if len(shape) != 2:
        raise ValueError(f"trainer_logprobs must be [b, t], got shape {shape}")
    check_shape("rollout_logprobs", rollout_logprobs, shape)
    check_shape("response_mask", response_mask, shape)
    xp = namespace_of(trainer_logprobs, rollout_logprobs, response_mask)
    trainer, rollout = as_float(xp, trainer_logprobs), as_float(xp, rollout_logprobs)
    mask = xp.asarray(response_mask) != 0
    finite = (xp.abs(trainer) <= LARGEST_LOGPROB) & (xp.abs(rollout) <= LARGEST_LOGPROB)  # False for NaN
    valid = mask & finite
    trainer, rollout = xp.where(valid, trainer, 0), xp.where(valid, rollout, 0)
    return Tokens(
        xp=xp,
        trainer=trainer,
        rollout=rollout,
        log_ratio=trainer - rollout,
        valid=valid,
        nonfinite=mask & ~finite,
        sequences=read_sequences(valid, sequence_ids, num_sequences),
        mask_sequences=read_sequences(mask, sequence_ids, num_sequences),
    )
