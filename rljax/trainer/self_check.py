"""The mismatch of the trainer with itself: the same tokens in another compiled program of the same function.

The programs add up in another order, so their log-probabilities differ a little. No remedy can bring the mismatch with
an engine below this difference. Three causes are told apart: micro-batches of another shape, another split of the
weights over the same devices, and other activations that the backward pass recomputes.

Rows of trees are checked, too: once, the log-probabilities of a tree are compared with those in separate rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.sharding import Mesh

from rljax.mismatch import mismatch_metrics
from rljax.policy.head import TokenScores
from rljax.policy.model import Remat
from rljax.record.token_arrays import to_rows
from rljax.sharding import fetch
from rljax.trainer.measure import Cause
from rljax.trainer.packing import OptionalLogprobs, PackedBatch, TrainSequence, shared_fraction, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.trees import common_prefixes, in_tree_order
from rljax.trainer.update import Forward, Pack, Update, UpdateAround, Updated, UpdateOptions

PREFIXES: dict[Cause, str] = {"shape": "mismatch_self/", "mesh": "mismatch_self/mesh/", "remat": "mismatch_self/remat/"}
"""The first part of the metric keys of each cause."""
OTHER_REMAT: dict[Remat, Remat] = {"none": "blocks", "dots": "blocks", "blocks": "dots", "offload": "dots"}
"""The choice of ``precision.remat`` with which each choice is compared."""

Check = Callable[[TrainState, PackedBatch, Sequence[TrainSequence]], tuple[Sequence[int], list[np.ndarray]]]
"""A function (state, batch, its sequences) that returns the indices and log-probabilities of some responses."""


@dataclass(eq=False)
class SelfCheckedUpdate(UpdateAround):
    """An ``Update`` that also measures ``mismatch_self/<name>``, in the steps whose options say so.

    Before the update some responses are scored by other programs. The metrics compare the update's log-probabilities,
    as the trainer's, with the log-probabilities of the other program, as the engine's.
    """

    checks: Mapping[Cause, Check]  # the other programs, by their cause

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates. With ``options.self_mismatch`` the other programs score responses before them."""
        if not options.self_mismatch:
            return self.update(state, batch, sequences, options)
        again = {cause: check(state, batch, sequences) for cause, check in self.checks.items()}
        updated = self.update(state, batch, sequences, options)
        every, row = updated.trainer(), dict(updated.row)
        for cause, (chosen, logprobs) in again.items():
            own, sampled = [every.logprobs[i] for i in chosen], [sequences[i].sampled for i in chosen]
            row |= {PREFIXES[cause] + name: value for name, value in self_metrics(own, logprobs, sampled).items()}
        return updated._replace(row=row, trainer=lambda: every)


def at_other_shape(forward: Forward, pack_other: Pack, *, sample: int) -> Check:
    """Returns a check that scores responses from all over the batch in micro-batches of another shape.

    The forward has no gradient, so nothing is recomputed in it. It scores at most ``sample`` responses, which
    ``pack_other`` packs into these micro-batches.
    """

    def check(
        state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence]
    ) -> tuple[Sequence[int], list[np.ndarray]]:
        chosen = spread(len(sequences), sample).tolist()
        sampled = [sequences[i] for i in chosen]
        other = pack_other(sampled)
        return chosen, unpack(fetch(forward(state.params, other)[1].logprobs), other, sampled)

    return check


def in_other_program(
    score: Callable[[TrainState, PackedBatch], TokenScores], *, sample: int, stand_ins: Sequence[OptionalLogprobs] = ()
) -> Check:
    """Returns a check that scores the update's first micro-batches, unchanged, in another program.

    ``score`` scores a batch under a state. Micro-batches are scored until they hold ``sample`` responses. ``stand_ins``
    are optional log-probabilities that the program reads. If the batch lacks some, the rollout engine's stand in for
    them, because they change only the gradient.
    """

    def check(
        state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence]
    ) -> tuple[Sequence[int], list[np.ndarray]]:
        count, chosen = first_micro_batches(batch, sample)
        shorter = {name: np.minimum(getattr(batch, name), np.int32(count)) for name in ("with_loss", "used")}
        missing = {name: batch.rollout_logprobs for name in stand_ins if getattr(batch, name) is None}
        logprobs = fetch(score(state, batch._replace(**shorter, **missing)).logprobs)
        every = unpack(logprobs, batch, sequences)
        return chosen, [every[i] for i in chosen]

    return check


def first_micro_batches(batch: PackedBatch, sample: int) -> tuple[int, list[int]]:
    """Returns how many micro-batches, from the first, hold ``sample`` responses, and the indices of their responses."""
    held: set[int] = set()
    count = 0
    while count < int(batch.used) and len(held) < sample:
        held |= set(np.unique(batch.sequence_ids[count][batch.segment_ids[count] > 0]).tolist())
        count += 1
    return count, sorted(held)


def spread(count: int, sample: int) -> np.ndarray:
    """Returns the indices, int [min(count, sample)], of a sample that is spread evenly over ``count`` responses."""
    return np.unique(np.linspace(0, count - 1, min(sample, count)).round().astype(int))


