"""Kills a small training run at random moments, resumes it, and compares its rows with those of an undisturbed run.

    python tests/harness/kill_run.py --kills 50 --seeds 0 1 2 3 --json benchmarks/kill_run.json
    python tests/harness/kill_run.py --engine vllm --kills 4 --seeds 0
    python tests/harness/kill_run.py --max-staleness 2 --kills 30

Each kill is a SIGKILL that aims at one phase, in turn: start, rollout, step, publish, row of the log, checkpoint,
evaluation. It comes a random time after the phase began, and counts for the phase in which it struck. The run's own
process marks its phases in memory that it shares with this process.

All runs are of configs/toy-base. With the embedded engine, no row may be lost or doubled. The rows must be equal bit
for bit except time/* and perf/*, and so must the tokens of the dumps.

With --engine vllm the runs sample in float32 from one server, which this program starts and does not kill. Two runs are
then undisturbed. A number may differ from the first one's by 10 times the largest difference between the two at any
step. A dump must have the first one's tokens unless the two differ there. publish/seconds and publish/stall_s are
clocks and are not compared. publish/verify_abs_diff_mean is not compared either, because the seeds of its probes begin
anew in each process. The exit status is 1 if anything else differs.

With --max-staleness batches are sampled ahead, and the version that samples a batch depends on the kills. The program
then checks the rows and a dump of every step:

- Each step has one row and one dump, with the prompts that the undisturbed run has, each equally often.
- No token is older than this number of versions, by the row's oldest version.
- The numerics of float32 are below 1e-4 nats for each token of known version, so the token has the right version.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
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

from rljax.errors import run_cli
from rljax.record.rows import read_rows
from rljax.rollout.servers.vllm.server import VllmConfig, start, vllm_python
from rljax.rollout.types import InFlight

ROOT = Path(__file__).parents[2]
PHASES = ("start", "rollout", "step", "publish", "log", "checkpoint", "evaluation")
OTHER = len(PHASES)  # the phase between two phases
LONGEST_S = 300.0  # the limit for a phase, in seconds
PASSED_BY = 2  # the kill lets a phase pass at most this many times
REPEATS_WITHIN = 10.0  # times the difference of two undisturbed runs
NUMERICS = 1e-4  # the limit (nats) for two engines in float32 with the same weights
NOT_COMPARED = ("time/", "perf/", "publish/seconds", "publish/stall_s", "publish/verify_abs_diff_mean")

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
    """The seeds of the runs and of the moments. Each seed has an undisturbed run (two with a server).
    """
    steps: int = 20
    """The number of steps of a run."""
    max_staleness: int = 0
    """The setting ``rollout.max_staleness``. Above 0, batches are sampled ahead and rows may differ.
    """
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


@dataclass
class Seed:
    """The runs of one seed.

    ``again`` is a second undisturbed run; it exists only if runs repeat within limits instead of exactly.
    """

    whole: Path
    again: Path | None
    killed: list[Killed] = field(default_factory=list)


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
    model = str(ROOT / "configs/toy-base")
    return VllmConfig(
        model, str(vllm_python()), "float32", port=port, max_model_len=512, max_num_seqs=64, log_path=log_path
    )


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
    from rljax.run.timers import Timers

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

    It returns None if the run ended before. A checkpoint is saved beside the next step, so a kill counts for the
    checkpoint while its files exist.
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


def differences(killed: Path, whole: Path, again: Path | None = None) -> list[str]:
    """Returns the differences between the records of a killed run and an undisturbed one; [] if there are none.

    ``again`` is a second undisturbed run. ``killed`` may differ where ``again`` differs, as the module says.
    """
    rows, expected = (comparable(each) for each in (killed, whole))
    spreads = largest_differences(again, whole) if again else {}
    found = []
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        found.append(f"{killed}: steps {[row['step'] for row in rows]}")
    for row, other in zip(rows, expected, strict=False):
        apart = distances(row, other)
        keys = [key for key, distance in apart.items() if not distance <= REPEATS_WITHIN * spreads.get(key, 0.0)]
        if keys:
            found.append(f"{killed}: step {row['step']} differs in {', '.join(sorted(keys)[:5])}")
    dumps, wanted = (sorted(path.name for path in each.glob("rollouts/*")) for each in (killed, whole))
    if dumps != wanted:
        found.append(f"{killed}: dumps {dumps}")
    vary = changed_dumps(again, whole) if again else []
    found += [f"{killed}: other tokens in {name}" for name in changed_dumps(killed, whole) if name not in vary]
    return found


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


def distances(row: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Returns |a - b| by key; it is infinite if the values differ and one is missing or no number."""
    found = {}
    for key in {**row, **other}:
        a, b = row.get(key), other.get(key)
        are_numbers = all(type(value) in (int, float) for value in (a, b))
        found[key] = 0.0 if a == b else abs(a - b) if are_numbers else math.inf
    return found


