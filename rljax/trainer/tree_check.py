"""The check of a run's first step: a tree has the log-probabilities of its sequences in separate rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rljax.sharding import fetch
from rljax.trainer.packing import PackedBatch, TrainSequence, shared_fraction, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.trees import common_prefixes, in_tree_order
from rljax.trainer.update import Forward, Pack, Update, Updated, UpdateOptions

FACTOR = 4.0
"""The number of times that trees may differ as much from separate rows as these do from themselves at another shape."""
FLOORS = {"float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
"""The mean difference of log-probabilities (nats) that is never too much, by compute dtype. A real model reached 0.010
in bfloat16, where separate rows of two shapes had nearly the same bits, and was 0.026 from its values in float32."""
PEAK = 50.0
"""The number of times that the difference of a single token may be as large as the mean that is never too much. So a
mistake in a few tokens of long responses is seen, and a token that a router sends elsewhere is not one."""
MOST = 8
"""The largest number of sequences that are compared."""


class TreeChecks(NamedTuple):
    """The ways to pack the sequences that are compared, and the largest difference that is a rounding."""

    trees: Pack  # rows of trees, as the run packs them
    apart: Pack  # separate rows of the same length
    other: Pack  # separate rows of another shape
    floor: float  # the value of ``FLOORS``


class Distance(NamedTuple):
    """The difference of two log-probabilities of each token, in nats."""

    mean: float  # the mean over the tokens
    largest: float  # the largest difference of a token

    def is_more_than(self, own: Distance, floor: float) -> bool:
        """Returns whether the difference is more than rounding, if separate rows differ by ``own`` from themselves."""
        is_small = self.mean <= max(FACTOR * own.mean, floor)
        return not (is_small and self.largest <= max(FACTOR * own.largest, PEAK * floor))


def distance(a: np.ndarray, b: np.ndarray) -> Distance:
    """Returns the difference of two arrays of log-probabilities. Two that are NaN, or infinite, do not differ."""
    each = np.abs(np.nan_to_num(a, nan=1.0) - np.nan_to_num(b, nan=1.0))  # No log-probability is 1.
    return Distance(float(np.mean(each)), float(np.max(each)))


class CheckedTrees:
    """An ``Update`` on rows of trees, which compares a tree with separate rows at its first call.

    If they differ too much, it says so and trains on separate rows from then on. Each row has the metric
    "perf/shared_token_fraction", which is then 0.
    """

    def __init__(self, update: Update, forward: Forward, checks: TreeChecks, apart: Callable[[], Update]):
        """Wraps the update that trains.

        Args:
          forward: A function that scores a batch under the parameters of a state.
          checks: The ways to pack the sequences that are compared.
          apart: A function that builds the update on separate rows.
        """
        self._update, self._forward, self._checks, self._apart = update, forward, checks, apart
        self._is_new = True

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Packs the sequences of a step as the update that trains does."""
        return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates. The first call compares before them."""
        if self._is_new and (chosen := largest_tree(sequences)):
            self._is_new = False
            found, own = self._distances(state, chosen)
            if found.is_more_than(own, self._checks.floor):
                print(
                    f"\nwarning: packing.share_prefixes: off. Trees differ by {found.mean:.3g} nats a token (at most "
                    f"{found.largest:.3g}) from separate rows, which differ by {own.mean:.3g} (at most "
                    f"{own.largest:.3g}) from themselves at another shape",
                    file=sys.stderr,
                    flush=True,
                )
                self._update = self._apart()
                batch = self._update.pack(sequences)
        updated = self._update(state, batch, sequences, options)
        return updated._replace(row=updated.row | {"perf/shared_token_fraction": shared_fraction(sequences, batch)})

    def _distances(self, state: TrainState, chosen: Sequence[TrainSequence]) -> tuple[Distance, Distance]:
        """Returns the distance of trees to separate rows, and of separate rows to others."""
        packs = (self._checks.trees, self._checks.apart, self._checks.other)
        trees, apart, other = (self._logprobs(state, pack(chosen), chosen) for pack in packs)
        return distance(trees, apart), distance(other, apart)

    def _logprobs(self, state: TrainState, batch: PackedBatch, chosen: Sequence[TrainSequence]) -> np.ndarray:
        return np.concatenate(unpack(fetch(self._forward(state.params, batch)[1].logprobs), batch, chosen))


def largest_tree(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Returns up to ``MOST`` sequences of the tree with the longest shared beginning; [] if nothing is shared."""
    ordered = [sequences[i] for i in in_tree_order(sequences, range(len(sequences)))]
    common = common_prefixes(ordered)
    if not any(common):
        return []
    first = last = int(np.argmax(common))
    while last - first < MOST and last + 1 < len(ordered) and common[last + 1]:
        last += 1
    return ordered[first - 1 : last + 1][:MOST]
