"""Kills a small training run at random moments, resumes it, and compares its rows with those of an undisturbed run.

    python tests/harness/kill_run.py --kills 50 --seeds 0 1 2 3 --json benchmarks/kill_run.json
    python tests/harness/kill_run.py --max-staleness 2 --kills 30
    python tests/harness/kill_run.py --max-staleness 2 --kills 4 --seeds 0 --engine vllm

Each kill is a SIGKILL that aims at one phase, in turn: start, rollout, step, publish, row of the log, checkpoint,
evaluation. It comes a random time after the phase began, and counts for the phase in which it struck. The run's own
process marks its phases in memory that it shares with this process.

All runs are of configs/toy-base. No row may be lost or doubled. The rows must be equal bit for bit except time/* and
perf/*, and so must the tokens of the dumps. The exit status is 1 if anything differs.

With --max-staleness batches are sampled ahead, and the version that samples a batch depends on the kills. With --engine
vllm they are sampled in float32 by one server, which this program starts and does not kill. The program then checks the
rows and a dump of every step:

- Each step has one row and one dump, with the prompts that the undisturbed run has, each equally often.
- No token is older than this number of versions, by the row's oldest version.
- The numerics of float32 are below 1e-4 nats for each token of known version, so the token has the right version.
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
from typing import Any, Literal

import numpy as np
import tyro
from tqdm import tqdm

from rljax.errors import ConfigError, run_cli
from rljax.record.rows import read_rows
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.rollout.types import InFlight

ROOT = Path(__file__).parents[2]
PHASES = ("start", "rollout", "step", "publish", "log", "checkpoint", "evaluation")
OTHER = len(PHASES)  # the phase between two phases
LONGEST_S = 300.0  # the limit for a phase, in seconds
PASSED_BY = 2  # the kill lets a phase pass at most this many times
NUMERICS = 1e-4  # the limit (nats) for two engines in float32 with the same weights

SETTINGS = (
    *("--data.batch-size", "2", "--rollout.group-size", "4", "--rollout.max-response-tokens", "12"),
    *("--packing.row-tokens", "64", "--packing.rows-per-micro-batch", "2", "--diagnosis.grad-noise-every", "0"),
    *("--checkpoint.every", "2", "--eval.every", "5", "--rollout.dump-every", "3", "--optimizer.learning-rate", "2e-4"),
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command."""

    engine: Literal["jax", "vllm"] = "jax"
    """The engine: jax is the embedded engine, vllm is a server that this program starts."""
    kills: int = 50
    """The number of kills in total."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """The seeds of the runs and of the moments. Each seed has an undisturbed run."""
    steps: int = 20
    """The number of steps of a run."""
    max_staleness: int = 0
    """The setting ``rollout.max_staleness``. Above 0, batches are sampled ahead and rows may differ."""
    update: InFlight = "wait"
    """The setting ``rollout.update``, for ``--max-staleness`` with a server."""
    directory: Path | None = None
    """The directory that keeps the runs. Without it, the runs are in a temporary directory."""
    json: Path | None = None
    """The file for the result."""


@dataclass
class Killed:
    """The kills of a run directory by phase, and the differences that were found afterwards."""

    run_dir: Path
    phases: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def words(run_dir: Path, seed: int, steps: int) -> list[str]:
    """Returns the command line of a run."""
    base = [str(ROOT / "configs/quickstart.yaml"), "--model.path", str(ROOT / "configs/toy-base")]
    return [*base, "--run.dir", str(run_dir), "--run.seed", str(seed), "--run.steps", str(steps), *SETTINGS]


def ahead_words(arguments: Arguments) -> tuple[str, ...]:
    """Returns the options of runs that sample ahead; they measure numerics of all responses and dump every step."""
    if not arguments.max_staleness:
        return ()
    ahead = ("--rollout.max-staleness", str(arguments.max_staleness), "--rollout.update", arguments.update)
    dtypes = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
    return *ahead, *dtypes, "--rollout.dump-every", "1", "--diagnosis.behaviour-responses", "8"


def served_by(*found_by: str) -> tuple[str, ...]:
    """Returns the options of a run that samples from servers of :func:`server_config`, which ``found_by`` names."""
    dtypes = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
    return "--rollout.engine", "vllm", *found_by, *dtypes


def server_config(log_path: Path, port: int = 0) -> VllmConfig:
    """Returns the configuration of a vLLM server for runs of configs/toy-base.

    It computes in float32, so that rounding hardly ever decides a token.
    """
    model, python = str(ROOT / "configs/toy-base"), str(environment_python("vllm"))
    return VllmConfig(model, python, "float32", port=port, max_model_len=512, max_num_seqs=64, log_path=log_path)


@contextlib.contextmanager
def engine_words(engine: str, directory: Path) -> Iterator[tuple[str, ...]]:
    """Yields the options that choose the engine; inside the block its server runs, if it has one."""
    if engine == "jax":
        yield ()
        return
    with start(server_config(directory / "server.log"), LONGEST_S) as server:
        yield served_by("--rollout.urls", server.url)


def child(arguments: list[str], log: Path, phase: Any, prepare: Callable[[], None] | None) -> None:
    """Trains in its own process, and marks the current phase in ``phase``."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    mark_phases(phase)
    if prepare is not None:
        prepare()
    from rljax import train

    sys.exit(run_cli(train.main, arguments))


