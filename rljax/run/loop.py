"""The loop of a run: it makes the steps (``rljax.run.step``), records them and saves them.

A step is finished when its update is made. If something fails later, this step's state and row are saved; if it fails
earlier, those of the previous step. Everything random derives from (seed, step), so a resumed run makes the same steps
as an uninterrupted one. The loop knows neither its engine nor where its metrics go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path

import jax

from rljax.errors import ConfigError, OwnedError, StoppedWaitingError, caller_errors
from rljax.record.rows import Row
from rljax.record.writers import Recorder
from rljax.run.checkpoint import Checkpointer
from rljax.run.evaluation import mean_accuracy
from rljax.run.step import NewestStep, Progress, RunParts, is_due, one_step
from rljax.trainer.state import TrainState


def _begin_step(parts: RunParts, newest: NewestStep) -> None:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(newest.state)) // jax.process_count()
    evaluated_s = sum(seconds for key, seconds in newest.row.items() if key.startswith("time/eval_"))
    step_s = newest.row["time/step_s"] - evaluated_s if "time/step_s" in newest.row else None
    parts.stop.begin_step(step_s, parts.checkpointer, size)


def _record_step(parts: RunParts, newest: NewestStep, record: Recorder) -> list[str]:
    """Records the newest finished step, and returns the warnings of the guard about its row."""
    parts.check_owner()
    newest.row |= parts.word(newest.row)
    record.write(newest.row, newest.histograms)
    newest.is_recorded = True
    _begin_step(parts, newest)
    try:
        with caller_errors():
            warnings, newest.progress.stopped_by = parts.guard.check(newest.row)
    finally:
        newest.host = parts.state_dict(newest.progress)
    return warnings


def _save(parts: RunParts, newest: NewestStep, record: Recorder) -> None:
    """Saves the newest step, once the rows that a resume from it needs are on the disk."""
    parts.check_owner()
    record.sync()
    parts.checkpointer.save(newest.progress.step, newest.state, newest.host)


def _save_newest(parts: RunParts, newest: NewestStep, record: Recorder) -> str:
    """Records and saves the newest finished step if necessary, and waits for its files; returns a line about it."""
    checkpointer, step = parts.checkpointer, newest.progress.step
    with contextlib.suppress(RuntimeError):  # an older save that failed
        checkpointer.wait()
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(newest.state)):
        return f"the update that failed had already taken the state of step {step}; {_last_checkpoint(checkpointer)}"
    if not newest.is_recorded:
        with contextlib.suppress(ConfigError):
            _record_step(parts, newest, record)
    if not step:
        return "no step was finished"
    if checkpointer.latest_step() != step:
        _save(parts, newest, record)
        checkpointer.wait()
    lacks = parts.evaluation.is_due(step) and not any(key.startswith("eval/") for key in newest.row)
    without = ", its row without the evaluation that was due" if lacks else ""
    return f"step {step} is saved{without}; the same command goes on from there"


def _last_checkpoint(checkpointer: Checkpointer) -> str:
    step = checkpointer.latest_step()
    return "there is no checkpoint" if step is None else f"what remains is the checkpoint of step {step}"


def _skipped_line(parts: RunParts, progress: Progress) -> str:
    """Returns the line that ends a run after too many skipped updates. The step must be saved before the call."""
    config, count, since = parts.config, progress.not_finite, progress.not_finite_since
    parts.checkpointer.wait()
    before = [step for step in parts.checkpointer.all_steps() if step < since]
    good = f"is {Path(config.run.dir, 'checkpoints', str(before[-1]))}" if before else "does not exist"
    return (
        f"{count} updates in a row, since step {since}, were skipped because their gradients are not finite "
        f"(guard.max_skipped_updates = {config.guard.max_skipped_updates}); the last good checkpoint, from before "
        f"them, {good}"
    )


def train(
    parts: RunParts, state: TrainState, progress: Progress, record: Recorder, last_row: Row | None = None
) -> TrainState:
    """Runs to the last step, or until a stop request or the guard ends the run after a step; the step is then saved.

    If the stop request interrupts a wait, the step under way is given up and the last finished step is saved. Any other
    error or interrupt is raised again after the newest finished step is recorded and saved. A line on stderr says so.
    An OwnedError is raised at once.

    ``state`` is the state after step ``progress.step``. It is donated, and ``progress`` is advanced in place.
    ``last_row`` is the row of that step, None for step 0. A schedule may watch its metrics, and counters go on from it.
    Returns the training state after the last finished step, whose checkpoint is complete.
    """
    checkpointer = parts.checkpointer
    newest = NewestStep(state, progress, parts.state_dict(progress), last_row or {})
    _begin_step(parts, newest)
    try:
        parts.engine.publish(parts.weights(state.params), progress.policy_version)
    except StoppedWaitingError:
        return state
    parts.batches.start(progress.step)
    try:
        _make_and_save_steps(parts, newest, record)
    except OwnedError:  # the run is another process's now, or gone: nothing more is written into it
        checkpointer.abandon()
        raise
    finally:
        parts.batches.close()
    return newest.state


def _make_and_save_steps(parts: RunParts, newest: NewestStep, record: Recorder) -> None:
    """Makes the steps that are left. If a step is given up or fails, the newest finished step is saved."""
    progress, checkpointer = newest.progress, parts.checkpointer
    try:
        _make_steps(parts, newest, record)
        checkpointer.wait()
    except StoppedWaitingError as error:
        print(f"step {progress.step + 1} is given up: {error}", file=sys.stderr)
        _save_newest(parts, newest, record)
    except OwnedError:
        raise
    except BaseException as error:
        try:
            said = _save_newest(parts, newest, record)
        except OwnedError as lost:  # the first error is a consequence
            raise lost from error
        except Exception as second:
            why = " ".join(str(second).split())
            said = f"step {progress.step} could not be saved: {why}; {_last_checkpoint(checkpointer)}"
        print(f"\n{said}", file=sys.stderr)
        raise


def _make_steps(parts: RunParts, newest: NewestStep, record: Recorder) -> None:
    """Makes, records and saves the steps that are left, and profiles those of ``run.profile_steps``."""
    config, progress, is_save_due = parts.config, newest.progress, False
    first, last = config.run.profile_steps or (0, -1)
    begin = max(first, progress.step + 1)
    with contextlib.ExitStack() as profile:
        while progress.step < config.run.steps:
            step = progress.step + 1
            if step == begin <= last:
                profile.enter_context(jax.profiler.trace(Path(config.run.dir) / "profile"))
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                one_step(parts, newest)
            if step == last:
                profile.close()
            for line in _record_step(parts, newest, record):
                print(f"\nwarning: guard: {line}", file=sys.stderr)
            skips_too_many = 0 < config.guard.max_skipped_updates <= progress.not_finite
            stopping = parts.stop.is_requested() or bool(progress.stopped_by) or skips_too_many
            # While updates are skipped the weights stay as they are, and the checkpoint from before stays the last.
            is_save_due |= is_due(config.checkpoint.every, progress.step)
            if stopping or progress.step == config.run.steps or (is_save_due and not progress.not_finite):
                _save(parts, newest, record)
                is_save_due = False
            if skips_too_many:
                progress.stopped_by.append(_skipped_line(parts, progress))
            if config.checkpoint.keep_best and (accuracy := mean_accuracy(newest.row)) is not None:
                of = repr(dataclasses.replace(config.eval, every=0, at_start=False, pass_k=()))
                parts.checkpointer.save_best(progress.step, accuracy, newest.state, newest.host, of)
            if stopping:
                break
