"""Kills a small training run at random moments, resumes it, and compares its rows with those of an undisturbed run.

    python tests/harness/kill_run.py --kills 50 --seeds 0 1 2 3 --json benchmarks/kill_run.json
    python tests/harness/kill_run.py --max-staleness 2 --kills 14 --seeds 0 --steps 12

Each kill is a SIGKILL that aims at one phase, in turn: start, rollout, step, publish, row of the log, checkpoint,
evaluation. It comes a random time after the phase began, and counts for the phase in which it struck. The run's own
process marks its phases in memory that it shares with this process.

All runs are of configs/toy-base. No row may be lost or doubled. The rows must be equal bit for bit except time/* and
perf/*, and so must the tokens of the dumps. The exit status is 1 if anything differs.

With --max-staleness batches are sampled ahead, and the version that samples a batch depends on the kills. Then each
step must have one row and one dump, with the prompts of the undisturbed run, each equally often. No token may be older
than this number of versions, by the row's oldest version. The numerics of each token of known version are below 1e-4
nats in float32, so it has the right version.
"""

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
from dataclasses import dataclass
from pathlib import Path

import tyro

from rljax.errors import run_cli
from rljax.record.rows import read_rows

ROOT = Path(__file__).parents[2]
PHASES = ("start", "rollout", "step", "publish", "log", "checkpoint", "evaluation", "between")
OTHER = PHASES.index("between")
LONGEST_S = 300.0  # the limit for a phase, in seconds
PASSED_BY = 2  # the kill lets a phase pass at most this many times
NUMERICS = 1e-4  # the limit (nats) for two engines in float32 with the same weights
SETTINGS = (
    *("--data.batch-size", "2", "--rollout.group-size", "4", "--rollout.max-response-tokens", "12"),
    *("--packing.row-tokens", "64", "--packing.rows-per-micro-batch", "2", "--diagnosis.grad-noise-every", "0"),
    *("--checkpoint.every", "2", "--eval.every", "5", "--rollout.dump-every", "3", "--optimizer.learning-rate", "2e-4"),
)
FLOAT32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
MEASURED = ("--rollout.dump-every", "1", "--diagnosis.behaviour-responses", "8")  # dumps every step, and all numerics


@dataclass(frozen=True)
class Arguments:
    kills: int = 50  # The number of kills in total.
    seeds: tuple[int, ...] = (0, 1, 2, 3)  # The seeds of the runs and of the moments. Each has an undisturbed run.
    steps: int = 20  # The number of steps of a run.
    max_staleness: int = 0  # rollout.max_staleness. Above 0, batches are sampled ahead and rows may differ.
    directory: Path | None = None  # The directory that keeps the runs, instead of a temporary one.
    json: Path | None = None  # The file for the result.


def words(run_dir, seed, steps):
    base = [str(ROOT / "configs/quickstart.yaml"), "--model.path", str(ROOT / "configs/toy-base")]
    return [*base, "--run.dir", str(run_dir), "--run.seed", str(seed), "--run.steps", str(steps), *SETTINGS]


def report(argv, facts, file):
    """Prints the record of a harness, and writes it to ``file`` if there is one."""
    command = " ".join(["python tests/harness/" + Path(sys.argv[0]).name, *map(str, argv)])
    record = json.dumps({"command": command, **facts}, indent=1)
    print(record)
    if file:
        file.write_text(record + "\n")