def mark_phases(phase: Any) -> None:
    """Wraps the parts of a step so that ``phase`` always holds the index in ``PHASES`` of the current part."""
    from rljax.record.writers import Recorder
    from rljax.run.checkpoint import Checkpointer
    from rljax.run.stop import Timers

    places = {"rollout": 1, "wait": 1, "train": 2, "publish": 3, "eval": 6}
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
    """A starter of runs, from one server process that has imported everything; a start then takes a second."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        """Prepares the server process. ``more`` has the last words of every run's command line."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        self._more = more
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["rljax.train", "orbax.checkpoint", "tensorboardX", "matplotlib.pyplot"])

    @contextlib.contextmanager
    def start(
        self, run_dir: Path, seed: int, steps: int, prepare: Callable[[], None] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """Yields the process of a run in ``run_dir`` and its phase; the process is killed at the end of the block.

        The process calls ``prepare`` before it trains.
        """
        phase = self.context.RawValue("i", 0)
        log = run_dir.with_suffix(".log")
        arguments = [*words(run_dir, seed, steps), *self._more]
        process = self.context.Process(target=child, args=(arguments, log, phase, prepare))
        process.start()
        try:
            yield process, phase
        finally:
            process.kill()
            process.join()

    def complete(self, run_dir: Path, seed: int, steps: int) -> None:
        """Trains to the end. Raises RuntimeError if that fails."""
        with self.start(run_dir, seed, steps) as (process, _):
            process.join(LONGEST_S)
            if process.exitcode != 0:
                log = run_dir.with_suffix(".log").read_text()[-2000:]
                raise RuntimeError(f"the run in {run_dir} ended with {process.exitcode}:\n{log}")


def kill_once(process: Any, phase: Any, aim: int, pause_s: float, passes: int, run_dir: Path) -> str | None:
    """Kills the process ``pause_s`` after the phase ``aim`` began for the time ``passes`` + 1; returns the phase hit.

    It returns None if the run ended before. A kill counts for the checkpoint while its files are under way.
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
    # The process is stopped, so that nothing changes between the look and the kill.
    os.kill(process.pid, signal.SIGSTOP)
    hit = phase.value
    is_saving = any(run_dir.glob("checkpoints/*tmp*"))
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    return "checkpoint" if is_saving else (*PHASES, "between")[hit]


def durations(rows: Sequence[dict[str, Any]], start_s: float) -> tuple[float, ...]:
    """Returns the duration of each phase (seconds), in the order of ``PHASES``; the log and checkpoint are guesses."""
    keys = ("time/rollout_s", "time/train_s", "time/publish_s")
    rollout, step, publish = (statistics.median(row[key] for row in rows) for key in keys)
    evaluation = statistics.median(row["time/eval_s"] for row in rows if "time/eval_s" in row)
    return start_s, rollout, step, publish, 0.003, 0.1, evaluation


def differences(killed: Path, whole: Path) -> list[str]:
    """Returns the differences between the records of a killed run and an undisturbed one; [] if there are none."""
    rows, expected = (comparable(each) for each in (killed, whole))
    found = []
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        found.append(f"{killed}: steps {[row['step'] for row in rows]}")
    for row, other in zip(rows, expected, strict=False):
        if keys := [key for key in {**row, **other} if row.get(key) != other.get(key)]:
            found.append(f"{killed}: step {row['step']} differs in {', '.join(sorted(keys)[:5])}")
    dumps, wanted = (sorted(path.name for path in each.glob("rollouts/*")) for each in (killed, whole))
    if dumps != wanted:
        found.append(f"{killed}: dumps {dumps}")
    return found + [f"{killed}: other tokens in {name}" for name in changed_dumps(killed, whole)]


def broken_accounts(killed: Path, whole: Path, max_staleness: int) -> list[str]:
    """Returns the errors in the accounts of a killed run that sampled ahead, as the module says, or []."""
    rows, steps = read_rows(killed / "metrics.jsonl"), [row["step"] for row in read_rows(whole / "metrics.jsonl")]
    found = [] if [row["step"] for row in rows] == steps else [f"{killed}: steps {[row['step'] for row in rows]}"]
    for row in rows:
        oldest, numerics = row["rollout/policy_version"], row.get("mismatch_numerics/logprob_abs_diff_max", 0.0)
        if not 0 <= row["step"] - 1 - oldest <= max_staleness:
            found.append(f"{killed}: step {row['step']} has a token of version {oldest}")
        if not numerics < NUMERICS:
            found.append(f"{killed}: numerics of step {row['step']} are {numerics}")
    dumps, wanted = (sorted(path.name for path in each.glob("rollouts/*")) for each in (killed, whole))
    if dumps != wanted:
        found.append(f"{killed}: dumps {dumps}")
    same = sorted({*dumps} & {*wanted})
    return found + [
        f"{killed}: other prompts in {name}" for name in same if prompts(killed, name) != prompts(whole, name)
    ]


def prompts(run_dir: Path, dump: str) -> Counter[tuple[int, ...]]:
    """Counts each prompt in a dump."""
    from rljax.record.token_dumps import read_dump

    read = read_dump(run_dir / "rollouts" / dump)
    return Counter(tuple(ids[~mask].tolist()) for ids, mask in zip(read.token_ids, read.response_mask, strict=True))


def changed_dumps(run_dir: Path, whole: Path) -> list[str]:
    """Returns the names of the dumps that both runs have with different tokens."""
    from rljax.record.token_dumps import read_dump

    found = []
    for name in sorted({path.name for path in run_dir.glob("rollouts/*")}):
        if (whole / "rollouts" / name).exists():
            tokens, others = (read_dump(each / "rollouts" / name).token_ids for each in (run_dir, whole))
            if len(tokens) != len(others) or not all(map(np.array_equal, tokens, others)):
                found.append(name)
    return found


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows without the metrics that depend on the clock."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def harass(runs: Runs, arguments: Arguments, directory: Path) -> list[Killed]:
    """Kills as often as asked, seed by seed, and compares the rows at the end of each run."""
    results, aims = list[Killed](), itertools.cycle(range(len(PHASES)))
    shares = [len(range(i, arguments.kills, len(arguments.seeds))) for i in range(len(arguments.seeds))]
    with tqdm(total=arguments.kills, unit="kill", file=sys.stderr) as bar:
        for seed, share in zip(arguments.seeds, shares, strict=True):
            whole, chance = directory / f"whole{seed}", random.Random(seed)
            runs.complete(whole, seed, arguments.steps)
            began = time.monotonic()
            runs.complete(whole, seed, arguments.steps)  # nothing is left to train: this times a start
            times = durations(read_rows(whole / "metrics.jsonl"), time.monotonic() - began)
            for number in itertools.count():
                if not share:
                    break
                run_dir = directory / f"killed{seed}-{number}"
                result = Killed(run_dir)
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
                if arguments.max_staleness:
                    result.differences = broken_accounts(run_dir, whole, arguments.max_staleness)
                else:
                    result.differences = differences(run_dir, whole)
                results.append(result)
    return results


def main(argv: Sequence[str]) -> int:
    """Kills, resumes and compares; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    if arguments.engine == "vllm" and not arguments.max_staleness:
        raise ConfigError("--engine vllm: rows of a server do not repeat bit for bit; give --max-staleness")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.rmtree(directory / "runs", ignore_errors=True)
        (directory / "runs").mkdir(parents=True)
        more = stack.enter_context(engine_words(arguments.engine, directory / "runs"))
        results = harass(Runs((*more, *ahead_words(arguments))), arguments, directory / "runs")
    phases = sum((result.phases for result in results), Counter())
    found = [line for result in results for line in result.differences]
    record = {
        "command": "python tests/harness/kill_run.py " + " ".join(argv),
        "kills": phases.total(),
        "runs": len(results),
        "by_phase": {name: phases[name] for name in (*PHASES, "between") if phases[name]},
        "seconds": round(time.monotonic() - began, 1),
        "differences": found,
    }
    print(f"{record['kills']} kills in {record['runs']} runs of {arguments.steps} steps, {record['seconds']} s")
    print(", ".join(f"{name} {count}" for name, count in record["by_phase"].items()))
    sound = "every row and every dump is that of the run left alone, bit for bit; none lost or doubled"
    if arguments.max_staleness:
        sound = f"every step has its prompts once, and no token is more than {arguments.max_staleness} versions old"
    print("\n".join(found) or sound)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(run_cli(main))
