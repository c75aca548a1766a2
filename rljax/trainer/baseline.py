"""The optimal token baseline of a batch: one advantage for each token instead of one for each response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.algorithms.advantages import optimal_token_advantages
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch import importance_weights
from rljax.trainer.packing import TrainSequence


def subtract_baselines(
    sequences: Sequence[TrainSequence],
    collisions: Sequence[np.ndarray],
    *,
    group_size: int,
    correction: CorrectionConfig,
) -> list[TrainSequence]:
    """Gives each token the advantage of ``optimal_token_advantages``.

    Args:
      sequences: The sequences of a batch, group by group, with ``old_logprobs``. The ``advantage`` of each is its
        return.
      collisions: The sum of the squared probabilities at each token of each response, float [r].
      group_size: The number of responses to a prompt.
      correction: The correction whose importance weights also weigh the energies of the baseline.

    Returns:
      The sequences. Those without loss stay as they are.
    """
    ratios = None if correction.weighting is None else _ratios(sequences, *correction.weighting)
    result = list(sequences)
    for start in range(0, len(result), group_size):
        group = slice(start, start + group_size)
        members = sequences[group]
        if not members[0].in_loss:
            continue
        returns = np.array([float(s.advantage) for s in members])
        own = [np.asarray(s.old_logprobs) for s in members]
        weights = None if ratios is None else ratios[group]
        advantages = optimal_token_advantages(returns, own, collisions[group], weights)
        result[group] = [s._replace(advantage=each) for s, each in zip(members, advantages, strict=True)]
    return result


def _ratios(sequences: Sequence[TrainSequence], level: Any, mode: Any, threshold: Any) -> list[np.ndarray]:
    """Computes the importance weights of the tokens of each sequence, without ``normalize``."""
    lengths = [len(s.response) for s in sequences]
    trainer = np.concatenate([np.asarray(s.old_logprobs) for s in sequences])
    rollout = np.concatenate([s.rollout_logprobs for s in sequences])
    weights, _ = importance_weights(
        trainer[None],
        rollout[None],
        np.ones((1, len(trainer)), np.bool_),
        level=level,
        mode=mode,
        threshold=threshold,
        sequence_ids=np.repeat(np.arange(len(lengths)), lengths)[None],
        num_sequences=len(lengths),
    )
    return np.split(weights[0], np.cumsum(lengths)[:-1])
