"""The training loop.

Step t (1-based) is one rollout batch and at most one update:

1. take ``batch_size`` problems
2. sample ``group_size`` responses to each with the published policy; rewards are scored as responses arrive
3. observe the mean response length over all of them; the rate of this very update follows
4. advantages; groups whose rewards are all equal carry no loss, and with no group left the update is skipped
5. pack into rows
6. one compiled step (forward, mismatch, loss, backward, AdamW), or several mini-batches
7. publish the weights as policy version t
8. evaluate when due, then record one row
9. check the guard; checkpoint when due

Everything random derives from (seed, step), so a resumed run repeats what an uninterrupted one would have done. The
loop knows neither which engine it talks to nor where its metrics go.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.data.prompts import PromptStream
from rljax.data.tokenizer import Tokenizer
from rljax.errors import StoppedWaitingError, caller_errors
from rljax.policy.config import PolicyConfig
from rljax.report.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import mean_accuracy
from rljax.run.guard import Guard
from rljax.run.profiling import StepProfiler
from rljax.run.progress import Progress, check_policy, policy_record
from rljax.run.rate import RateController, observed_value, schedule_row
from rljax.run.rollout_files import write_rollouts
from rljax.run.sampling import collect_rollouts, rollout_row, score_responses, step_seed, training_sequences
from rljax.trainer.measure import without_empty_buckets
from rljax.trainer.packing import useful_fraction
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, UpdateOptions


@dataclass
class Components:
    """What a run is made of; put together by ``run.build``."""

    config: Config
    policy: PolicyConfig
    engine: RolloutEngine
    stream: PromptStream
    tokenizer: Tokenizer
    rewards: RewardPool
    sampling: SamplingParams
    evaluate: Callable[[], Row] | None
    update: Update
    controller: RateController
    guard: Guard
    checkpointer: Checkpointer

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """The JSON part of a checkpoint."""
        return progress.state_dict() | {
            "guard": self.guard.state_dict(),
            "data": self.stream.state_dict(),
            "schedule": self.controller.state_dict(),
            "policy": policy_record(self.policy),
        }

    def check_host(self, host: dict[str, Any]) -> None:
        """Raises ValueError when the JSON part of a checkpoint is of another policy."""
        check_policy(host["policy"], self.policy, self.config.model.path)

    def load_state_dict(self, host: dict[str, Any]) -> Progress:
        """Puts the components where the checkpoint was taken."""
        self.stream.load_state_dict(host["data"])
        self.controller.load_state_dict(host["schedule"])
        self.guard.load_state_dict(host["guard"])
        return Progress.from_state_dict(host)


class Timers:
    """Seconds of each phase of a step, as ``time/<phase>_s``."""

    def __init__(self) -> None:
        self.row: Row = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        yield
        self.row[f"time/{name}_s"] = time.perf_counter() - start


def one_step(
    run: Components, state: TrainState, progress: Progress, last_row: Row
) -> tuple[TrainState, Row, dict[str, np.ndarray]]:
    """Points 1 to 8 of step ``progress.step + 1``; advances ``progress``. Returns state, row and histograms."""
    config, timers, start = run.config, Timers(), time.perf_counter()
    step, version = progress.step + 1, progress.policy_version
    seed = step_seed(config.run.seed, step)
    row: Row = {"step": step}
    if step == 1 and config.eval.at_start:
        row |= {f"{key}_at_start": value for key, value in evaluate(run, timers, "eval_at_start").items()}

    with timers.phase("rollout"):
        problems = run.stream.next_batch()
        group_size = config.rollout.group_size
        scored = score_responses(
            run.engine, run.tokenizer, problems, run.rewards, run.sampling, n=group_size, seed=seed
        )
        rollouts = collect_rollouts(scored, len(problems), group_size)
    row |= rollout_row(rollouts, version) | run.rewards.pop_metrics()

    observed = observed_value(config.schedule.metric, row, last_row)
    rate = run.controller.step(observed, row["response_length/truncated_fraction"])

    sequences = training_sequences(rollouts, config, version)
    with timers.phase("pack"):
        batch = run.update.pack(sequences)
    with timers.phase("train"):
        measure_noise = is_due(config.diagnosis.grad_noise_every, step)
        updated = run.update(state, batch, sequences, UpdateOptions(rate, seed, measure_noise))
    state = updated.state

    with timers.phase("publish"):
        progress.policy_version += 1
        is_published = publish(run.engine, state, progress.policy_version)
    progress.step = step
    if any(sequence.in_loss for sequence in sequences):
        progress.observe_grad_norm(updated.row["optimizer/grad_norm"])

    row |= without_empty_buckets(updated.row) | schedule_row(run.controller)
    row |= progress.sum_rise(row, config.diagnosis.reference_steps)
    row["optimizer/grad_norm_ema"] = progress.grad_norm_ema
    row["perf/useful_token_fraction"] = useful_fraction(sequences, batch)
    row |= run.engine.pop_metrics()
    write_rollouts(config, step, version, rollouts, sequences, updated.trainer_logprobs, run.tokenizer)
    if is_published and (is_due(config.eval.every, step) or (config.eval.every > 0 and step == config.run.steps)):
        with contextlib.suppress(StoppedWaitingError):
            row |= evaluate(run, timers, "eval")
    row |= timers.row | {"time/step_s": time.perf_counter() - start}
    response_tokens = sum(response.length for response in rollouts.all())
    row["perf/response_tokens_per_s"] = response_tokens / timers.row["time/rollout_s"]
    return state, row, updated.histograms


def evaluate(run: Components, timers: Timers, phase: str) -> Row:
    """``eval/<dataset>/...`` of the published policy; {} when nothing is evaluated on."""
    if run.evaluate is None:
        return {}
    try:
        with timers.phase(phase):
            return run.evaluate()
    finally:
        # What the engine spent on it is in time/<phase>_s; the engine's own figures are of the rollouts.
        run.engine.pop_metrics()


def publish(engine: RolloutEngine, state: TrainState, version: int) -> bool:
    """Publishes; False when the run was asked to stop and no server is there to take it."""
    try:
        engine.publish(state.params, version)
    except StoppedWaitingError:
        return False
    return True


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


def train(
    run: Components,
    state: TrainState,
    progress: Progress,
    record: Callable[[Row, dict[str, np.ndarray]], None],
    should_stop: Callable[[], bool] = lambda: False,
    last_row: Row | None = None,
) -> TrainState:
    """Runs to the last step, or until ``should_stop`` or the guard says so after a step; then the step is saved.

    When the engine stops waiting for servers, the step it waits in is given up and the last one saved.

    Args:
      run: what the run is made of.
      state: device state at ``progress``; donated.
      progress: where the run stands; advanced in place.
      record: takes each step's row and histograms, in order.
      should_stop: asked after each step.
      last_row: the row of step ``progress.step``, for a schedule that watches a metric of the step before.

    Returns:
      The device state after the last step done.

    Raises:
      ConfigError: a rule of the guard names a metric that no row has.
    """
    config, checkpointer = run.config, run.checkpointer
    row = last_row or {}
    if not publish(run.engine, state, progress.policy_version):
        return state
    run.engine.pop_metrics()
    with StepProfiler(config.run.profile_steps, Path(config.run.dir) / "profile") as profiler:
        while progress.step < config.run.steps:
            data_before = run.stream.state_dict()
            try:
                with profiler.step(progress.step + 1):
                    state, row, histograms = one_step(run, state, progress, row)
            except StoppedWaitingError:
                run.stream.load_state_dict(data_before)
                if progress.step and checkpointer.latest_step() != progress.step:
                    checkpointer.save(progress.step, state, run.state_dict(progress))
                break
            record(row, histograms)
            with caller_errors():
                warnings, progress.stopped_by = run.guard.check(row)
            for line in warnings:
                print(f"\nwarning: guard: {line}", file=sys.stderr)
            stopping = should_stop() or bool(progress.stopped_by)
            if stopping or progress.step == config.run.steps or is_due(config.checkpoint.every, progress.step):
                checkpointer.save(progress.step, state, run.state_dict(progress))
            if config.checkpoint.keep_best and (accuracy := mean_accuracy(row)) is not None:
                checkpointer.save_best(progress.step, accuracy, state, run.state_dict(progress))
            if stopping:
                break
    return state
