"""The tokens of a batch: two log-probabilities per token and a mask, checked and divided into sequences."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, namespace_of
from rljax.mismatch.sequences import Sequences, read_sequences

LARGEST_LOGPROB = 1e8
"""A log-probability of larger magnitude (nats) counts as not finite.

Some engines write the lowest float, -3.4e38, for -inf. The sum of two such numbers would be infinite.
"""


@dataclass(frozen=True)
class Tokens:
    """The input of every measurement and correction. Outside ``valid`` all numbers are 0, so that no NaN can leak."""

    xp: ModuleType  # numpy or jax.numpy
    trainer: Any  # [b, t] log-probability under the trainer (nats)
    rollout: Any  # [b, t] log-probability under the rollout engine (nats)
    log_ratio: Any  # [b, t] trainer - rollout (nats)
    valid: Any  # [b, t] bool: in the mask and finite on both sides (within LARGEST_LOGPROB)
    nonfinite: Any  # [b, t] bool: in the mask and not finite on either side
    sequences: Sequences  # the sequences of the valid tokens
    mask_sequences: Sequences  # the sequences of the valid and the nonfinite tokens

    @property
    def mask(self) -> Any:
        """The response mask, [b, t] bool."""
        return self.valid | self.nonfinite


def read_tokens(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> Tokens:
    """Checks the arrays of a batch and finds its sequences.

    It works under jit, grad (without gradient), vmap and scan, and with rows sharded over Auto mesh axes.

    Args:
      trainer_logprobs: The log-probability of each token under the trainer, [b, t] float, nats.
      rollout_logprobs: The log-probability of each token under the rollout engine, [b, t] float, nats.
      response_mask: The response mask, [b, t] bool, int or float. A token counts where it is not 0. Holes are allowed.
      sequence_ids: The index of each token's sequence in 0 .. num_sequences - 1, int [b, t]. None: each row is one
        sequence. A row may hold several sequences, and each sequence lies whole in one row. Values outside the mask
        are ignored.
      num_sequences: The number of sequences, a static int. It is required exactly with ``sequence_ids``.

    Raises:
      ValueError: The shapes differ or are not two-dimensional, or the sequences break these rules.
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
