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
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
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


class Worker:
    """The process of one side."""

    def __init__(self, side: str, interpreter: str, programs: str):
        """Starts the process. ``programs`` is the directory of compiled programs."""
        here = Path(__file__).resolve()
        paths = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        self._process = subprocess.Popen(
            [interpreter, "-W", "ignore", str(here.with_name("peer_steps.py")), side],
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": programs}
            | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "ENABLE_DISTRIBUTED_INIT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, **message: Any) -> dict[str, Any]:
        """Sends a message and returns the answer."""
        pipes = self._process.stdin, self._process.stdout
        if None in pipes or self._process.poll() is not None:
            return {"error": "its process has ended"}
        print(json.dumps(message), file=pipes[0], flush=True)
        answer = pipes[1].readline()  # type: ignore[union-attr]
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


def row(name: str, side: str, facts: dict[str, Any]) -> str:
    """Returns a row of the table."""
    if "error" in facts:
        return f"| {name} | {side} | {facts['error']} | | | | | |"
    times = "| | "
    if "seconds" in facts:
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


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH", help="interpreter of a package")
    parser.add_argument("--sides", nargs="+", default=list(peer_steps.SIDES), choices=peer_steps.SIDES, metavar="SIDE")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases to run (all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (7); 0: only compile")
    parser.add_argument("--programs", help="directory for compiled programs, which later runs need not compile")
    parser.add_argument("--again", action="store_true", help="measure cases that are in the file already")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    chosen = {name: case for name, case in CASES.items() if not options.only or name in options.only}
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results: dict[str, Any] = kept.get("cases", {})
    names = list(dict.fromkeys([OWN, *options.sides]))
    with tempfile.TemporaryDirectory() as empty:
        programs = str(options.programs or empty)
        workers = {n: Worker(n, interpreters.get(n.split()[0].strip(","), sys.executable), programs) for n in names}
        print("| case | side | ms | side / rljax | from - to | temporaries MiB | compiled, core-s | gradient's norm |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for name, case in tqdm(chosen.items(), disable=not sys.stderr.isatty()):
            found = results.get(name, {"sides": {}})["sides"]
            wanted = "seconds" if options.rounds else "norm"
            if not options.again and all({wanted, "error"} & set(found.get(side, ())) for side in names):
                continue
            of_program = ("compile_core_s", "temporary_bytes")
            compiled = {side: {k: facts[k] for k in of_program if k in facts} for side, facts in found.items()}
            one = compare(case, workers, options.rounds, compiled)
            results[name] = one | {"sides": found | one["sides"]}
            for side in names:
                print(row(name, side, one["sides"][side]), flush=True)
            if "mismatch_s" in one["sides"][OWN]:
                print(mismatch_row(name, one["sides"][OWN]), flush=True)
            norms = [facts["norm"] for facts in one["sides"].values() if "error" not in facts]
            if case.dtype == "float32" and not all(math.isclose(norm, norms[0], rel_tol=1e-3) for norm in norms):
                raise RuntimeError(f"the sides compute different gradients: norms {norms}")
            if options.json:
                machine = f"{platform.machine()}, {os.cpu_count()} cores"
                report = {"command": command_of(arguments), "machine": machine, "cases": results}
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for worker in workers.values():
            worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
