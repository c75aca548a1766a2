"""The training loop.

Step t (1-based) is one rollout batch and at most one update:

1. take ``batch_size`` problems
2. sample ``group_size`` responses to each with the published policy; rewards are scored as responses arrive. With
   ``rollout.max_staleness`` both are done ahead of the step (``run/pipeline.py``)
3. observe the mean response length over all of them; the rate of this very update follows
4. advantages; groups whose rewards are all equal carry no loss, and with no group left the update is skipped
5. pack into rows
6. one compiled step (forward, mismatch, loss, backward, AdamW), or several mini-batches
7. publish the weights as policy version t; with ``rollout.update`` responses that are sampled ahead go on with them
8. evaluate when due, then record one row
9. check the guard; checkpoint when due

A step is finished when point 6 is done: whatever fails after that, its state and row are saved; whatever fails before,
those of the step before are. Everything random derives from (seed, step), so a resumed run repeats what an
uninterrupted one would have done. The loop knows neither which engine it talks to nor where its metrics go.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.data.prompts import PromptStream
from rljax.data.tokenizer import Tokenizer
from rljax.errors import ConfigError, OwnedError, StoppedWaitingError, caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import mean_accuracy
from rljax.run.guard import Guard, SkippedUpdates
from rljax.run.pipeline import Batches
from rljax.run.profiling import StepProfiler
from rljax.run.progress import Progress, check_fingerprints, check_policy, policy_record
from rljax.run.rate import RateController, load_fork, observed_value, schedule_row
from rljax.run.rollout_files import write_rollouts
from rljax.run.sampling import mixed_fraction, rollout_row, step_seed, training_sequences
from rljax.trainer.measure import without_empty_buckets
from rljax.trainer.packing import useful_fraction
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, UpdateOptions

Record = Callable[[Row, dict[str, np.ndarray]], None]


@dataclass
class Components:
    """What a run is made of; put together by ``run.build``."""

    config: Config
    policy: PolicyConfig
    engine: RolloutEngine
    stream: PromptStream
    batches: Batches
    tokenizer: Tokenizer
    rewards: RewardPool
    evaluate: Callable[[], Row] | None
    update: Update
    controller: RateController
    guard: Guard
    skipped: SkippedUpdates
    checkpointer: Checkpointer
    fingerprints: dict[str, str]
    weights: Callable[[Params], Params] = lambda params: params
    enter_phase: Callable[[str], None] = lambda name: None

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """The JSON part of a checkpoint; later changes of the components do not show in it."""
        return copy.deepcopy(
            progress.state_dict()
            | {
                "guard": self.guard.state_dict(),
                "skipped_updates": self.skipped.state_dict(),
                "data": self.batches.state_dict(),
                "schedule": self.controller.state_dict(),
                "policy": policy_record(self.policy),
                "fingerprints": self.fingerprints,
            }
        )

    def load_state_dict(self, host: dict[str, Any]) -> Progress:
        """Puts the components where the checkpoint was taken, if the run can go on from its JSON part.

        Raises:
          ValueError: it is of another policy, reference or training data.
          LookupError, TypeError, AttributeError, ArithmeticError: it is not one of a run.
        """
        check_policy(host["policy"], self.policy, self.config.model.path)
        model, data = self.config.model.path, self.config.data
        names = {"reference": model, "base": model, "problems": data.path or data.task}
        check_fingerprints(host.get("fingerprints", {}), self.fingerprints, names)
        self.stream.load_state_dict(host["data"])
        if Path(self.config.run.fork).name == str(host["step"]):
            load_fork(self.controller, host["schedule"], self.config.schedule)
        else:
            self.controller.load_state_dict(host["schedule"])
        self.guard.load_state_dict(host["guard"])
        # Checkpoints of before it was counted have none.
        self.skipped.load_state_dict(host.get("skipped_updates", {"in_a_row": 0, "since_step": 0}))
        return Progress.from_state_dict(host)


class Timers:
    """Seconds of each phase of a step, as ``time/<phase>_s``."""

    def __init__(self, enter_phase: Callable[[str], None]) -> None:
        """``enter_phase`` is called with the name of each phase."""
        self.row: Row = {}
        self._enter_phase = enter_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block."""
        self._enter_phase(name)
        start = time.perf_counter()
        yield
        self.row[f"time/{name}_s"] = time.perf_counter() - start


@dataclass
class Standing:
    """Where a run stands: its newest finished step, which is saved when the run ends, whatever ends it.

    A step is finished when its update is done; what follows may still fail, and its row then lacks it.

    Attributes:
      state: device state after that step; donated to the next.
      progress: advanced in place.
      host: JSON part of a checkpoint of the newest recorded step.
      row: of that step.
      histograms: likewise.
      is_recorded: whether the row is in the record, and ``host`` of that step.
    """

    state: TrainState
    progress: Progress
    host: dict[str, Any]
    row: Row
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    is_recorded: bool = True

    def finish(self, state: TrainState, row: Row, histograms: dict[str, np.ndarray]) -> None:
        """The update of the next step is done, which made the next policy version."""
        self.state, self.row, self.histograms, self.is_recorded = state, row, histograms, False
        self.progress.step += 1
        self.progress.policy_version += 1


