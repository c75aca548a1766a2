"""One step of a run. The docstring of ``one_step`` lists its actions, and ``RunParts`` has the objects that it uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.data.tokenizer import Tokenizer
from rljax.mismatch.diagnosis import split_sum_rise
from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params
from rljax.record.rows import Row
from rljax.rollout.engine import RolloutEngine
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import Evaluation
from rljax.run.fingerprint import check_fingerprints, check_policy, policy_record
from rljax.run.guard import Guard
from rljax.run.pipeline import Batches
from rljax.run.rate import RateController, ess_row, load_fork, observed_value, schedule_row, share_row
from rljax.run.rollout_files import write_rollouts
from rljax.run.sampling import ResponseSource, rollout_row, step_seed, training_sequences
from rljax.run.stop import StopRequest, Timers
from rljax.run.watch import Watch, Word, declared_by
from rljax.trainer.measure import without_empty_buckets
from rljax.trainer.packing import useful_fraction
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions

REFERENCE_STEPS = 10  # the steps at the start of a run that a rise of the mismatch is compared with
GRAD_NORM_EMA_DECAY = 0.9  # of the moving average of the gradient norm, per step


@dataclass
class RunParts:
    """The objects of a run, which ``rljax.run.build.build`` makes.

    The function ``weights`` returns the policy to sample from, given the parameters of the training state. The function
    ``check_owner`` raises OwnedError once another process has taken over the run directory.
    """

    config: Config
    policy: PolicyConfig
    engine: RolloutEngine
    batches: Batches
    tokenizer: Tokenizer
    source: ResponseSource
    evaluation: Evaluation
    update: Update
    controller: RateController
    guard: Guard
    checkpointer: Checkpointer
    fingerprints: dict[str, str]  # the checksums of tokenizer, chat template, problems and frozen weights
    stop: StopRequest
    weights: Callable[[Params], Params] = lambda params: params
    check_owner: Callable[[], None] = lambda: None
    watch: Watch = field(default_factory=Watch)
    word: Word = field(init=False)

    def __post_init__(self) -> None:
        self.word = Word(declared_by(self.config))

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """Returns the JSON part of a checkpoint. It is a copy, which later steps do not change."""
        return copy.deepcopy(
            progress.state_dict()
            | {
                "guard": self.guard.state_dict(),
                "data": self.batches.state_dict(),
                "schedule": self.controller.state_dict(),
                "policy": policy_record(self.policy),
                "fingerprints": self.fingerprints,
            }
        )

    def load_state_dict(self, host: dict[str, Any]) -> Progress:
        """Restores the parts from the JSON part of a checkpoint; returns the progress of the run at that step.

        Raises ValueError if the checkpoint belongs to another policy, other frozen weights, another tokenizer or
        template, or other training data.
        """
        check_policy(host["policy"], self.policy, self.config.model.path)
        model, data = self.config.model.path, self.config.data
        source = data.path or data.task
        names = dict.fromkeys(self.fingerprints, model) | {"problems": source, "extra_info": source}
        check_fingerprints(host.get("fingerprints", {}), self.fingerprints, names)
        self.batches.load_state_dict(host["data"])
        if self.config.run.fork_step == host["step"]:
            load_fork(self.controller, host["schedule"], self.config.schedule)
        else:
            self.controller.load_state_dict(host["schedule"])
        self.guard.load_state_dict(host["guard"])
        return Progress.from_state_dict(host)


@dataclass
class NewestStep:
    """The newest finished step of a run. It is saved when the run ends, even if the run ends by an error.

    A step is finished when its update is made. If the publish or evaluation fails, the row lacks their metrics.
    """

    state: TrainState  # the state after the step; the next step donates it
    progress: Progress  # the counters after the step, which are advanced in place
    host: dict[str, Any]  # the JSON part of a checkpoint of the newest recorded step
    row: Row  # the metrics of the step
    histograms: dict[str, np.ndarray] = field(default_factory=dict)  # the counts of each histogram, by name
    is_recorded: bool = True  # whether the row is recorded, and so ``host`` belongs to this step

    def advance(self, updated: Updated, row: Row) -> None:
        """Makes the next step the newest one, after its update. Metrics may be added to ``row`` later."""
        self.state, self.row, self.histograms, self.is_recorded = updated.state, row, updated.histograms, False
        self.progress.step += 1
        self.progress.policy_version += 1


def one_step(parts: RunParts, newest: NewestStep) -> None:
    """Makes the next step of a run, but does not record it. ``newest`` becomes this step once its update is made.

    1. Take ``batch_size`` problems.
    2. Sample ``group_size`` responses to each with a published policy, and score each response as it arrives. With
       ``rollout.refill`` groups whose rewards are all equal are replaced by groups of further problems.
    3. Observe the mean length of all responses, replaced ones included. It decides the rate of this very update.
    4. Compute the advantages. A group whose rewards are all equal carries no loss.
    5. Pack the responses into rows.
    6. Make the update: one compiled step, or several mini-batches. If no group carries loss, skip it. Print a line if
       the responses do not belong to their prompts or tokens.
    7. Publish the weights as the next policy version.
    8. Evaluate the policy when that is due.
    """
    config, progress, timers = parts.config, newest.progress, Timers(parts.stop)
    step, version = progress.step + 1, progress.policy_version
    row: Row = {"step": step} | parts.evaluation.at_start(step, timers)

    # 1 and 2
    rollouts = parts.batches.take(timers)
    row |= rollout_row(rollouts, version) | rollouts.row

    # 3
    observed = observed_value(config.schedule.metric, row, newest.row)
    row |= ess_row(config.schedule, newest.row)
    # Another metric does not measure the length limit.
    is_length = config.schedule.metric.startswith("response_length/")
    rate = parts.controller.step(observed, row["response_length/truncated_fraction"] if is_length else None)
    rate *= row.get("schedule/ess_factor", 1.0)

    # 4
    sequences = training_sequences(rollouts, config, version)

    # 5
    with timers.phase("pack"):
        batch = parts.update.pack(sequences)

    # 6
    with timers.phase("train"):
        updated = parts.update(newest.state, batch, sequences, update_options(config, step, rate))
    last_row = newest.row
    newest.advance(updated, row)
    row |= without_empty_buckets(updated.row) | schedule_row(parts.controller)
    has_loss = any(sequence.in_loss for sequence in sequences)
    row |= progress.observe(row, has_loss=has_loss)
    progress.count_skipped(row, last_row, config.loss.mini_batches * config.loss.epochs)
    row["perf/useful_token_fraction"] = useful_fraction(sequences, batch)
    row |= share_row(config.schedule, sequences, updated.trainer)
    row |= parts.watch(row, sequences, updated.trainer)

    try:
        # 7
        params = parts.weights(newest.state.params)
        with parts.batches.paused(params, version + 1, timers, drains=parts.evaluation.is_due(step)):
            with timers.phase("publish"):
                row |= parts.engine.publish(params, version + 1)
            parts.check_owner()
            write_rollouts(config, step, version, rollouts, sequences, updated.trainer, parts.tokenizer)

            # 8
            row |= parts.evaluation.after(step, timers)
    finally:
        row |= timers.row | {"time/step_s": timers.seconds()}
        row["perf/response_tokens_per_s"] = rollouts.num_tokens / row["time/rollout_s"]


def update_options(config: Config, step: int, learning_rate: float) -> UpdateOptions:
    """Returns the options of the update of ``step``: its rate, its seed, and the measurements that are due."""
    diagnosis = config.diagnosis
    return UpdateOptions(
        learning_rate,
        step_seed(config.run.seed, step),
        noise=is_due(diagnosis.grad_noise_every, step),
        free_routing=is_due(diagnosis.free_routing_every, step),
        self_mismatch=is_due(diagnosis.self_every, step),
    )


def is_due(every: int, step: int) -> bool:
    """Returns whether an event that comes every ``every`` steps (0: never) falls on ``step``."""
    return every > 0 and step % every == 0


@dataclass
class Progress:
    """The counters of a run at its newest finished step."""

    step: int = 0  # the number of finished steps
    policy_version: int = 0  # the policy version that the last finished step made
    grad_norm_ema: float | None = None  # the moving average of the gradient norm; None: no norm was observed
    reference: dict[str, float] = field(default_factory=dict)  # the sums of the mismatch over the first steps
    not_finite: int = 0  # the number of updates skipped for gradients that are not finite, since one was applied
    not_finite_since: int = 0  # the step of the first of them
    stopped_by: list[str] = field(default_factory=list)  # the lines of the guard that ended the run

    def observe(self, row: Row, *, has_loss: bool) -> Row:
        """Observes the row of an update; returns the keys ``optimizer/grad_norm_ema`` and ``mismatch/sum_*`` for it.

        The gradient norm counts if it is finite and a response carried loss. The rise of the mismatch is measured from
        the first ``REFERENCE_STEPS`` steps.
        """
        if has_loss and np.isfinite(norm := row["optimizer/grad_norm"]):
            ema, decay = self.grad_norm_ema, GRAD_NORM_EMA_DECAY
            self.grad_norm_ema = norm if ema is None else decay * ema + (1 - decay) * norm
        return self._sum_rise(row) | {"optimizer/grad_norm_ema": self.grad_norm_ema}

    def _sum_rise(self, row: Row) -> Row:
        """Splits the rise of ``mismatch/log_ppl_abs_diff_sum`` above its mean in the first rows, which get {}."""
        names = ("token_count", "sequence_count", "log_ppl_abs_diff_sum")
        tokens, sequences, summed = (row[f"mismatch/{name}"] for name in names)
        reference = self.reference
        if reference.get("steps", 0) < REFERENCE_STEPS:
            values = {"steps": 1, "token_count": tokens, "sequence_count": sequences, "gap": summed * sequences}
            for name, value in values.items():
                reference[name] = reference.get(name, 0) + value
            return {}
        before = reference | {"log_ppl_abs_diff_sum": reference["gap"] / max(reference["sequence_count"], 1)}
        after = dict(zip(names, (tokens, sequences, summed), strict=True))
        return {f"mismatch/sum_{name}": value for name, value in split_sum_rise(before, after).items()}

    def count_skipped(self, row: Row, last_row: Row, updates: int) -> None:
        """Counts the updates of a step that were skipped because their gradients were not finite.

        ``row`` and ``last_row``, the row of the step before or {}, have the sums since the run began. An update without
        a response that carries loss is skipped, too, and does not count. If one of the step's updates, ``updates`` in
        number, was applied, the count begins again at 0.
        """
        names = ("optimizer/skipped_updates", "precision/overflows")
        skipped, not_finite = (row[name] - last_row.get(name, 0) for name in names)
        if skipped < updates:
            self.not_finite = 0
        elif not_finite:
            self.not_finite_since = self.not_finite_since if self.not_finite else row["step"]
            self.not_finite += not_finite

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters as a JSON object, without ``stopped_by``, which is never saved."""
        counters = {"step": self.step, "policy_version": self.policy_version, "grad_norm_ema": self.grad_norm_ema}
        skipped = {"in_a_row": self.not_finite, "since_step": self.not_finite_since}
        return counters | {"mismatch_reference": self.reference, "skipped_updates": skipped}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        """Makes the counters from :meth:`state_dict`; other keys are ignored."""
        step, version, skipped = int(state["step"]), int(state["policy_version"]), state["skipped_updates"]
        counted = (skipped["in_a_row"], skipped["since_step"])
        return cls(step, version, state["grad_norm_ema"], state["mismatch_reference"], *counted)
