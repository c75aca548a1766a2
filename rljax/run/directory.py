"""The run directory: its owner, its content, the checks before a run continues from it, and the logs of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rljax.distributed.files import filled_directory, replacing, write_whole
from rljax.distributed.ownership import Ownership, claim, read
from rljax.errors import ConfigError, OwnedError, caller_errors, name_changes
from rljax.record.rows import Row, read_rows
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, dotted, resolve

OWNER = "owner.json"  # the file of a run directory that names the process that trains there

# Settings that may change when a run is continued, because they do not change the meaning of a row.
MAY_DIFFER = (
    *("run.processes", "run.process_id", "run.coordinator", "run.stuck_s"),
    *("run.steps", "run.dir", "run.resume", "run.grace_s", "run.profile_steps", "mesh.", "packing.", "guard."),
    *("eval.", "checkpoint.", "record.", "publish.", "model.path", "lora.adapter", "policy.attention"),
    *("policy.experts", "data.path", "data.reward_workers", "data.check_answers", "rollout.urls", "rollout.discovery"),
    *("rollout.colocated", "rollout.transfer_dir", "rollout.api_key_file", "rollout.server_wait_s"),
    *("rollout.limits.", "rollout.verify.", "rollout.dump_every", "rollout.transcript_every", "rollout.decode_tokens"),
    *("rollout.episode.max_rows", "rollout.episode.workers", "precision.remat"),
    *("diagnosis.self_every", "diagnosis.grad_noise_every", "diagnosis.free_routing_every"),
)

# Further settings that a fork may change, because the state of a run keeps its meaning under them.
FORK_MAY_DIFFER = (
    *("run.fork", "schedule.kind", "schedule.decay_period", "schedule.multiplier", "schedule.decay_factor"),
    *("schedule.floor_ratio", "schedule.horizon", "schedule.ess_base"),
    *("optimizer.learning_rate", "optimizer.weight_decay", "rollout.top_logprobs"),
    *("correction.", "loss.", "rollout.engine", "rollout.inject.", "rollout.kv_cache_dtype"),
    *("rollout.refill", "rollout.trajectories", "rollout.server_form.", "rollout.batch_invariant"),
)


@contextlib.contextmanager
def own_directory(run_dir: Path) -> Iterator[Ownership]:
    """Makes the run directory and claims it for this process. A new directory that is empty at the end is removed.

    A line on stderr names a previous owner that is dead. Raises OwnedError if another process trains there.
    """
    with filled_directory(run_dir):
        before = read(run_dir / OWNER)
        with claim(run_dir / OWNER) as owner:
            if before is not None:
                print(f"{run_dir}: taken over from {before}, which is gone", file=sys.stderr)
            yield owner


def check_owner(owner: Ownership) -> None:
    """Raises OwnedError if the run directory does not belong to this process any more.

    Another process took it over, which may happen after a long pause of the heartbeat. Or somebody moved or removed the
    directory or the record of its owner.
    """
    run_dir = owner.path.parent
    with contextlib.suppress(OSError):
        if (folder := owner.folder()) is None:
            raise OwnedError(f"{run_dir} was removed while the run went on, with its rows and checkpoints")
        if folder != run_dir:
            moved = f"{run_dir} was moved to {folder} while the run went on"
            is_saved = any(folder.glob("checkpoints/*"))  # or is being saved
            rest = f"; run.dir = {folder} goes on from there" if is_saved else ", without a checkpoint"
            raise OwnedError(moved + rest)
        if not owner.has_record():
            raise OwnedError(f"{owner.path} was removed while the run went on, so another run may take the directory")
        if not owner.is_current() and (other := read(owner.path)) is not None:
            raise OwnedError(f"{owner.path} was taken over by {other}; this process leaves the run to it")


def check_new(config: Config) -> None:
    """Raises ValueError for settings that ``Config.check_start`` refuses, unless the run goes on from a checkpoint."""
    if not (saved_steps(Path(config.run.dir)) or config.run.fork or config.run.resume not in ("auto", "never")):
        config.check_start()


def prepare_directory(config: Config, run_dir: Path) -> None:
    """Checks that a run in ``run_dir`` may continue, or else copies the run that ``run.resume`` or ``run.fork`` names.

    If recorded steps are run again, a line on stdout says from which step on. Raises ConfigError if these settings do
    not allow the run to continue, or if there is no checkpoint to continue from.
    """
    recorded, saved = len(recorded_rows(run_dir)), saved_steps(run_dir)
    holds_run = bool(recorded or saved)
    resume = config.run.resume
    if resume == "never" and holds_run:
        raise ConfigError(f"run.resume: {run_dir} already holds a run, and run.resume = never; give another run.dir")
    if holds_run:
        has_no_step = config.run.fork_step == max(saved, default=-1)  # a fork without a checkpoint of its own
        check_same_run(config, run_dir, FORK_MAY_DIFFER[1:] if has_no_step else ())
    elif config.run.fork or resume not in ("auto", "never"):
        source, step = _fork_point(config.run.fork) if config.run.fork else (Path(resume), None)
        if not saved_steps(source):
            raise ConfigError(f"run.resume: {source} holds no checkpoint (auto, never, or the path of another run)")
        check_same_run(config, source, FORK_MAY_DIFFER if step else ("run.fork",))
        _copy_run(source, config, run_dir, step)
        recorded, saved = len(recorded_rows(run_dir)), saved_steps(run_dir)
    if not saved and recorded >= config.run.steps:
        raise ConfigError(f"{run_dir} holds {recorded} rows and no checkpoint to go on from; give another run.dir")
    if recorded > max(saved, default=0):
        print(f"going on from step {max(saved, default=0)}; {recorded} were recorded, those after it are run again")


def send_output_to(path: Path) -> None:
    """Sends the output of this process and its libraries from now on to the end of a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def recorded_config(run_dir: Path) -> Config:
    """Reads the configuration that a run directory was made with."""
    return resolve(Config, str(run_dir / "config.yaml"))


