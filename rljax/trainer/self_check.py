"""The mismatch of the trainer with itself: the same tokens in micro-batches of another shape.

Two compiled programs of one function add up in another order, so their log-probabilities differ a little. No remedy can
bring the mismatch with an engine below this difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.mismatch import mismatch_metrics
from rljax.sharding import fetch
from rljax.trainer.packing import PackedBatch, TrainSequence, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.update import Forward, Pack, Update, Updated, UpdateOptions


class SelfCheckedUpdate:
    """An ``Update`` that also measures ``mismatch_self/<name>``, in the steps whose options say so.

    Before the update a second forward scores a sample of the responses, in micro-batches of another shape. The update's
    own log-probabilities of the same tokens take the trainer's place in the metrics, the second ones the
    engine's. The second forward has no gradient, so nothing is recomputed in it, whatever ``precision.remat`` says.
    """

    def __init__(self, update: Update, forward: Forward, pack_other: Pack, *, sample: int):
        """Wraps the update that trains.

        Args:
          update: The update.
          forward: A function that scores a batch under the parameters of a state.
          pack_other: A function that packs ``sample`` responses into micro-batches of another shape.
          sample: The largest number of responses of a step that are measured.
        """
        self._update, self._forward, self._pack_other, self._sample = update, forward, pack_other, sample
        self.pack = update.pack

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates; in a step that is due it scores the sample before them."""
        if not options.self_mismatch:
            return self._update(state, batch, sequences, options)
        chosen = spread(len(sequences), self._sample)
        sampled = [sequences[i] for i in chosen]
        other = self._pack_other(sampled)
        again = unpack(fetch(self._forward(state.params, other)[1].logprobs), other, sampled)
        updated = self._update(state, batch, sequences, options)
        every = updated.trainer()
        row = self_metrics([every.logprobs[i] for i in chosen], again, [s.sampled for s in sampled])
        return updated._replace(row=updated.row | row, trainer=lambda: every)


def spread(count: int, sample: int) -> np.ndarray:
    """Returns the indices, int [min(count, sample)], of a sample that is spread evenly over ``count`` responses."""
    return np.unique(np.linspace(0, count - 1, min(sample, count)).round().astype(int))


def self_metrics(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], sampled: Sequence[np.ndarray]
) -> dict[str, float]:
    """Computes ``mismatch_self/<name>`` from two log-probabilities of each token, float32 [r] for each response.

    ``sampled`` tells which of these tokens the policy sampled, bool [r] for each response. The others do not count.
    """
    shape = len(first), max(map(len, first))
    ours, others = (np.zeros(shape) for _ in range(2))
    mask = np.zeros(shape, bool)
    for i, (one, two, own) in enumerate(zip(first, second, sampled, strict=True)):
        ours[i, : len(one)], others[i, : len(two)], mask[i, : len(one)] = one, two, own
    return {f"mismatch_self/{name}": float(value) for name, value in mismatch_metrics(ours, others, mask).items()}


def other_shape(rows: int, tokens: int, ways: int) -> tuple[int, int]:
    """Returns another shape (rows, tokens) of a micro-batch of ``rows`` rows with ``tokens`` tokens each.

    The rows are twice as long. There are half as many if the mesh can split that number into ``ways`` equal parts, and
    otherwise as many as before.
    """
    return (rows // 2 if rows % (2 * ways) == 0 else rows), 2 * tokens