def one_step(run: Components, at: Standing) -> None:
    """Points 1 to 8 of the next step, but for the record; ``at`` is advanced after point 6."""
    config, timers, start = run.config, Timers(run.enter_phase), time.perf_counter()
    progress, last_row = at.progress, at.row
    step, version = progress.step + 1, progress.policy_version
    seed = step_seed(config.run.seed, step)
    row: Row = {"step": step}
    if step == 1 and config.eval.at_start:
        row |= {f"{key}_at_start": value for key, value in evaluate(run, timers, "eval_at_start").items()}

    with timers.phase(run.batches.phase):
        rollouts, of_sampling = run.batches.take(lambda: run.enter_phase(run.batches.phase))
    row |= rollout_row(rollouts, version) | rollouts.metrics | of_sampling
    if config.rollout.update != "wait":
        row["rollout/mixed_fraction"] = mixed_fraction(rollouts)

    observed = observed_value(config.schedule.metric, row, last_row)
    rate = run.controller.step(observed, row["response_length/truncated_fraction"])

    sequences = training_sequences(rollouts, config, version)
    with timers.phase("pack"):
        batch = run.update.pack(sequences)
    with timers.phase("train"):
        noise, free = (
            is_due(every, step) for every in (config.diagnosis.grad_noise_every, config.diagnosis.free_routing_every)
        )
        options = UpdateOptions(rate, seed, noise, free)
        updated = run.update(at.state, batch, sequences, options)
    at.finish(updated.state, row, updated.histograms)

    if any(sequence.in_loss for sequence in sequences):
        progress.observe_grad_norm(updated.row["optimizer/grad_norm"])
    row |= without_empty_buckets(updated.row) | schedule_row(run.controller)
    row |= progress.sum_rise(row, config.diagnosis.reference_steps)
    row["optimizer/grad_norm_ema"] = progress.grad_norm_ema
    row["perf/useful_token_fraction"] = useful_fraction(sequences, batch)
    try:
        params = run.weights(at.state.params)
        with contextlib.ExitStack() as pause:
            if config.rollout.max_staleness:
                with timers.phase("prepare"):
                    run.engine.prepare(params, progress.policy_version)
            with timers.phase("drain") if config.rollout.max_staleness else contextlib.nullcontext():
                drains = config.rollout.update == "wait" or is_evaluated(config, step)
                pause.enter_context(run.batches.paused(lambda: run.enter_phase("drain"), drains=drains))
            with timers.phase("publish"):
                published = publish(run, params, progress.policy_version)
            row |= published or {}
            write_rollouts(config, step, version, rollouts, sequences, updated.trainer_logprobs, run.tokenizer)
            if published is not None and is_evaluated(config, step):
                try:
                    row |= evaluate(run, timers, "eval")
                except StoppedWaitingError as error:
                    print(f"the evaluation of step {step} is given up: {error}", file=sys.stderr)
    finally:
        row |= timers.row | {"time/step_s": time.perf_counter() - start}
        response_tokens = sum(response.length for response in rollouts.all())
        row["perf/response_tokens_per_s"] = response_tokens / row["time/rollout_s"]


def is_evaluated(config: Config, step: int) -> bool:
    """Whether the policy is evaluated after this step."""
    return is_due(config.eval.every, step) or (config.eval.every > 0 and step == config.run.steps)


def evaluate(run: Components, timers: Timers, phase: str) -> Row:
    """``eval/<dataset>/...`` of the published policy; {} when nothing is evaluated on."""
    if run.evaluate is None:
        return {}
    with timers.phase(phase):
        return run.evaluate()


def publish(run: Components, params: Params, version: int) -> Row | None:
    """The metrics of a publish; None when the run was asked to stop and no server is there to take it."""
    try:
        return run.engine.publish(params, version)
    except StoppedWaitingError:
        return None


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


def record_step(run: Components, at: Standing, record: Record) -> list[str]:
    """Records the newest finished step and shows its row to the guard. Returns the guard's warnings.

    Raises:
      ConfigError: a rule of the guard names a metric that no row has; the row is recorded then.
    """
    record(at.row, at.histograms)
    at.is_recorded = True
    run.skipped.observe(at.row)
    try:
        with caller_errors():
            warnings, at.progress.stopped_by = run.guard.check(at.row)
    finally:
        at.host = run.state_dict(at.progress)
    return warnings


def save(run: Components, at: Standing, sync: Callable[[], None]) -> None:
    """Saves the newest step, once the rows that a resume from it needs are on the disk."""
    sync()
    run.checkpointer.save(at.progress.step, at.state, at.host)


