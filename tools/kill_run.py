"""Kills a small training run at random moments, resumes it, and compares its rows with those of a run left alone.

    python tools/kill_run.py --kills 50 --seeds 0 1 2 3 --json benchmarks/kill_run.json

Each kill is a SIGKILL aimed at one phase, in turn: the start, the rollout, the step, the publish, the row of the log,
the checkpoint, the evaluation. It comes a random time after the phase began, and counts for the phase in which it
struck. The phases are told by the run's own process, which marks them in memory that it shares with this one. Runs are
of configs/toy-base with the embedded engine: their rows must be equal bit for bit but for time/* and perf/*, none lost
or doubled, and so must the tokens of their dumps. Exit status 1 when they are not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tqdm import tqdm

from rljax.errors import run_cli
from rljax.report.rows import read_rows

ROOT = Path(__file__).parents[1]
PHASES = ("start", "rollout", "step", "publish", "log", "checkpoint", "evaluation")
OTHER = len(PHASES)  # between two phases
LONGEST_S = 300.0  # no phase of so small a run takes longer
PASSED_BY = 2  # at most so many times does a phase go by before the kill

SETTINGS = (
    *("--data.batch-size", "2", "--rollout.group-size", "4", "--rollout.max-response-tokens", "12"),
    *("--packing.row-tokens", "64", "--packing.rows-per-micro-batch", "2", "--diagnosis.grad-noise-every", "0"),
    *("--checkpoint.every", "2", "--eval.every", "5", "--rollout.dump-every", "3", "--optimizer.learning-rate", "2e-4"),
)


@dataclass(frozen=True)
class Arguments:
    """How often, and on which runs."""

    kills: int = 50
    """Kills in all."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Seeds of the runs and of the moments; each seed is one run left alone and as many killed ones as it takes."""
    steps: int = 20
    """Steps of a run."""
    directory: Path | None = None
    """Keeps the runs there. None: in a temporary directory."""
    json: Path | None = None
    """File for the result."""


@dataclass
class Killed:
    """What was done to a run directory, and what became of it."""

    seed: int
    phases: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def words(run_dir: Path, seed: int, steps: int) -> list[str]:
    """The command line of a run."""
    base = [str(ROOT / "configs/quickstart.yaml"), "--model.path", str(ROOT / "configs/toy-base")]
    return [*base, "--run.dir", str(run_dir), "--run.seed", str(seed), "--run.steps", str(steps), *SETTINGS]


