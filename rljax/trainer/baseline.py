"""The optimal token baseline of a batch: one advantage for each token instead of one for each response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rljax.algorithms.advantages import optimal_token_advantages
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch import importance_weights
from rljax.trainer.packing import TrainSequence, groups_of


def subtract_baselines(
    sequences: Sequence[TrainSequence],
    collisions: Sequence[np.ndarray],
    *,
    group_size: int,
    correction: CorrectionConfig,
) -> list[TrainSequence]:
    """Gives each token its advantage by ``optimal_token_advantages``, or without loss the response's advantage.

    The sequences of a batch come group by group, ``group_size`` responses to a prompt, with ``old_logprobs``. The
    ``advantage`` of each is its return. ``collisions`` has the sum of the squared probabilities at each token of each
    response, float [r]. The importance weights of ``correction`` also weigh the energies of the baseline.
    """
    ratios: list[np.ndarray] | None = None
    if correction.weighting is not None:
        ratios = _ratios(sequences, *correction.weighting)
    elif any("turn" in s.columns for s in sequences):
        ratios = [s.sampled for s in sequences]  # tokens of an environment have no energy
    result = [s.add({"advantages": np.full(len(s.response), s.advantage, np.float32)}) for s in sequences]
    for group in groups_of(sequences, group_size):
        members = [i for i in group if sequences[i].in_loss]
        if not members:
            continue
        returns = np.array([float(sequences[i].advantage) for i in members])
        own = [sequences[i]["old_logprobs"] for i in members]
        weights = None if ratios is None else [ratios[i] for i in members]
        advantages = optimal_token_advantages(returns, own, [collisions[i] for i in members], weights)
        for i, advantage in zip(members, advantages, strict=True):
            result[i] = sequences[i].add({"advantages": advantage})
    return result


def _ratios(sequences: Sequence[TrainSequence], level: Any, mode: Any, threshold: Any) -> list[np.ndarray]:
    """Computes the importance weights of the tokens of each sequence, without ``normalize``."""
    lengths = [len(s.response) for s in sequences]
    trainer = np.concatenate([s["old_logprobs"] for s in sequences])
    rollout = np.concatenate([s["rollout_logprobs"] for s in sequences])
    weights, _ = importance_weights(
        trainer[None],
        rollout[None],
        np.concatenate([s.sampled for s in sequences])[None],
        level=level,
        mode=mode,
        threshold=threshold,
        sequence_ids=np.repeat(np.arange(len(lengths)), lengths)[None],
        num_sequences=len(lengths),
    )
    return np.split(weights[0], np.cumsum(lengths)[:-1])
