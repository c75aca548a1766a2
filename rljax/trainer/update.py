"""The updates of a rollout batch: one fused step, or several mini-batches and epochs.

The loop gives an ``Update`` the sequences and a rate. It gets the new state, the row and the trainer's
log-probabilities. The kind of update is chosen when the parts of a run are built.
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
Forward = Callable[..., tuple[dict[str, jax.Array], Any]]  # The type of ``TrainStep.forward``.
Reference = Callable[[PackedBatch], np.ndarray]  # It returns the reference policy's log-probabilities [m, b, t].

# The row of a step has the last mini-batch's value of these metrics, and the mean of the others.
LAST_VALUES = ("optimizer/skipped_updates", "precision/", "schedule/")
NOISE = "optimizer/grad_noise"


class Updated(NamedTuple):
    """The result of the updates of a rollout batch.

    Attributes:
      state: The state after the updates.
      row: The metrics of the step, by name.
      histograms: The counts of each histogram, by name.
      trainer_logprobs: A function that fetches the trainer's log-probabilities before the first update, float32 [r] for
        each sequence.
    """

    state: TrainState
    row: dict[str, float]
    histograms: dict[str, np.ndarray]
    trainer_logprobs: Callable[[], list[np.ndarray]]


class UpdateOptions(NamedTuple):
    """The choices of the loop for one rollout batch.

    Attributes:
      learning_rate: The learning rate of every update.
      seed: The seed of the order of mini-batches.
      noise: Whether to measure ``optimizer/grad_noise``.
      free_routing: Whether to measure the mismatch without replayed routes, too.
    """

    learning_rate: float
    seed: int
    noise: bool
    free_routing: bool = False


class Update(Protocol):
    """A way to train on the responses of one step."""

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Packs the sequences of a step into the rows of the compiled shape."""
        ...

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates of one rollout batch.

        Args:
          state: The state before the updates. It is donated.
          batch: The batch that ``pack`` returned for ``sequences``.
          sequences: The responses of the step.
          options: The choices for this rollout batch.
        """
        ...


def reference_logprobs(forward: Forward, params: Params, batch: PackedBatch) -> np.ndarray:
    """Computes the log-probabilities of the response tokens under a frozen policy.

    The routes of the trained policy are not replayed. If ``params`` are in the host's memory, a copy is on the devices
    until this returns.

    Args:
      forward: The forward without a gradient.
      params: The parameters of the frozen policy.

    Returns:
      The log-probabilities, float32 [m, b, t]; 0 outside the responses.
    """
    logprobs = fetch(forward(on_devices(params), batch._replace(routes=None))[1])
    return np.where(batch.response_mask, logprobs, np.float32(0.0))


FREE_ROUTING = ("log_ppl_abs_diff", "logprob_abs_diff_mean", "k3_kl")


def free_routing_row(forward: Forward, params: Params, batch: PackedBatch) -> dict[str, float]:
    """Measures the mismatch of a batch with the trainer's own routes, as ``mismatch_free_routing/<name>``."""
    measured = jax.device_get(forward(params, batch._replace(routes=None))[0])
    return {f"mismatch_free_routing/{name}": float(measured[f"mismatch/{name}"]) for name in FREE_ROUTING}


class SingleUpdate:
    """An ``Update`` that makes one update. The forward of its loss measures, and gives the old log-probabilities."""

    def __init__(self, step: TrainStep, forward: Forward, pack: Pack, reference: Reference | None = None):
        """Stores the parts.

        Args:
          forward: The forward without a gradient, of batches that ``pack`` makes.
          pack: A function that packs sequences into a batch of the step's shape.
          reference: The log-probabilities of the reference policy of a KL penalty; None without a penalty.
        """
        self.step, self._forward, self.pack, self._reference = step, forward, pack, reference

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes one update of the whole batch."""
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
    """An ``Update`` that makes one update for each mini-batch of prompts, for several epochs.

    One separate forward computes ``old_logprobs`` before the first of them.
    """

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
        """Stores the parts.

        Args:
          step: The compiled step, of batches that ``pack_mini`` makes.
          forward: The forward without a gradient, of batches that ``pack`` makes.
          pack: A function that packs all sequences of a step.
          pack_mini: A function that packs the sequences of a mini-batch.
          mini_batches: The number of mini-batches of an epoch.
          group_size: The number of responses to a prompt.
          reference: The log-probabilities of the reference policy of a KL penalty; None without a penalty.
          replays_own: Whether the updates route each token as the separate forward did (``rollout.router_replay: r2``).
        """
        self._replays_own = replays_own
        self.step, self._forward, self.pack, self.pack_mini = step, forward, pack, pack_mini
        self._mini_batches, self._epochs, self._group_size = mini_batches, epochs, group_size
        self._reference = reference

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Measures the whole batch with one forward, then makes one update for each mini-batch."""
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
        results: list[tuple[dict[str, jax.Array], bool]] = []
        for mini in self._split(known, options.seed):
            mini_batch = self.pack_mini(mini)
            mini_batch = mini_batch._replace(used=mini_batch.with_loss)  # The forward has measured the others.
            wanted = options.noise and not results and int(mini_batch.used) > 1
            has_loss = any(s.in_loss for s in mini)
            state, metrics, _ = self.step(state, mini_batch, options.learning_rate, has_loss, wanted)
            results.append((metrics, wanted))
        of_batch, histograms = fetch_metrics(measured, noise=False)
        minis = [fetch_metrics(metrics, noise=wanted)[0] for metrics, wanted in results]
        return Updated(state, _combine(minis) | of_batch | free, histograms, lambda: old)

    def _split(self, sequences: Sequence[TrainSequence], seed: int) -> list[list[TrainSequence]]:
        """Returns the mini-batches of all epochs. They have complete groups, and each epoch has its own order."""
        size, groups = self._group_size, len(sequences) // self._group_size
        rng = np.random.default_rng(seed)
        orders = [np.split(rng.permutation(groups), self._mini_batches) for _ in range(self._epochs)]
        return [
            [s for group in chosen for s in sequences[group * size : (group + 1) * size]]
            for order in orders
            for chosen in order
        ]


def fetch_metrics(metrics: dict[str, jax.Array], *, noise: bool) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Fetches the metrics to the host: scalars, and arrays. ``NOISE`` is left out if it was not measured."""
    host: dict[str, Any] = jax.device_get(metrics)
    scalars = {key: value.item() for key, value in host.items() if value.ndim == 0 and (noise or key != NOISE)}
    return scalars, {key: value for key, value in host.items() if value.ndim}


def _combine(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    combined = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        combined[key] = values[-1] if key.startswith(LAST_VALUES) else float(np.mean(values))
    return combined
