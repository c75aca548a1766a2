"""Compares a training step with tunix's on one NVIDIA GPU, on the same tokens and from the same weights.

    python experiments/bench_peers.py --rounds 10 --limit-s 100 --json peers_card.json

Each side trains a random Qwen3 policy with clipping and AdamW, in a process of its own. rljax measures the mismatch and
the entropy in its step, and tunix's loss is the one of its GRPO learner. Every advantage is 1, which makes the loss the
mean of -log p. The sides compile at the same time. Then each side makes its weights and all of its steps, and its
process ends, so that the next side has all of the card's memory.

A ratio is a side's median seconds over the median seconds of rljax: above 1, rljax is faster. Its range begins with the
side's fastest step over the slowest step of rljax, and ends with the slowest over the fastest. ``peak_bytes`` are the
most bytes that the process had on the card. The gradients' norms of the first step are printed for comparison. With
``--platform cpu`` a small case tries the program. A case that is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
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

OWN = "rljax"
QWEN3 = {"width": 1024, "layers": 28, "vocab": 151_936, "head_dim": 128}  # Qwen3-0.6B
SHARED = [(64, 4, 64, 4), (512, 16, 64, 1), (2048, 8, 256, 1), (2048, 16, 64, 1), (64, 4, 1024, 1), (2048, 4, 1024, 1)]
"""Tokens of a prompt, responses to it, tokens of each, and prompts. rljax computes rows of trees."""


def shared_case(prompt: int, group: int, tokens: int, groups: int) -> Case:
    """Returns a case in which the sequences of a group share their prompt."""
    sizes = {"sequences": groups * group, "tokens": tokens, "prompt": prompt, "group": group}
    return Case(vocab=16_384, dtype="float32", **sizes)  # type: ignore[arg-type]


CASES = {
    "cpu": {
        "width 256, 8 x 256 tokens": Case(),
        "width 256, recorded lengths": Case(tokens=0),
        **{f"{sizes[0]:,} + {sizes[1]} x {sizes[2]:,}": shared_case(*sizes) for sizes in SHARED},
    },
    "cuda": {
        "Qwen3-0.6B, 4 x 2,304 tokens": Case(sequences=4, tokens=2304, **QWEN3),
        "Qwen3-0.6B, 8 recorded lengths": Case(tokens=0, scale=56, **QWEN3),
        "Qwen3-0.6B, 1 x 8,192 tokens": Case(sequences=1, tokens=8192, **QWEN3),
    },
}
ENVIRONMENTS = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    "cuda": {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


class Worker:
    """The process of one side."""

    def __init__(self, side: str, programs: str, environment: dict[str, str]):
        """Starts the process.

        Args:
          side: The name of the side.
          programs: The directory of compiled programs.
          environment: The variables that choose the platform.
        """
        paths = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        cache = {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(peer_steps.__file__).resolve()), side],
            env=os.environ | environment | cache | {"PYTHONPATH": paths.strip(os.pathsep)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def send(self, fields: dict[str, Any] | None = None) -> None:
        """Sends a case to compile, or null for a step, unless the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # there will be no answer, either
            print(json.dumps(fields), file=self._process.stdin, flush=True)

    def receive(self, limit_s: float) -> dict[str, Any]:
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


def time_alone(worker: Worker, rounds: int, limit_s: float) -> dict[str, Any]:
    """Times the steps of a side whose process then ends. The first two steps are not timed.

    Returns the seconds, the norm of the first step, and the most bytes in use on the card; or an error instead.
    """
    end = time.monotonic() + limit_s
    steps = []
    for _ in range(2 + rounds):
        worker.send()
        steps.append(worker.receive(max(1.0, end - time.monotonic())))
        if "error" in steps[-1]:
            break
    worker.end()
    if "error" in steps[-1]:
        return {"error": steps[-1]["error"]}
    return steps[-1] | {"norm": steps[0]["norm"], "seconds": [step["seconds"] for step in steps[2:]]}


def compare(case: Case, workers: dict[str, Worker], rounds: int, limit_s: float) -> dict[str, Any]:
    """Compiles the steps of all sides of a case, then times one side after the other.

    A side that fails or takes too long has an error instead of times.

    Args:
      case: The shape of the policy and of the batch.
      workers: The process of each side, which has ended when this function returns.
      rounds: The number of timed steps of each side.
      limit_s: The longest time to compile a side, and the longest time of its steps (seconds).

    Returns:
      The case, and the facts of each side.
    """
    try:
        for worker in workers.values():
            worker.send(case._asdict())
        end = time.monotonic() + limit_s
        sides = {side: worker.receive(max(1.0, end - time.monotonic())) for side, worker in workers.items()}
        for side, facts in sides.items():
            if "error" not in facts:
                facts |= time_alone(workers[side], rounds, limit_s)
    finally:
        for worker in workers.values():
            worker.end()
    ours = sides[OWN].get("seconds")
    for facts in sides.values() if ours else ():
        if theirs := facts.get("seconds"):
            facts["ratio"] = statistics.median(theirs) / statistics.median(ours)
            facts["range"] = [min(theirs) / max(ours), max(theirs) / min(ours)]
    return {"case": case._asdict(), "sides": sides}


def row(name: str, side: str, facts: dict[str, Any]) -> str:
    """Returns a row of the table."""
    if "error" in facts:
        return f"| {name} | {side} | {facts['error']} | | | | |"
    times = "| | "
    if "ratio" in facts:
        low, high = facts["range"]
        times = f"{statistics.median(facts['seconds']) * 1e3:.0f} | {facts['ratio']:.2f} | {low:.2f} - {high:.2f}"
    size = facts["temporary_bytes"] / 2**20
    return f"| {name} | {side} | {times} | {size:.0f} | {facts['compile_s']:.1f} | {facts['norm']:.4f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the cases that the file lacks; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=CASES, default="cuda", help="where the sides run (cuda)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases to run (all)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each side (7)")
    parser.add_argument(
        "--limit-s", type=float, default=120, help="seconds for compilation, and for a side's turn (120)"
    )
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    cases: dict[str, Any] = kept.get("cases", {})
    print("| case | side | ms | side / rljax | from - to | temporaries MiB | compiled, s | gradient's norm |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, case in CASES[options.platform].items():
        if name in cases or (options.only and name not in options.only):
            continue
        with tempfile.TemporaryDirectory() as programs:
            workers = {side: Worker(side, programs, ENVIRONMENTS[options.platform]) for side in peer_steps.SIDES}
            cases[name] = compare(case, workers, options.rounds, options.limit_s)
        for side, facts in cases[name]["sides"].items():
            print(row(name, side, facts), flush=True)
        if options.json:
            command = f"python experiments/bench_peers.py {shlex.join(arguments)}"
            report = {"command": command, "machine": f"{platform.machine()}, {os.cpu_count()} cores", "cases": cases}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
