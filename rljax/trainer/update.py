"""From a rollout batch to the updates it makes: one fused step, or several mini-batches and epochs.

The loop hands over sequences and a rate and gets the new state, the row and the trainer's log-probabilities; which way
was taken was chosen when the parts were built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rljax.policy.model import Params
from rljax.sharding import fetch, on_devices
from rljax.trainer.packing import PackedBatch, TrainSequence, unpack, unpack_routes
from rljax.trainer.state import TrainState
from rljax.trainer.step import TrainStep

Pack = Callable[[Sequence[TrainSequence]], PackedBatch]
Forward = Callable[..., tuple[dict[str, jax.Array], Any]]  # ``TrainStep.forward``
Reference = Callable[[PackedBatch], np.ndarray]  # ``reference_logprobs`` of the frozen policy of a KL penalty

# Metrics of a mini-batch whose last value is the step's; of the others it is the mean.
LAST_VALUES = ("optimizer/skipped_updates", "precision/", "schedule/")
NOISE = "optimizer/grad_noise"


class Updated(NamedTuple):
    """What the updates of a rollout batch came to."""

    state: TrainState
    row: dict[str, float]
    histograms: dict[str, np.ndarray]
    trainer_logprobs: Callable[[], list[np.ndarray]]  # float32 [r] a sequence, before the first update; fetched on call


class UpdateOptions(NamedTuple):
    """What the loop decides anew for every rollout batch."""

    learning_rate: float  # of every update
    seed: int  # orders mini-batches
    noise: bool  # whether to measure ``optimizer/grad_noise``
    free_routing: bool = False  # whether to measure the mismatch without the routes that are replayed, too


class Update(Protocol):
    """Trains on the responses of one step."""

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """The rows that hold ``sequences``, in the shape that was compiled for."""
        ...

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates of one rollout batch.

        Args:
          state: donated.
          batch: ``pack(sequences)``.
          sequences: the responses.
          options: of this rollout batch.
        """
        ...


def reference_logprobs(forward: Forward, params: Params, batch: PackedBatch) -> np.ndarray:
    """Float32 [m, b, t]: what the frozen ``params`` give the response tokens of ``batch``, 0 elsewhere.

    Routes of the policy that is trained are not replayed in it. Of ``params`` in the host's memory there is a copy on
    the devices until it returns.
    """
    logprobs = fetch(forward(on_devices(params), batch._replace(routes=None))[1])
    return np.where(batch.response_mask, logprobs, np.float32(0.0))


FREE_ROUTING = ("log_ppl_abs_diff", "logprob_abs_diff_mean", "k3_kl")


def free_routing_row(forward: Forward, params: Params, batch: PackedBatch) -> dict[str, float]:
    """The mismatch of a batch where the trainer's own router chooses, as ``mismatch_free_routing/<name>``."""
    measured = jax.device_get(forward(params, batch._replace(routes=None))[0])
    return {f"mismatch_free_routing/{name}": float(measured[f"mismatch/{name}"]) for name in FREE_ROUTING}


class SingleUpdate:
    """One update a rollout batch: the loss's forward is the measurement, and gives the old log-probabilities."""

    def __init__(self, step: TrainStep, forward: Forward, pack: Pack, reference: Reference | None = None):
        """``pack`` makes batches of the step's shape, which ``forward`` takes, too."""
        self.step, self._forward, self.pack, self._reference = step, forward, pack, reference

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``."""
        if self._reference is not None:
            batch = batch._replace(reference_logprobs=self._reference(batch))
        replayed = options.free_routing and batch.routes is not None
        free = free_routing_row(self._forward, state.params, batch) if replayed else {}
        noise = options.noise and int(batch.with_loss) > 1
        has_loss = any(s.in_loss for s in sequences)
        state, metrics, logprobs = self.step(state, batch, options.learning_rate, has_loss, noise)
        row, histograms = fetch_metrics(metrics, noise=noise)
        return Updated(state, row | free, histograms, lambda: unpack(fetch(logprobs), batch, sequences))


class MultipleUpdates:
    """Mini-batches of prompts, several times over, against ``old_logprobs`` of one separate forward."""

    def __init__(
        self,
        step: TrainStep,
        forward: Forward,
        pack: Pack,
        pack_mini: Pack,
        *,
        mini_batches: int,
        epochs: int,
        group_size: int,
        reference: Reference | None = None,
        replays_own: bool = False,
    ):
        """``step`` takes what ``pack_mini`` makes, ``forward`` what ``pack`` makes.

        ``replays_own``: the updates route each token as that one forward did (``rollout.router_replay: r2``).
        """
        self._replays_own = replays_own
        self.step, self._forward, self.pack, self.pack_mini = step, forward, pack, pack_mini
        self._mini_batches, self._epochs, self._group_size = mini_batches, epochs, group_size
        self._reference = reference

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``."""
        replayed = options.free_routing and batch.routes is not None
        free = free_routing_row(self._forward, state.params, batch) if replayed else {}
        measured, kept = self._forward(state.params, batch, with_routes=self._replays_own)
        logprobs, routes = kept if self._replays_own else (kept, None)
        old = unpack(fetch(logprobs), batch, sequences)
        known = [s._replace(old_logprobs=values) for s, values in zip(sequences, old, strict=True)]
        if routes is not None:
            of_sequences = unpack_routes(fetch(routes), batch, sequences)
            known = [s._replace(routes=values) for s, values in zip(known, of_sequences, strict=True)]
        if self._reference is not None:
            of_reference = unpack(self._reference(batch), batch, sequences)
            known = [s._replace(reference_logprobs=values) for s, values in zip(known, of_reference, strict=True)]
        taken: list[tuple[dict[str, jax.Array], bool]] = []
        for mini in self._split(known, options.seed):
            mini_batch = self.pack_mini(mini)
            mini_batch = mini_batch._replace(used=mini_batch.with_loss)  # the forward has measured the others
            wanted = options.noise and not taken and int(mini_batch.used) > 1
            has_loss = any(s.in_loss for s in mini)
            state, metrics, _ = self.step(state, mini_batch, options.learning_rate, has_loss, wanted)
            taken.append((metrics, wanted))
        of_batch, histograms = fetch_metrics(measured, noise=False)
        minis = [fetch_metrics(metrics, noise=wanted)[0] for metrics, wanted in taken]
        return Updated(state, _combine(minis) | of_batch | free, histograms, lambda: old)

    def _split(self, sequences: Sequence[TrainSequence], seed: int) -> list[list[TrainSequence]]:
        """Each epoch's mini-batches: complete groups, in an order of that epoch's own."""
        size, groups = self._group_size, len(sequences) // self._group_size
        rng = np.random.default_rng(seed)
        orders = [np.split(rng.permutation(groups), self._mini_batches) for _ in range(self._epochs)]
        return [
            [s for group in chosen for s in sequences[group * size : (group + 1) * size]]
            for order in orders
            for chosen in order
        ]


def fetch_metrics(metrics: dict[str, jax.Array], *, noise: bool) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scalars and arrays on the host; ``NOISE`` only when it was measured."""
    host: dict[str, Any] = jax.device_get(metrics)
    scalars = {key: value.item() for key, value in host.items() if value.ndim == 0 and (noise or key != NOISE)}
    return scalars, {key: value for key, value in host.items() if value.ndim}


def _combine(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    combined = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        combined[key] = values[-1] if key.startswith(LAST_VALUES) else float(np.mean(values))
    return combined