def child(arguments, log, phase, prepare):
    """Trains in its own process; ``phase`` always holds the index in ``PHASES`` of the current part of a step."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from rljax import train
    from rljax.record.writers import Recorder
    from rljax.run.checkpoint import Checkpointer
    from rljax.run.stop import Timers

    @contextlib.contextmanager
    def marked(name):
        phase.value = PHASES.index(name)
        try:
            yield
        finally:
            phase.value = OTHER

    @contextlib.contextmanager
    def timed(self, name):
        with marked(names.get(name, "between")), plain(self, name):
            yield

    names = {"rollout": "rollout", "wait": "rollout", "train": "step", "publish": "publish", "eval": "evaluation"}
    plain, Timers.phase = Timers.phase, timed
    Recorder.write = marked("log")(Recorder.write)
    Checkpointer.save = marked("checkpoint")(Checkpointer.save)
    if prepare is not None:
        prepare()
    sys.exit(run_cli(train.main, arguments))


class Runs:
    """A starter of runs, from one server process that has imported everything; a start then takes a second."""

    def __init__(self, more=()):
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"), **os.environ}
        limits = ("MIN_COMPILE_TIME_SECS", "0"), ("MIN_ENTRY_SIZE_BYTES", "-1")
        os.environ |= {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in limits}
        self._more = more
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["rljax.train", "orbax.checkpoint", "tensorboardX", "matplotlib.pyplot"])

    @contextlib.contextmanager
    def start(self, run_dir, seed, steps, prepare=None):
        """Yields the process of a run in ``run_dir`` and its phase; the process is killed at the end of the block.

        The process calls ``prepare`` before it trains.
        """
        phase = self.context.RawValue("i", 0)
        given = ([*words(run_dir, seed, steps), *self._more], run_dir.with_suffix(".log"), phase, prepare)
        process = self.context.Process(target=child, args=given)
        process.start()
        try:
            yield process, phase
        finally:
            process.kill()
            process.join()

    def complete(self, run_dir, seed, steps):
        with self.start(run_dir, seed, steps) as (process, _):
            process.join(LONGEST_S)
            if process.exitcode != 0:
                log = run_dir.with_suffix(".log").read_text()[-2000:]
                raise RuntimeError(f"the run in {run_dir} ended with {process.exitcode}:\n{log}")


def kill_once(process, phase, aim, pause_s, passes, run_dir):
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
    os.kill(process.pid, signal.SIGSTOP)  # so that nothing changes between the look and the kill
    hit, is_saving = phase.value, any(run_dir.glob("checkpoints/*tmp*"))
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        return None
    return "checkpoint" if is_saving else PHASES[hit]


def durations(rows, start_s):
    """Returns the duration of each phase (seconds), in the order of ``PHASES``; the log and checkpoint are guesses."""
    keys = ("time/rollout_s", "time/train_s", "time/publish_s", "time/eval_s")
    *parts, evaluation = (statistics.median(row[key] for row in rows if key in row) for key in keys)
    return start_s, *parts, 0.003, 0.1, evaluation


def recorded(killed, whole, what):
    """Yields where the steps of two runs, the names of their dumps or the sequences or prompts in the dumps differ."""
    from rljax.record.token_dumps import read_dump  # the processes of the runs would import it, too

    def read(path):
        dump = read_dump(path)
        if what == "tokens":
            return [ids.tolist() for ids in dump.token_ids]
        masked = zip(dump.token_ids, dump.response_mask, strict=True)
        return Counter(tuple(ids[~mask].tolist()) for ids, mask in masked)

    steps, wanted = ([row["step"] for row in read_rows(each / "metrics.jsonl")] for each in (killed, whole))
    if steps != wanted:
        yield f"{killed}: steps {steps}"
    dumps, others = ({path.name: path for path in sorted(each.glob("rollouts/*"))} for each in (killed, whole))
    if dumps.keys() != others.keys():
        yield f"{killed}: dumps {list(dumps)}"
    same = [name for name in dumps if name in others]
    yield from (f"{killed}: other {what} in {name}" for name in same if read(dumps[name]) != read(others[name]))


def differences(killed, whole):
    """Returns the differences between the records of a killed run and an undisturbed one; [] if there are none."""
    found = list(recorded(killed, whole, "tokens"))
    for row, other in zip(*(read_rows(each / "metrics.jsonl") for each in (killed, whole)), strict=False):
        keys = [key for key in {**row, **other} if row.get(key) != other.get(key)]
        if keys := sorted(key for key in keys if not key.startswith(("time/", "perf/"))):
            found.append(f"{killed}: step {row['step']} differs in {', '.join(keys[:5])}")
    return found


def broken_accounts(killed, whole, max_staleness):
    """Returns the errors in the accounts of a killed run that sampled ahead, as the module says, or []."""
    found = list(recorded(killed, whole, "prompts"))
    for row in read_rows(killed / "metrics.jsonl"):
        oldest, numerics = row["rollout/policy_version"], row.get("mismatch_numerics/logprob_abs_diff_max", 0.0)
        if not 0 <= row["step"] - 1 - oldest <= max_staleness:
            found.append(f"{killed}: step {row['step']} has a token of version {oldest}")
        if not numerics < NUMERICS:
            found.append(f"{killed}: numerics of step {row['step']} are {numerics}")
    return found


def harass(runs, arguments, directory):
    """Kills as often as asked, seed by seed; returns the kills by phase, the number of runs and the differences."""
    phases, found, aims, count = Counter(), [], itertools.cycle(range(OTHER)), 0
    for place, seed in enumerate(arguments.seeds):
        share = len(range(place, arguments.kills, len(arguments.seeds)))
        whole, chance = directory / f"whole{seed}", random.Random(seed)
        runs.complete(whole, seed, arguments.steps)
        began = time.monotonic()
        runs.complete(whole, seed, arguments.steps)  # nothing is left to train: this times a start
        times = durations(read_rows(whole / "metrics.jsonl"), time.monotonic() - began)
        for number in itertools.count():
            if not share:
                break
            run_dir, hit = directory / f"killed{seed}-{number}", ""
            while share and hit is not None:
                aim = next(aims)
                pause_s, passes = chance.uniform(0.0, times[aim]), chance.randint(0, PASSED_BY) if aim else 0
                with runs.start(run_dir, seed, arguments.steps) as (process, phase):
                    hit = kill_once(process, phase, aim, pause_s, passes, run_dir)
                if hit is not None:
                    phases[hit] += 1
                    share -= 1
                    print(f"{phases.total()} of {arguments.kills} kills", file=sys.stderr)
            runs.complete(run_dir, seed, arguments.steps)
            ahead = arguments.max_staleness
            found += broken_accounts(run_dir, whole, ahead) if ahead else differences(run_dir, whole)
            count += 1
    return phases, count, found


def main(argv):
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = (arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))) / "runs"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        ahead = ("--rollout.max-staleness", str(arguments.max_staleness), *FLOAT32, *MEASURED)
        runs = Runs(ahead if arguments.max_staleness else ())
        phases, count, found = harass(runs, arguments, directory)
    by_phase, seconds = {name: phases[name] for name in PHASES if phases[name]}, round(time.monotonic() - began, 1)
    facts = {"kills": phases.total(), "runs": count, "by_phase": by_phase, "seconds": seconds, "differences": found}
    report(argv, facts, arguments.json)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(run_cli(main))