def largest_differences(run_dir: Path, whole: Path) -> dict[str, float]:
    """Returns the largest distance at any step, by key."""
    found: dict[str, float] = {}
    for row, other in zip(comparable(run_dir), comparable(whole), strict=False):
        for key, distance in distances(row, other).items():
            found[key] = max(found.get(key, 0.0), distance)
    return found


def repeatability(killed: Sequence[Path], whole: Path, again: Path) -> dict[str, Any]:
    """Returns the difference of the two undisturbed runs, and of the killed runs from the first of them."""
    spreads = largest_differences(again, whole)
    apart = [largest_differences(each, whole) for each in killed]
    varying = {key: spread for key, spread in spreads.items() if 0.0 < spread < math.inf}
    ratios = (each.get(key, 0.0) / spread for each in apart for key, spread in varying.items())
    return {
        "keys": len(spreads),
        "keys_that_vary_between_runs_left_alone": len(varying),
        "keys_that_vary_after_kills": len({key for each in apart for key, distance in each.items() if distance}),
        "largest_ratio": max(ratios, default=0.0),
        "dumps": len(list(whole.glob("rollouts/*"))),
        "dumps_that_vary_between_runs_left_alone": changed_dumps(again, whole),
    }


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows without the metrics that depend on the clock or on the process."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def harass(runs: Runs, arguments: Arguments, directory: Path) -> list[Seed]:
    """Kills as often as asked, seed by seed, and compares the rows at the end of each run."""
    results, aims = [], itertools.cycle(range(len(PHASES)))
    shares = [len(range(i, arguments.kills, len(arguments.seeds))) for i in range(len(arguments.seeds))]
    with tqdm(total=arguments.kills, unit="kill", file=sys.stderr) as bar:
        for seed, share in zip(arguments.seeds, shares, strict=True):
            whole, chance = directory / f"whole{seed}", random.Random(seed)
            repeats = arguments.engine == "jax" or arguments.max_staleness > 0
            again = None if repeats else directory / f"again{seed}"
            for run_dir in filter(None, (whole, again)):
                runs.complete(run_dir, seed, arguments.steps)
            results.append(Seed(whole, again))
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
                    result.differences = differences(run_dir, whole, again)
                results[-1].killed.append(result)
    return results


def main(argv: Sequence[str]) -> int:
    """Kills, resumes and compares; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.rmtree(directory / "runs", ignore_errors=True)
        (directory / "runs").mkdir(parents=True)
        more = stack.enter_context(engine_words(arguments.engine, directory / "runs"))
        seeds = harass(Runs((*more, *ahead_words(arguments))), arguments, directory / "runs")
        repeats = [repeatability([one.run_dir for one in s.killed], s.whole, s.again) for s in seeds if s.again]
    results = [result for seed in seeds for result in seed.killed]
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
    if repeats:
        record["repeatability"] = dict(zip(map(str, arguments.seeds), repeats, strict=True))
        print("\n".join(f"seed {seed}: {said(one)}" for seed, one in record["repeatability"].items()))
    equal = "within what the runs left alone differ by" if repeats else "that of the run left alone, bit for bit"
    sound = f"every row and every dump is {equal}; none lost or doubled"
    if arguments.max_staleness:
        sound = f"every step has its prompts once, and no token is more than {arguments.max_staleness} versions old"
    print("\n".join(found) or sound)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(bool(found))


def said(repeats: dict[str, Any]) -> str:
    """Returns a line about the result of :func:`repeatability`."""
    varying, after = repeats["keys_that_vary_between_runs_left_alone"], repeats["keys_that_vary_after_kills"]
    dumps = f"{len(repeats['dumps_that_vary_between_runs_left_alone'])} of {repeats['dumps']} dumps"
    return (
        f"of {repeats['keys']} keys {varying} vary between the two runs left alone and {after} after kills, at most "
        f"{repeats['largest_ratio']:.2g} times as much; {dumps} have other tokens in the second"
    )


if __name__ == "__main__":
    sys.exit(run_cli(main))
