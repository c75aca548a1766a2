"""The mismatch of the trainer with itself: the same tokens in another compiled program of the same function.

The programs add up in another order, so their log-probabilities differ a little. No remedy can bring the mismatch with
an engine below this difference. Three causes are told apart: micro-batches of another shape, another split of the
weights over the same devices, and other activations that the backward pass recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from rljax.mismatch import mismatch_metrics
from rljax.policy.model import Remat
from rljax.record.token_arrays import to_rows
from rljax.sharding import fetch
from rljax.trainer.forward import TokenValues
from rljax.trainer.measure import Cause
from rljax.trainer.packing import OptionalLogprobs, PackedBatch, TrainSequence, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.update import Forward, Pack, Update, Updated, UpdateOptions

PREFIXES: dict[Cause, str] = {
    "shape": "mismatch_self/",
    "mesh": "mismatch_self/mesh/",
    "remat": "mismatch_self/remat/",
}
"""The first part of the metric keys of each cause."""
OTHER_REMAT: dict[Remat, Remat] = {"none": "blocks", "dots": "blocks", "blocks": "dots", "offload": "dots"}
"""The choice of ``precision.remat`` with which each choice is compared."""

Check = Callable[[TrainState, PackedBatch, Sequence[TrainSequence]], tuple[Sequence[int], list[np.ndarray]]]
"""A function of the arguments of an ``Update`` that returns the indices and log-probabilities of some responses."""


class SelfCheckedUpdate:
    """An ``Update`` that also measures ``mismatch_self/<name>``, in the steps whose options say so.

    Before the update some responses are scored by other programs. The metrics compare the update's log-probabilities,
    as the trainer's, with the log-probabilities of the other program, as the engine's.
    """

    def __init__(self, update: Update, checks: Mapping[Cause, Check]):
        """Wraps the update that trains. ``checks`` has the other programs, by their cause."""
        self._update, self._checks = update, checks
        self.pack = update.pack

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates; in a step that is due the other programs score before them."""
        if not options.self_mismatch:
            return self._update(state, batch, sequences, options)
        again = {cause: check(state, batch, sequences) for cause, check in self._checks.items()}
        updated = self._update(state, batch, sequences, options)
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
    score: Callable[[TrainState, PackedBatch], TokenValues], *, sample: int, stand_ins: Sequence[OptionalLogprobs] = ()
) -> Check:
    """Returns a check that scores the update's first micro-batches, unchanged, in another program.

    ``score`` scores a batch under a state. Micro-batches are scored until they hold ``sample`` responses. ``stand_ins``
    are optional log-probabilities that the program reads. If the batch lacks one, the rollout engine's are used,
    because it changes only the gradient.
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
