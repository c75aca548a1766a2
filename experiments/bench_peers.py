"""Compares a training step on the CPU with the steps of other trainers, on the same tokens.

    python experiments/bench_peers.py --python tunix=TUNIX_PYTHON --python maxtext=MAXTEXT_PYTHON \\
        --python easydel=EASYDEL_PYTHON --python rljax=TUNIX_PYTHON --rounds 5 --json benchmarks/peers_step.json

Every side trains the same random Qwen3 policy with clipping and AdamW, in a process of its own (``peer_steps.py``,
``peer_sides.py``). All have the same first weights, and the norms of the gradients are compared. rljax measures the
mismatch and the entropy in its step, and the measurements of the mismatch are also timed alone. The sides take turns.
A ratio is the median over turns of a side's seconds over the seconds of rljax: above 1, rljax is faster. From six turns
on, the file also has the ratio's exact 95% interval.

``--python SIDE=PATH`` names the interpreter of a package's environment, which also needs the package jaxtyping. A side
whose package is missing has an error in its row. ``rljax=PATH`` runs rljax on the jax of that environment. The result
is written after each case, and a case that is in the file already is not measured again. So the program can run in
pieces: first ``--rounds 0`` to compile, then another number of rounds with the same ``--programs`` to measure.

    python experiments/bench_peers.py --platform cuda --rounds 10 --limit-s 100 --json peers_card.json

This measures Qwen3-0.6B's shape on one NVIDIA GPU. The sides compile at the same time. Then each side makes its weights
and all of its steps, and its process ends, so that the next side has all of the card's memory. A ratio is that of the
median times. Its range begins with the side's fastest step over the slowest step of rljax, and ends with the side's
slowest step over the fastest step of rljax. ``peak_bytes`` are the most bytes that the process had on the card. No GPU
has run this part yet: its programs were compiled for an H100, and small cases ran on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_steps
from peer_steps import Case
from scipy import stats
from tqdm import tqdm

OWN = "rljax"
LARGE = {"vocab": 151_936, "sequences": 4, "tokens": 128}
CASES = {
    "width 256, 4 layers, 8 x 256 tokens, float32": Case(),
    "recorded lengths": Case(tokens=0),
    "blocks recomputed": Case(remat=True),
    "twice the layers": Case(layers=8),
    "twice the tokens": Case(sequences=16),
    "width 512": Case(width=512),
    "width 512, blocks recomputed": Case(width=512, remat=True),
    "bfloat16": Case(dtype="bfloat16"),
    "bfloat16, width 512": Case(width=512, dtype="bfloat16"),
    "bfloat16, blocks recomputed": Case(remat=True, dtype="bfloat16"),
    "recorded lengths, width 512": Case(width=512, tokens=0),
    "recorded lengths, bfloat16": Case(tokens=0, dtype="bfloat16"),
    "vocabulary 151,936, 4 x 128 tokens": Case(**LARGE),
    "vocabulary 151,936, width 512": Case(width=512, **LARGE),
    "vocabulary 151,936, blocks recomputed": Case(remat=True, **LARGE),
    "vocabulary 151,936, bfloat16": Case(dtype="bfloat16", **LARGE),
}
QWEN3 = {"width": 1024, "layers": 28, "vocab": 151_936, "head_dim": 128}  # Qwen3-0.6B
ON_CARD = QWEN3 | {"remat": True, "dtype": "bfloat16", "card": True}
CARD_CASES = {
    "Qwen3-0.6B, 4 x 2,304 tokens": Case(sequences=4, tokens=2304, **ON_CARD),
    "Qwen3-0.6B, 8 recorded lengths": Case(tokens=0, scale=56, recorded=8, **ON_CARD),
    "Qwen3-0.6B, 1 x 8,192 tokens": Case(sequences=1, tokens=8192, **ON_CARD),
}
SIDES = {
    "cpu": [side for side in peer_steps.SIDES if side != peer_steps.PACKED],
    "cuda": [OWN, "tunix", "maxtext", peer_steps.PACKED],
}
"""The sides of a platform, unless ``--sides`` names others."""
ENVIRONMENTS = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    "cuda": {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


class Worker:
    """The process of one side."""

    def __init__(self, side: str, interpreter: str, programs: str, environment: dict[str, str], logs: Path | None):
        """Starts the process.

        Args:
          side: The name of the side.
          interpreter: The Python of its package.
          programs: The directory of compiled programs.
          environment: The variables that choose the platform.
          logs: The directory for what the process prints; None to drop it.
        """
        log = logs / f"{re.sub('[^a-z]+', '_', side)}.txt" if logs else Path(os.devnull)
        here = Path(__file__).resolve()
        paths = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [interpreter, "-W", "ignore", str(here.with_name("peer_steps.py")), side],
                env=os.environ
                | environment
                | {"PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": programs}
                | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "ENABLE_DISTRIBUTED_INIT": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, **message: Any) -> dict[str, Any]:
        """Sends a message and returns the answer."""
        self.send(**message)
        return self.receive()

    def send(self, **message: Any) -> None:
        """Sends a message, unless the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # there will be no answer, either
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """Returns the answer to a message. A process that takes more than ``limit_s`` seconds is killed."""
        assert self._process.stdout is not None  # it is a pipe
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self.end()
            return {"error": f"it took more than {limit_s:.0f} s"}
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else {"error": "its process has ended"}

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Returns the exact 95% interval of the median; None for fewer than six values, which have no such interval."""
    low, high = map(float, stats.quantile_test(values, q=statistics.median(values), p=0.5).confidence_interval(0.95))
    return None if math.isnan(low) or math.isnan(high) else [low, high]


def compare(case: Case, workers: dict[str, Worker], rounds: int, compiled: dict[str, Any]) -> dict[str, Any]:
    """Measures the sides, which take turns. A side that fails has an error instead of times.

    ``compiled`` has the facts of the sides whose programs were compiled before. They are kept.
    """
    sides = {name: worker.ask(build=case._asdict()) | compiled.get(name, {}) for name, worker in workers.items()}
    ready = [name for name, facts in sides.items() if "error" not in facts]
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name in ready:
            seconds[name].append(workers[name].ask(run=True)["seconds"])
    for name in ready if rounds else []:
        ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds[OWN], strict=True)]
        sides[name] |= {
            "seconds": seconds[name],
            "ratio": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "interval": median_interval(ratios),
        }
    return {"case": case._asdict(), "sides": sides}


def time_alone(worker: Worker, rounds: int, limit_s: float) -> dict[str, Any]:
    """Times the steps of a side whose process then ends. The first two steps are not timed.

    Returns the seconds, the norm of the first step, and the most bytes in use on the card; or an error instead.
    """
    end = time.monotonic() + limit_s
    steps = []
    for _ in range(2 + rounds):
        worker.send(run=True)
        steps.append(worker.receive(max(1.0, end - time.monotonic())))
        if "error" in steps[-1]:
            break
    worker.end()
    if "error" in steps[-1]:
        return {"error": steps[-1]["error"]}
    return steps[-1] | {"norm": steps[0]["norm"], "seconds": [step["seconds"] for step in steps[2:]]}


def compare_on_card(
    case: Case, workers: dict[str, Worker], rounds: int, limit_s: float, *, alone: bool = False
) -> dict[str, Any]:
    """Compiles the steps of all sides of a case, then times one side after the other.

    A side that fails or takes too long has an error instead of times.

    Args:
      case: The shape of the policy and of the batch.
      workers: The process of each side, which has ended when this function returns.
      rounds: The number of timed steps of each side.
      limit_s: The longest time to compile a side, and the longest time of its steps (seconds).
      alone: Whether only one side compiles at a time.

    Returns:
      The case, and the facts of each side.
    """
    try:
        sides: dict[str, Any] = {}
        if not alone:
            for worker in workers.values():
                worker.send(compile=case._asdict())
        end = time.monotonic() + limit_s
        for side, worker in workers.items():
            if alone:
                worker.send(compile=case._asdict())
                end = time.monotonic() + limit_s
            sides[side] = worker.receive(max(1.0, end - time.monotonic()))
        for side, facts in sides.items():
            if "error" not in facts:
                facts |= time_alone(workers[side], rounds, limit_s)
    finally:
        for worker in workers.values():
            worker.end()
    add_ratios(sides)
    return {"case": case._asdict(), "sides": sides}


def add_ratios(sides: dict[str, Any]) -> None:
    """Adds the ratio of the medians, and its range, to the facts of each side that has times."""
    ours = sides[OWN].get("seconds")
    for facts in sides.values() if ours else ():
        if theirs := facts.get("seconds"):
            facts["ratio"] = statistics.median(theirs) / statistics.median(ours)
            facts["range"] = [min(theirs) / max(ours), max(theirs) / min(ours)]


def row(name: str, side: str, facts: dict[str, Any]) -> str:
    """Returns a row of the table."""
    if "error" in facts:
        return f"| {name} | {side} | {facts['error']} | | | | | |"
    times = "| | "
    if "ratio" in facts:
        low, high = facts["range"]
        times = f"{statistics.median(facts['seconds']) * 1e3:.0f} | {facts['ratio']:.2f} | {low:.2f} - {high:.2f}"
    size = f"{facts['temporary_bytes'] / 2**20:.0f}" if "temporary_bytes" in facts else ""
    took = f"{facts['compile_core_s']:.1f}" if "compile_core_s" in facts else ""
    return f"| {name} | {side} | {times} | {size} | {took} | {facts['norm']:.4f} |"


def mismatch_row(name: str, facts: dict[str, Any]) -> str:
    """Returns the row of the mismatch alone, whose ratio is its share of the step of rljax."""
    milliseconds = facts["mismatch_s"] * 1e3
    share = f"{facts['mismatch_s'] / statistics.median(facts['seconds']):.4f}" if "seconds" in facts else ""
    return f"| {name} | the mismatch alone | {milliseconds:.2f} | {share} | | | | |"


def command_of(arguments: Sequence[str]) -> str:
    """Returns the command with these arguments, without the paths of interpreters."""
    named = (re.sub(r"^(tunix|maxtext|easydel|rljax)=.*", r"\1=\1_PYTHON", argument) for argument in arguments)
    return f"python experiments/bench_peers.py {shlex.join(named)}"


def parser_of_options() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH", help="interpreter of a package")
    parser.add_argument("--platform", choices=ENVIRONMENTS, default="cpu", help="where the sides run (cpu)")
    parser.add_argument("--sides", nargs="+", choices=peer_steps.SIDES, metavar="SIDE", help="sides to run")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases to run (all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (7); 0: only compile")
    parser.add_argument("--programs", help="directory for compiled programs, which later runs need not compile")
    parser.add_argument("--again", action="store_true", help="measure cases that are in the file already")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    card = parser.add_argument_group("only with --platform cuda")
    card.add_argument("--limit-s", type=float, default=120, help="seconds for compilation, and for a side's turn (120)")
    card.add_argument("--compile-alone", action="store_true", help="one compiler at a time, which tunes undisturbed")
    card.add_argument("--logs", type=Path, help="directory for what the sides print")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser_of_options().parse_args(arguments)
    on_card = options.platform == "cuda"
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    chosen = {
        name: case
        for name, case in (CARD_CASES if on_card else CASES).items()
        if not options.only or name in options.only
    }
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results: dict[str, Any] = kept.get("cases", {})
    names = list(dict.fromkeys([OWN, *(options.sides or SIDES[options.platform])]))
    wanted = "seconds" if options.rounds else "norm"

    def missing(name: str) -> bool:
        found = results.get(name, {"sides": {}})["sides"]
        return options.again or not all({wanted, "error"} & set(found.get(side, ())) for side in names)

    def keep(name: str, one: dict[str, Any]) -> None:
        """Prints the rows of a case, and writes it."""
        found = results.get(name, {"sides": {}})["sides"]
        results[name] = one | {"sides": found | one["sides"]}
        for side in names:
            print(row(name, side, one["sides"][side]), flush=True)
        if "mismatch_s" in one["sides"][OWN]:
            print(mismatch_row(name, one["sides"][OWN]), flush=True)
        norms = [facts["norm"] for facts in one["sides"].values() if "error" not in facts]
        is_float32 = one["case"]["dtype"] == "float32"
        if is_float32 and not all(math.isclose(norm, norms[0], rel_tol=1e-3) for norm in norms):
            raise RuntimeError(f"the sides compute different gradients: norms {norms}")
        if options.json:
            machine = f"{platform.machine()}, {os.cpu_count()} cores"
            report = {"command": command_of(arguments), "machine": machine, "cases": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as empty:
        programs = str(options.programs or empty)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
        environment = ENVIRONMENTS[options.platform]

        def start() -> dict[str, Worker]:
            pythons = {name: interpreters.get(name.split()[0].strip(","), sys.executable) for name in names}
            return {name: Worker(name, python, programs, environment, options.logs) for name, python in pythons.items()}

        print("| case | side | ms | side / rljax | from - to | temporaries MiB | compiled, core-s | gradient's norm |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        todo = {name: case for name, case in chosen.items() if missing(name)}
        if on_card:
            for name, case in todo.items():
                of_card = options.rounds, options.limit_s
                keep(name, compare_on_card(case, start(), *of_card, alone=options.compile_alone))
            return 0
        workers = start()
        for name, case in tqdm(todo.items(), disable=not sys.stderr.isatty()):
            of_program = ("compile_core_s", "compile_s", "temporary_bytes")
            found = results.get(name, {"sides": {}})["sides"]
            compiled = {side: {k: facts[k] for k in of_program if k in facts} for side, facts in found.items()}
            keep(name, compare(case, workers, options.rounds, compiled))
        for worker in workers.values():
            worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
