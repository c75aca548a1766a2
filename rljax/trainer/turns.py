"""The metrics of runs with an environment: the mismatch by turn and after the environment's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.mismatch.turns import mismatch_by_turn
from rljax.trainer.packing import PackedBatch, TrainSequence, trajectories
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions


class TurnsUpdate:
    """An ``Update`` that also measures ``turns/<name>``, on the host, from the numbers of the update itself."""

    def __init__(self, update: Update):
        self._update = update
        self.pack = update.pack

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates, and measures the turns of all sequences."""
        updated = self._update(state, batch, sequences, options)
        every = updated.trainer()
        return updated._replace(row=updated.row | turn_metrics(sequences, every.logprobs), trainer=lambda: every)


def turn_metrics(sequences: Sequence[TrainSequence], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Computes the metrics ``turns/<name>``. Further rows of a trajectory follow its first one.

    ``trainer`` has the trainer's log-probabilities of each sequence's response tokens, float32 [r] each.
    """
    turns = [s.turns for s in sequences]
    first = np.flatnonzero(np.diff(trajectories(sequences), prepend=-1))
    counts = np.maximum.reduceat([each.max(initial=0) for each in turns], first)
    tokens, sampled = sum(map(len, turns)), sum(np.count_nonzero(each) for each in turns)
    row = {
        "mean": float(np.mean(counts)),
        "max": float(np.max(counts)),
        "environment_fraction": (tokens - sampled) / max(tokens, 1),
    }
    row |= mismatch_by_turn(trainer, [s["rollout_logprobs"] for s in sequences], turns)
    return {f"turns/{name}": value for name, value in row.items()}