def self_metrics(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], sampled: Sequence[np.ndarray]
) -> dict[str, float]:
    """Computes the mismatch metrics of two log-probabilities of each token, float32 [r] for each response.

    ``sampled`` tells which of these tokens the policy sampled, bool [r] for each response. Other tokens do not count.
    """
    rows = to_rows(first, 0.0), to_rows(second, 0.0), to_rows(sampled, False)
    return {name: float(value) for name, value in mismatch_metrics(*rows).items()}


def other_shape(rows: int, tokens: int, ways: int) -> tuple[int, int]:
    """Returns another shape (rows, tokens) of a micro-batch of ``rows`` rows with ``tokens`` tokens each.

    The rows are twice as long. There are half as many if the mesh can split that number into ``ways`` equal parts, and
    otherwise as many as before.
    """
    return (rows // 2 if rows % (2 * ways) == 0 else rows), 2 * tokens


def other_mesh(mesh: Mesh) -> Mesh | None:
    """Returns a mesh of the same devices in the same order, with other sizes of ``fsdp`` and ``tp``.

    The smallest prime factor of ``tp`` moves to ``fsdp``. If ``tp`` is 1, the smallest one of ``fsdp`` moves to ``tp``.
    So the sums over devices have other terms, and rows are on other devices. Returns None if both sizes are 1.
    """
    sizes = dict(mesh.shape)
    source, target = ("tp", "fsdp") if sizes["tp"] > 1 else ("fsdp", "tp")
    if sizes[source] == 1:
        return None
    factor = next(n for n in range(2, sizes[source] + 1) if sizes[source] % n == 0)
    sizes[source] //= factor
    sizes[target] *= factor
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), mesh.axis_names, axis_types=mesh.axis_types)


FACTOR = 4.0
"""The factor by which trees may differ more from separate rows than separate rows do from rows of another shape."""
FLOORS = {"float32": 1e-5, "float16": 2.5e-3, "bfloat16": 2e-2}
"""The mean difference of log-probabilities (nats) that is always allowed, by compute dtype. A real model reached 0.010
in bfloat16, where separate rows of two shapes had nearly the same bits, and was 0.026 from its values in float32."""
PEAK = 50.0
"""The factor of ``FLOORS`` that the difference of a single token may always reach. So a mistake in a few tokens of long
responses is seen, but a token that a router sends to another expert is not taken for a mistake."""
MOST = 8
"""The largest number of sequences of a tree that are compared."""


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the mean and the largest difference of two arrays of log-probabilities (nats), float64 [2].

    Two log-probabilities that are NaN, or infinite, do not differ.
    """
    each = np.abs(np.nan_to_num(a, nan=1.0) - np.nan_to_num(b, nan=1.0))  # No log-probability is 1.
    return np.asarray([np.mean(each), np.max(each)], np.float64)


def is_rounding(found: np.ndarray, own: np.ndarray, floor: float) -> bool:
    """Returns whether ``found``, the ``distance`` of trees to separate rows, is small enough to be rounding.

    ``own`` is the distance of separate rows to rows of another shape, and ``floor`` a value of ``FLOORS``.
    """
    return bool(np.all(found <= np.maximum(FACTOR * own, floor * np.asarray([1.0, PEAK]))))


@dataclass(eq=False)
class CheckedTrees(UpdateAround):
    """An ``Update`` on rows of trees, which compares its first tree with separate rows.

    If they differ too much, it prints a warning and trains on separate rows from then on. Each row of metrics has
    "perf/shared_token_fraction", which is then 0.
    """

    forward: Forward  # a function that scores a batch under the parameters of a state
    # The ways to pack what is compared: in trees as the run does, in separate rows of the same length, and in separate
    # rows of another shape.
    packs: tuple[Pack, Pack, Pack]
    floor: float  # the value of ``FLOORS``
    apart: Callable[[], Update]  # a function that builds the update on separate rows
    is_new: bool = field(default=True, init=False)  # whether nothing was compared yet

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates. The first call whose sequences share a beginning compares before them."""
        if self.is_new and (chosen := largest_tree(sequences)):
            self.is_new = False
            trees, apart, other = (self._logprobs(state, pack(chosen), chosen) for pack in self.packs)
            found, own = distance(trees, apart), distance(other, apart)
            if not is_rounding(found, own, self.floor):
                print(
                    f"\nwarning: packing.share_prefixes: off. Trees differ by {found[0]:.3g} nats a token (at most "
                    f"{found[1]:.3g}) from separate rows, which differ by {own[0]:.3g} (at most {own[1]:.3g}) from "
                    "themselves at another shape",
                    file=sys.stderr,
                    flush=True,
                )
                self.update = self.apart()
                batch = self.update.pack(sequences)
        updated = self.update(state, batch, sequences, options)
        return updated._replace(row=updated.row | {"perf/shared_token_fraction": shared_fraction(sequences, batch)})

    def _logprobs(self, state: TrainState, batch: PackedBatch, chosen: Sequence[TrainSequence]) -> np.ndarray:
        """Returns the log-probabilities of the sampled tokens. An environment's tokens would hide a mistake."""
        values = unpack(fetch(self.forward(state.params, batch)[1].logprobs), batch, chosen)
        return np.concatenate([each[s.sampled] for each, s in zip(values, chosen, strict=True)])


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