def save_newest(run: Components, at: Standing, record: Record, sync: Callable[[], None]) -> str:
    """Records and saves the newest finished step where that was not done, and waits for it. Returns what to say."""
    checkpointer, step = run.checkpointer, at.progress.step
    with contextlib.suppress(RuntimeError):  # an older save that failed
        checkpointer.wait()
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(at.state)):
        return f"the update that failed had already taken the state of step {step}; {what_remains(checkpointer)}"
    if not at.is_recorded:
        with contextlib.suppress(ConfigError):
            record_step(run, at, record)
    if not step:
        return "no step was finished"
    if checkpointer.latest_step() != step:
        save(run, at, sync)
        checkpointer.wait()
    lacks = is_evaluated(run.config, step) and run.evaluate and not any(key.startswith("eval/") for key in at.row)
    without = ", its row without the evaluation that was due" if lacks else ""
    return f"step {step} is saved{without}; the same command goes on from there"


def what_remains(checkpointer: Checkpointer) -> str:
    """Where a run can go on from."""
    step = checkpointer.latest_step()
    return "there is no checkpoint" if step is None else f"what remains is the checkpoint of step {step}"


def say_skipped(run: Components) -> str:
    """The line that ends a run of too many skipped updates; it is asked for when the step has been saved."""
    skipped, config = run.skipped, run.config
    run.checkpointer.wait()
    before = [step for step in run.checkpointer.all_steps() if step < skipped.since_step]
    good = f"is {Path(config.run.dir, 'checkpoints', str(before[-1]))}" if before else "does not exist"
    return (
        f"{skipped.in_a_row} updates in a row, since step {skipped.since_step}, were skipped because their gradients "
        f"are not finite (guard.max_skipped_updates = {config.guard.max_skipped_updates}); the last good checkpoint, "
        f"from before them, {good}"
    )


def train(
    run: Components,
    state: TrainState,
    progress: Progress,
    record: Record,
    should_stop: Callable[[], bool] = lambda: False,
    last_row: Row | None = None,
    sync: Callable[[], None] = lambda: None,
) -> TrainState:
    """Runs to the last step, or until ``should_stop`` or the guard says so after a step; then the step is saved.

    When the engine stops waiting for servers, or ``run.gives_up`` says so, the step that samples is given up and the
    last one saved; an evaluation after the update is given up alone. Any other error, and an interrupt, is raised again
    once the newest finished step is recorded and saved, which a line on stderr says: of a step whose update is done the
    new state, else the one before. An OwnedError of ``record`` or ``sync`` is raised at once.

    Args:
      run: what the run is made of.
      state: device state at ``progress``; donated.
      progress: where the run stands; advanced in place.
      record: takes each step's row and histograms, in order; when it raises, the row is not recorded.
      should_stop: asked after each step.
      last_row: the row of step ``progress.step``, for a schedule that watches a metric of the step before.
      sync: called before each save; returns when the recorded rows are on the disk.

    Returns:
      The device state after the last step done; its files are complete.

    Raises:
      ConfigError: a rule of the guard names a metric that no row has.
    """
    config, checkpointer = run.config, run.checkpointer
    at, is_save_due = Standing(state, progress, run.state_dict(progress), last_row or {}), False
    run.skipped.start(int(state.skipped_updates), int(state.loss_scale.overflows))
    if publish(run, run.weights(state.params), progress.policy_version) is None:
        return state
    run.batches.start(progress.step, should_stop)
    try:
        with StepProfiler(config.run.profile_steps, Path(config.run.dir) / "profile") as profiler:
            while progress.step < config.run.steps:
                with profiler.step(progress.step + 1):
                    one_step(run, at)
                for line in record_step(run, at, record):
                    print(f"\nwarning: guard: {line}", file=sys.stderr)
                stopping = should_stop() or bool(progress.stopped_by) or run.skipped.are_too_many
                # While updates are skipped the weights stay as they are, and the checkpoint from before stays the last.
                is_save_due |= is_due(config.checkpoint.every, progress.step)
                if stopping or progress.step == config.run.steps or (is_save_due and not run.skipped.in_a_row):
                    save(run, at, sync)
                    is_save_due = False
                if run.skipped.are_too_many:
                    progress.stopped_by.append(say_skipped(run))
                if config.checkpoint.keep_best and (accuracy := mean_accuracy(at.row)) is not None:
                    checkpointer.save_best(progress.step, accuracy, at.state, at.host)
                if stopping:
                    break
        checkpointer.wait()
    except StoppedWaitingError as error:
        print(f"step {progress.step + 1} is given up: {error}", file=sys.stderr)
        save_newest(run, at, record, sync)
    except OwnedError:  # the run is another process's now: nothing more is written into it
        raise
    except BaseException:
        try:
            said = save_newest(run, at, record, sync)
        except Exception as second:
            why = " ".join(str(second).split())
            said = f"step {progress.step} could not be saved: {why}; {what_remains(checkpointer)}"
        print(f"\n{said}", file=sys.stderr)
        raise
    finally:
        run.batches.close()
    return at.state
