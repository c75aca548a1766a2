"""The updates of a rollout batch: one fused step, or several mini-batches and epochs, chosen when a run is built.

``TurnsUpdate`` also measures the mismatch by turn. ``subtract_baselines`` gives each token an advantage of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rljax.algorithms.advantages import optimal_token_advantages
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch import importance_weights
from rljax.mismatch.diagnosis import mismatch_by_turn
from rljax.policy.head import TokenScores
from rljax.policy.model import Params
from rljax.sharding import fetch, on_devices, on_host
from rljax.trainer.packing import PackedBatch, TrainSequence, groups_of, trajectories, unpack, unpack_whole
from rljax.trainer.state import TrainState
from rljax.trainer.step import TrainStep

Pack = Callable[[Sequence[TrainSequence]], PackedBatch]
Forward = Callable[..., tuple[dict[str, jax.Array], TokenScores]]  # The type of ``TrainStep.forward``.
# A function that gives sequences with ``old_logprobs`` the advantages of their tokens, from the sums of the squared
# probabilities, float32 [r] for each sequence.
Baseline = Callable[[Sequence[TrainSequence], Sequence[np.ndarray]], list[TrainSequence]]
Reference = Callable[[PackedBatch], np.ndarray]  # It returns the reference policy's log-probabilities [m, b, t].

# The row of a step has the last mini-batch's value of these metrics.
LAST_VALUES = ("optimizer/skipped_updates", "precision/loss_scale", "precision/overflows", "schedule/")
LARGEST = "precision/activation_max"  # the largest of the separate forward and the updates
NOISE = "optimizer/grad_noise"


class TrainerValues(NamedTuple):
    """The trainer's numbers of the response tokens of a step before its first update, for each sequence."""

    logprobs: list[np.ndarray]  # float32 [r], the log-probabilities (nats)
    entropy: list[np.ndarray] | None = None  # float32 [r], the entropies of the distributions (nats); None if not kept
    # float32 [r, k], the log-probabilities of ``top_ids``, -inf where the id is -1; None if not kept
    tops: list[np.ndarray] | None = None