def recorded_rows(run_dir: Path) -> list[Row]:
    """Reads the rows of ``metrics.jsonl``; [] without the file. Raises ConfigError if the file is damaged."""
    path = run_dir / "metrics.jsonl"
    with caller_errors(RuntimeError):  # a damaged record
        return read_rows(path) if path.exists() else []


def saved_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the complete checkpoints of a run directory, the folders that are named by a number."""
    names = [path.name for path in run_dir.glob("checkpoints/*") if path.name.isdecimal() and path.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def _fork_point(fork: str) -> tuple[Path, int]:
    """Returns the run directory and the step that ``run.fork`` names. Raises ConfigError if it is not a checkpoint."""
    path = Path(fork)
    run_dir = path.parents[1] if path.parent.name == "checkpoints" else path
    steps = saved_steps(run_dir)
    if run_dir == path or not path.name.isdecimal() or int(path.name) not in steps:
        raise ConfigError(f"run.fork: {fork} is not a checkpoint RUN/checkpoints/STEP; {run_dir} has {steps or 'none'}")
    return run_dir, int(path.name)


def _copy_run(source: Path, config: Config, run_dir: Path, step: int | None) -> None:
    """Copies the rows of another run, and its checkpoint of ``step`` (None: all, and the best step's).

    The settings of the new run are written, too. An interrupted copy is not a run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    inside = "" if step is None else str(step)
    with replacing(run_dir / "checkpoints") as partial:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source / "checkpoints" / inside, partial / inside)
        shutil.rmtree(run_dir / "best", ignore_errors=True)
        if step is None and (source / "best").is_dir():
            with replacing(run_dir / "best") as best:
                shutil.copytree(source / "best", best, dirs_exist_ok=True)
        write_whole(run_dir / "config.yaml", config_to_yaml(config))
        with replacing(run_dir / "metrics.jsonl") as rows:
            shutil.copyfile(source / "metrics.jsonl", rows)


def check_same_run(config: Config, run_dir: Path, may_differ: tuple[str, ...] = ()) -> None:
    """Raises ConfigError if the run in a directory was made with other settings that may not change.

    Keys that begin with a text of ``MAY_DIFFER`` or ``may_differ`` may change. ConfigError is also raised for settings
    that ``Config.check_start`` refuses, unless it refuses those of that run, too.
    """
    if not (run_dir / "config.yaml").exists():
        return
    recorded = recorded_config(run_dir)
    settings = (recorded, config)
    old, new = (dict(dotted(dataclasses.asdict(each))) for each in settings)
    leaves = [key for key, value in new.items() if not isinstance(value, dict) and new[key] != old[key]]
    free = MAY_DIFFER + may_differ
    bound = {key for key in leaves if _is_bound(key, *settings)}
    if "schedule.kind" in may_differ:  # a fork has a schedule of its own
        bound.discard("run.steps")
    is_here, resume = run_dir == Path(config.run.dir), config.run.resume
    if differing := [key for key in leaves if not key.startswith(free) or key in bound]:
        changes = name_changes(old, {key: new[key] for key in differing})
        key = "run.dir" if is_here else "run.fork" if config.run.fork else "run.resume"
        raise ConfigError(f"{run_dir} holds a run with other settings: {changes}; give another {key}")
    first = recorded.run.fork_step
    if not is_here and not config.run.fork and first == max(saved_steps(run_dir), default=-1):
        own = run_dir / "checkpoints" / str(first)
        raise ConfigError(f"run.resume: {run_dir} has no checkpoint of its own yet; give run.fork = {own}")
    if is_here and resume not in ("auto", "never", recorded.run.resume):
        print(f"warning: run.resume = {resume} is not read: {run_dir} holds a run, which goes on", file=sys.stderr)
    try:
        recorded.check_start()
    except ValueError:
        return
    with caller_errors():
        config.check_start()


def _is_bound(key: str, recorded: Config, config: Config) -> bool:
    """Returns whether a key of ``MAY_DIFFER`` must keep its value all the same: it changes the numbers of this run."""
    engine, schedule = config.rollout.engine, config.schedule
    if key == "run.steps":
        # The last step is always evaluated. A longer run may make no evaluation there.
        is_seen = schedule.metric.startswith("eval/") and recorded.run.steps % (recorded.eval.every or 1) > 0
        return is_seen or (schedule.kind in ("linear", "cosine") and schedule.horizon is None)
    if key == "precision.remat":
        return can(engine, "is_exact")
    if key.startswith("diagnosis."):
        return schedule.metric.startswith(("optimizer/grad_noise", "mismatch_self/", "mismatch_free_routing/"))
    if not key.startswith("eval."):
        return False
    # The embedded engines have room for the longest response, and sums of another shape may be rounded otherwise.
    is_shaped = can(engine, "is_exact") or (can(engine, "decodes") and config.rollout.environment is not None)
    has_shape = is_shaped and key == "eval.max_response_tokens"
    is_longer = recorded.max_engine_tokens != config.max_engine_tokens
    return schedule.metric.startswith("eval/") or (has_shape and is_longer)
