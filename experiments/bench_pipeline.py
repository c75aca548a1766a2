"""Compares the wall time of a step with rollouts sampled ahead with the longer of sampling and training.

    python experiments/bench_pipeline.py --json benchmarks/pipeline.json

The real loop trains the toy policy. Its engine takes a fixed time for each batch and each publish, and its update
sleeps until a fixed time has passed. A publish has two parts, as with servers. A version is written and brought to the
servers while they sample; then it is loaded and verified while they do not. With ``rollout.update: keep`` an unfinished
batch waits during the second part and goes on after it.

A Markdown table has a line for each setting, each ``rollout.max_staleness`` k and each ``rollout.update``. It gives the
mean time of a step, the bound, their ratio, and the time that the trainer waited. The bound is max(rollout, train +
write + load), for k = 0 the sum of all. The first six steps are left out: programs compile in the first, and the
batches sampled meanwhile last for some more. The times are wall times. Run the program on an idle machine, or make all
times longer (--scale), so that the loop's own time is a smaller part.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.data.prompts import DataConfig
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config
from rljax.rollout.engine import Samples
from rljax.rollout.types import InFlight, Response, RolloutConfig, SamplingParams, VersionSpan
from rljax.run.build import build, load_problems, starting_point
from rljax.run.checkpoint import CheckpointConfig, Checkpointer
from rljax.run.config import Config, EvalConfig, ModelConfig, RunConfig
from rljax.run.loop import train
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.packing import PackingConfig

BASE = Path(__file__).parents[1] / "configs/toy-base"
STEPS, WARM_UP = 16, 6


class Times(NamedTuple):
    """The seconds of each part of a step."""

    rollout: float
    train: float
    write: float
    load: float


SETTINGS = (
    *(Times(1.0, 0.5, 0.0, 0.05), Times(0.8, 0.8, 0.0, 0.05), Times(0.5, 1.0, 0.0, 0.05)),
    *(Times(0.8, 0.6, 0.2 - load, load) for load in (0.2, 0.12, 0.05)),
)


class SleepingEngine:
    """A RolloutEngine whose batches and publishes take a fixed time; it does not sample while it loads."""

    def __init__(self, times: Times):
        self._times, self._version = times, 0
        self._prepared = -1
        self._loads = threading.Lock()

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples three random tokens for each response, spread over the time."""
        return Samples(self._responses(prompts, n, seed))

    def _responses(self, prompts: Sequence[np.ndarray], n: int, seed: int) -> Iterator[Response]:
        rng = np.random.default_rng(seed)
        count = len(prompts) * n
        for place in range(count):
            time.sleep(self._times.rollout / count)
            with self._loads:  # an unfinished batch waits here
                version = self._version
            tokens = rng.integers(0, 10, 3).astype(np.int32)
            spans = (VersionSpan(version, 0, 3),)
            yield Response(*divmod(place, n), tokens, np.full(3, -2.3, np.float32), True, spans)

    def prepare(self, params: Any, policy_version: int) -> None:
        """Sleeps as long as the writing of a version takes."""
        time.sleep(self._times.write)
        self._prepared = policy_version

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Sleeps as long as the loading of a version takes."""
        if self._prepared != policy_version:
            self.prepare(params, policy_version)
        with self._loads:
            time.sleep(self._times.load)
            self._version = policy_version
        return {}

    def close(self) -> None:
        """Does nothing, because there is no server."""


class SleepingUpdate:
    """An update that takes at least a fixed time."""

    def __init__(self, update: Any, seconds: float):
        self._update, self._seconds, self.pack = update, seconds, update.pack

    def __call__(self, *arguments: Any) -> Any:
        """Updates, then sleeps until the time has passed."""
        until = time.monotonic() + self._seconds
        updated = self._update(*arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return updated


class Rows(list[dict[str, Any]]):
    """A record of a run in memory."""

    def write(self, row: Mapping[str, Any], histograms: Mapping[str, Any]) -> None:
        """Adds a row."""
        self.append(dict(row))

    def sync(self) -> None:
        """Does nothing, because there is no disk."""


def rows_of(times: Times, max_staleness: int, update: InFlight) -> list[dict[str, Any]]:
    """Runs the loop once and returns its rows after the warm-up."""
    rows = Rows()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        config = Config(
            run=RunConfig(dir=directory, steps=STEPS),
            model=ModelConfig(path=str(BASE)),
            data=DataConfig(batch_size=4, max_prompt_tokens=8),
            rollout=RolloutConfig(group_size=4, max_response_tokens=4, max_staleness=max_staleness, update=update),
            packing=PackingConfig(row_tokens=64, rows_per_micro_batch=4),
            mesh=MeshConfig(1, 1),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
        )
        policy, tokenizer, mesh = read_config(BASE), load_tokenizer(BASE), make_mesh(config.mesh)
        checkpointer = stack.enter_context(contextlib.closing(Checkpointer(Path(directory, "checkpoints"), keep=1)))
        problems = load_problems(config, tokenizer)
        parts = build(config, policy, tokenizer, mesh, SleepingEngine(times), checkpointer, problems)
        stack.callback(parts.source.close)
        parts = dataclasses.replace(parts, update=SleepingUpdate(parts.update, times.train))
        state, progress = starting_point(parts, mesh)
        train(parts, state, progress, rows)
    return rows[WARM_UP:-1]


def main(argv: Sequence[str]) -> int:
    """Runs every setting and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="values of k")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all times")
    parser.add_argument(
        "--update", nargs="+", choices=("wait", "keep"), default=["wait", "keep"], help="rollout.update"
    )
    arguments = parser.parse_args(argv)
    measured = []
    print("| rollout / train / write / load (s) | k | update | step (s) | bound (s) | ratio | waited (s) | staleness |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        times = Times(*(arguments.scale * seconds for seconds in setting))
        for k in arguments.max_staleness:
            for update in arguments.update if k else ["wait"]:
                rows = rows_of(times, k, update)
                step = float(np.mean([row["time/step_s"] for row in rows]))
                bound = max(times.rollout, sum(times) - times.rollout) if k else sum(times)
                waited = float(np.mean([row.get("time/wait_s", 0.0) + row.get("time/drain_s", 0.0) for row in rows]))
                staleness = float(np.mean([row["rollout/staleness"] for row in rows]))
                measured.append(
                    {**times._asdict(), "max_staleness": k, "update": update, "step_s": step, "bound_s": bound}
                    | {"ratio": step / bound, "waited_s": waited, "staleness": staleness}
                )
                cells = [" / ".join(f"{each:g}" for each in times), k, update, f"{step:.3f}", f"{bound:.3f}"]
                cells += [f"{step / bound:.2f}", f"{waited:.3f}", f"{staleness:.2f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if arguments.json:
        command = f"python experiments/bench_pipeline.py {shlex.join(argv)}"
        arguments.json.write_text(
            json.dumps({"command": command, "steps": STEPS, "measured": measured}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