def child(arguments: list[str], log: Path, phase: Any) -> None:
    """Trains; marks the phase under way in ``phase``. Runs in a process of its own."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    mark_phases(phase)
    from rljax import train

    sys.exit(run_cli(train.main, arguments))


def mark_phases(phase: Any) -> None:
    """Wraps what a step is made of, so that ``phase`` holds the place in ``PHASES`` of what is under way."""
    from rljax.run.checkpoint import Checkpointer
    from rljax.run.loop import Timers
    from rljax.run.record import Recorder

    places = {"rollout": 1, "train": 2, "publish": 3, "eval": 6}
    timed, write, save = Timers.phase, Recorder.write, Checkpointer.save

    @contextlib.contextmanager
    def marked(name: str, place: int, inner: Callable[[], Any]) -> Iterator[None]:
        phase.value = place
        try:
            with inner():
                yield
        finally:
            phase.value = OTHER

    def marking(place: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with marked("", place, contextlib.nullcontext):
                return function(*args, **options)

        return call

    Timers.phase = lambda self, name: marked(name, places.get(name, OTHER), lambda: timed(self, name))
    Recorder.write = marking(4, write)
    Checkpointer.save = marking(5, save)


class Runs:
    """Starts runs from one server process that has imported everything, so that a start takes a second."""

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rljax.train", "orbax.checkpoint", "tensorboardX", "matplotlib.pyplot"])

    @contextlib.contextmanager
    def start(self, run_dir: Path, seed: int, steps: int) -> Iterator[tuple[Any, Any]]:
        """The process of a run in ``run_dir``, and its phase; it is killed at the end of the block."""
        phase = self._context.RawValue("i", 0)
        log = run_dir.with_suffix(".log")
        process = self._context.Process(target=child, args=(words(run_dir, seed, steps), log, phase))
        process.start()
        try:
            yield process, phase
        finally:
            process.kill()
            process.join()

    def complete(self, run_dir: Path, seed: int, steps: int) -> None:
        """Trains to the end. Raises RuntimeError when that fails."""
        with self.start(run_dir, seed, steps) as (process, _):
            process.join(LONGEST_S)
            if process.exitcode != 0:
                log = run_dir.with_suffix(".log").read_text()[-2000:]
                raise RuntimeError(f"the run in {run_dir} ended with {process.exitcode}:\n{log}")


def kill_once(process: Any, phase: Any, aim: int, pause_s: float, passes: int, run_dir: Path) -> str | None:
    """Waits until the phase ``aim`` has begun ``passes`` + 1 times and ``pause_s`` more; kills. Returns what was hit.

    None when the run ended before that. A save goes on beside the next step: a kill while its files are there counts
    for the checkpoint.
    """
    deadline, before = time.monotonic() + LONGEST_S, OTHER
    while passes >= 0:
        now = phase.value
        passes -= now == aim != before
        before = now
        if process.exitcode is not None:
            return None
        if time.monotonic() > deadline:
            raise RuntimeError(f"{run_dir}: no {PHASES[aim]} within {LONGEST_S:g} s")
        time.sleep(0.0005 if aim else 0.0)
    time.sleep(pause_s)
    # Stopped, so that nothing moves between the look and the kill.
    os.kill(process.pid, signal.SIGSTOP)
    hit = phase.value
    is_saving = any(run_dir.glob("checkpoints/*tmp*"))
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    return "checkpoint" if is_saving else (*PHASES, "between")[hit]


def durations(rows: Sequence[dict[str, Any]], start_s: float) -> tuple[float, ...]:
    """What each phase takes (seconds), in the order of ``PHASES``; of log and checkpoint a guess."""
    keys = ("time/rollout_s", "time/train_s", "time/publish_s")
    rollout, step, publish = (statistics.median(row[key] for row in rows) for key in keys)
    evaluation = statistics.median(row["time/eval_s"] for row in rows if "time/eval_s" in row)
    return start_s, rollout, step, publish, 0.003, 0.1, evaluation


def differences(killed: Path, whole: Path) -> list[str]:
    """How the record of a killed run differs from that of one left alone; [] where it does not."""
    from rljax.compare.dump import read_dump

    rows, expected = (comparable(each) for each in (killed, whole))
    found = []
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        found.append(f"{killed}: steps {[row['step'] for row in rows]}")
    for row, other in zip(rows, expected, strict=False):
        keys = [key for key in {**row, **other} if row.get(key) != other.get(key)]
        if keys:
            found.append(f"{killed}: step {row['step']} differs in {', '.join(sorted(keys)[:5])}")
    dumps, wanted = (sorted(path.name for path in each.glob("rollouts/*")) for each in (killed, whole))
    if dumps != wanted:
        found.append(f"{killed}: dumps {dumps}")
    for name in set(dumps) & set(wanted):
        tokens, others = (read_dump(each / "rollouts" / name).token_ids for each in (killed, whole))
        if not all(np.array_equal(a, b) for a, b in zip(tokens, others, strict=True)):
            found.append(f"{killed}: other tokens in {name}")
    return found


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The rows without what depends on the clock."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def harass(runs: Runs, arguments: Arguments, directory: Path) -> list[Killed]:
    """Kills as often as wanted, seed by seed; at the end of each run its rows are compared."""
    results, aims = [], itertools.cycle(range(len(PHASES)))
    shares = [len(range(i, arguments.kills, len(arguments.seeds))) for i in range(len(arguments.seeds))]
    with tqdm(total=arguments.kills, unit="kill", file=sys.stderr) as bar:
        for seed, share in zip(arguments.seeds, shares, strict=True):
            whole, chance = directory / f"whole{seed}", random.Random(seed)
            runs.complete(whole, seed, arguments.steps)
            began = time.monotonic()
            runs.complete(whole, seed, arguments.steps)  # nothing is left to do: that is a start
            times = durations(read_rows(whole / "metrics.jsonl"), time.monotonic() - began)
            for number in itertools.count():
                if not share:
                    break
                result, run_dir = Killed(seed), directory / f"killed{seed}-{number}"
                while share:
                    aim = next(aims)
                    pause_s = chance.uniform(0.0, times[aim])
                    passes = chance.randint(0, PASSED_BY) if aim else 0
                    with runs.start(run_dir, seed, arguments.steps) as (process, phase):
                        hit = kill_once(process, phase, aim, pause_s, passes, run_dir)
                    if hit is None:
                        break
                    result.phases[hit] += 1
                    share -= 1
                    bar.update()
                runs.complete(run_dir, seed, arguments.steps)
                result.differences = differences(run_dir, whole)
                results.append(result)
    return results


def main(argv: Sequence[str]) -> int:
    """Kills, resumes and compares; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.rmtree(directory / "runs", ignore_errors=True)
        (directory / "runs").mkdir(parents=True)
        results = harass(Runs(), arguments, directory / "runs")
    phases = sum((result.phases for result in results), Counter())
    found = [line for result in results for line in result.differences]
    record = {
        "command": "python tools/kill_run.py " + " ".join(argv),
        "kills": phases.total(),
        "runs": len(results),
        "by_phase": {name: phases[name] for name in (*PHASES, "between") if phases[name]},
        "seconds": round(time.monotonic() - began, 1),
        "differences": found,
    }
    print(f"{record['kills']} kills in {record['runs']} runs of {arguments.steps} steps, {record['seconds']} s")
    print(", ".join(f"{name} {count}" for name, count in record["by_phase"].items()))
    print(
        "\n".join(found) or "every row and every dump is that of the run left alone, bit for bit; none lost or doubled"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(run_cli(main))