def unpack_values(values: TokenScores, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> TrainerValues:
    """Fetches the values of the tokens of a packed batch from the devices, and splits them by sequence."""
    fetched = (None if x is None else fetch(x) for x in (values.logprobs, values.entropy, values.tops))
    logprobs, *others = (None if x is None else unpack(x, batch, sequences) for x in fetched)
    assert logprobs is not None
    return TrainerValues(logprobs, *others)


class Updated(NamedTuple):
    """The result of the updates of a rollout batch."""

    state: TrainState  # the state after the updates
    row: dict[str, float]  # the metrics of the step, by name
    histograms: dict[str, np.ndarray]  # the counts of each histogram, by name
    trainer: Callable[[], TrainerValues]  # a function that fetches the trainer's numbers of the tokens


class UpdateOptions(NamedTuple):
    """The choices that the training loop makes for the updates of one rollout batch."""

    learning_rate: float  # the learning rate of every update
    seed: int  # the seed of the order of mini-batches
    noise: bool  # whether to measure "optimizer/grad_noise"
    free_routing: bool = False  # whether to measure the mismatch without replayed routes, too
    self_mismatch: bool = False  # whether to measure the mismatch of the trainer with itself, too


class Update(Protocol):
    """A way to train on the responses of one step."""

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Packs the sequences of a step into the rows of the compiled shape."""
        ...

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates of one rollout batch with its ``sequences`` and the batch that ``pack`` returned for them.

        The state is donated.
        """
        ...


def reference_logprobs(forward: Forward, params: Params, batch: PackedBatch) -> np.ndarray:
    """Computes the log-probabilities of the response tokens under a frozen policy.

    The routes of the trained policy are not replayed. If ``params`` are in the host's memory, a copy is on the devices
    until this returns. The result is float32 [m, b, t], and 0 outside the responses.
    """
    logprobs = fetch(forward(on_devices(params), batch._replace(routes=None))[1].logprobs)
    return np.where(batch.response_mask, logprobs, np.float32(0.0))


FREE_ROUTING = ("log_ppl_abs_diff", "logprob_abs_diff_mean", "k3_kl")


def free_routing_row(forward: Forward, params: Params, batch: PackedBatch, options: UpdateOptions) -> dict[str, float]:
    """Measures ``mismatch_free_routing/<name>``, with the trainer's own routes, if asked and routes are replayed."""
    if not options.free_routing or batch.routes is None:
        return {}
    measured = jax.device_get(forward(params, batch._replace(routes=None))[0])
    return {f"mismatch_free_routing/{name}": float(measured[f"mismatch/{name}"]) for name in FREE_ROUTING}


@dataclass(frozen=True)
class SingleUpdate:
    """An ``Update`` that makes one update, whose own forward gives the mismatch and the old log-probabilities."""

    step: TrainStep
    forward: Forward  # the forward without a gradient
    pack: Pack  # the packing function for both
    reference: Reference | None = None  # the scorer under the reference policy of a KL penalty; None without a penalty

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes one update of the whole batch."""
        if self.reference is not None:
            batch = batch._replace(reference_logprobs=self.reference(batch))
        free = free_routing_row(self.forward, state.params, batch, options)
        noise = options.noise and int(batch.with_loss) > 1
        has_loss = any(s.in_loss for s in sequences)
        state, metrics, values = self.step(state, batch, options.learning_rate, has_loss, noise)
        row, histograms = fetch_metrics(metrics, noise=noise)
        return Updated(state, row | free, histograms, lambda: unpack_values(values, batch, sequences))


@dataclass(frozen=True)
class MultipleUpdates:
    """An ``Update`` that makes one update for each mini-batch of prompts, in one or more epochs.

    One separate forward computes ``old_logprobs`` before the first update.
    """

    step: TrainStep  # the compiled step, of batches that ``pack_mini`` makes from the sequences of a mini-batch
    forward: Forward  # the forward without a gradient, of batches that ``pack`` makes from all sequences of a step
    pack: Pack
    pack_mini: Pack
    _: KW_ONLY
    mini_batches: int  # the number of updates in each epoch
    epochs: int  # the number of passes over the sequences
    group_size: int  # the number of responses to a prompt
    reference: Reference | None = None  # the function of ``SingleUpdate.reference``
    replays_own: bool = False  # whether tokens take the routes of the separate forward (``rollout.router_replay: r2``)
    baseline: Baseline | None = None  # the function that gives tokens advantages; None: they have their response's
    for_dumps: bool = False  # whether the entropies of the tokens are kept for token dumps

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Measures the whole batch with one forward, then makes one update for each mini-batch."""
        free = free_routing_row(self.forward, state.params, batch, options)
        flags = {"with_routes": self.replays_own, "with_collision": self.baseline is not None}
        flags["for_dumps"] = self.for_dumps
        measured, values = self.forward(state.params, batch, **flags)
        trainer = unpack_values(values, batch, sequences)
        old = trainer.logprobs
        known = [s.add({"old_logprobs": own}) for s, own in zip(sequences, old, strict=True)]
        if values.routes is not None:
            of_sequences = unpack_whole(fetch(values.routes), batch, sequences)
            known = [s.add({"routes": own}) for s, own in zip(known, of_sequences, strict=True)]
        if self.baseline is not None:
            known = self.baseline(known, unpack(fetch(values.collision), batch, sequences))
        if self.reference is not None:
            of_reference = unpack(self.reference(batch), batch, sequences)
            known = [s.add({"reference_logprobs": own}) for s, own in zip(known, of_reference, strict=True)]
        results: list[tuple[dict[str, jax.Array], bool, bool]] = []
        for mini in self._split(known, options.seed):
            mini_batch = self.pack_mini(mini)
            mini_batch = mini_batch._replace(used=mini_batch.with_loss)  # The forward has measured the others.
            noise = options.noise and not results and int(mini_batch.used) > 1
            has_loss = any(s.in_loss for s in mini)
            state, metrics, _ = self.step(state, mini_batch, options.learning_rate, has_loss, noise)
            results.append((metrics, noise, has_loss))
        of_batch, histograms = fetch_metrics(measured, noise=False)
        minis = [fetch_metrics(metrics, noise=noise)[0] for metrics, noise, _ in results]
        row = _combine(minis, [has_loss for *_, has_loss in results], self.epochs)
        largest = {LARGEST: float(np.maximum(row[LARGEST], of_batch[LARGEST]))}
        return Updated(state, row | of_batch | free | largest, histograms, lambda: trainer)

    def _split(self, sequences: Sequence[TrainSequence], seed: int) -> list[list[TrainSequence]]:
        """Returns the mini-batches of all epochs. They have complete groups, and each epoch has its own order."""
        groups = groups_of(sequences, self.group_size)
        rng = np.random.default_rng(seed)
        orders = [np.array_split(rng.permutation(len(groups)), self.mini_batches) for _ in range(self.epochs)]
        chosen = [part for order in orders for part in order if len(part)]  # groups without tokens may be missing
        return [[sequences[i] for group in part for i in groups[group]] for part in chosen]


@dataclass(eq=False)
class UpdateAround:
    """The base class of updates around another ``update``, which packs the sequences of a step."""

    update: Update

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Packs the sequences of a step as the inner update does."""
        return self.update.pack(sequences)


class OffloadedUpdate(UpdateAround):
    """An ``Update`` whose state lies in the host's memory (``sharding.on_host``) before and after it.

    Frozen weights, such as the base of adapters or a reference policy, may lie in it too; their readers copy them. If
    an update fails, the state before it is intact, because only a copy on the devices was donated.
    """

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Copies the state to the devices, makes the updates, and copies the new state back; the row has both times."""
        began = time.perf_counter()
        here = jax.block_until_ready(on_devices(state))
        reloaded = time.perf_counter()
        updated = self.update(here, batch, sequences, options)
        done = time.perf_counter()
        state = on_host(updated.state)
        took = {"time/reload_s": reloaded - began, "time/offload_s": time.perf_counter() - done}
        return updated._replace(state=state, row=updated.row | took)


def fetch_metrics(metrics: dict[str, jax.Array], *, noise: bool) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Fetches the metrics to the host: scalars, and arrays. ``NOISE`` is left out if it was not measured."""
    host: dict[str, Any] = jax.device_get(metrics)
    scalars = {key: value.item() for key, value in host.items() if value.ndim == 0 and (noise or key != NOISE)}
    return scalars, {key: value for key, value in host.items() if value.ndim}


def _combine(rows: Sequence[dict[str, float]], with_loss: Sequence[bool], epochs: int) -> dict[str, float]:
    """Combines the rows of the updates. Mini-batches without loss have only last values, if another one has loss."""
    measured = [row for row, has_loss in zip(rows, with_loss, strict=True) if has_loss] or rows
    combined = {}
    for key in dict.fromkeys(key for row in measured for key in row):
        values = [row[key] for row in measured if key in row]
        if key.startswith(LAST_VALUES):
            combined[key] = rows[-1][key]
        elif key.endswith("_max"):
            combined[key] = float(np.max(values))
        else:
            combined[key] = float(np.sum(values) / epochs if key.endswith("_count") else np.mean(values))
    return combined


class TurnsUpdate(UpdateAround):
    """An ``Update`` that also measures ``turns/<name>``, on the host, from the numbers of the update itself."""

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates, and measures the turns of all sequences."""
        updated = self.update(state, batch, sequences, options)
        every = updated.trainer()
        return updated._replace(row=updated.row | turn_metrics(sequences, every.logprobs), trainer=lambda: every)


def turn_metrics(sequences: Sequence[TrainSequence], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Computes the metrics ``turns/<name>``. The sequences of a trajectory must follow one another.

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


def subtract_baselines(
    sequences: Sequence[TrainSequence],
    collisions: Sequence[np.ndarray],
    *,
    group_size: int,
    correction: CorrectionConfig,
) -> list[TrainSequence]:
    """Gives tokens in the loss advantages by ``optimal_token_advantages``, and others their response's advantage.

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
