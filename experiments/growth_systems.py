"""The cases of growth.py that need other programs: rollout servers, processes of a run, and trackers.

    python experiments/growth_systems.py INDEX COUNT PORT

This command is one of COUNT processes that exchange the messages of a step. growth.py starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.distributed.acts import Shared, follow, together
from rljax.distributed.processes import Processes, start_processes
from rljax.record.rows import Row
from rljax.record.trackers import RecordConfig, TrackedRun, Trackers
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.weights.sums import array_checksum

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, TOKENS = 256, 4, 32  # the shape of the rollouts of a step
# The bytes that process 0 sends to the others in a step, and the number of measured steps.
MESSAGE_BYTES, STEPS = 2**20, 20
MOST_TRACKERS = 8
SERVERS = """
import json, sys
from vllm_fake import SHAPE, FakeVllm
urls = [FakeVllm().url for _ in range(int(sys.argv[1]))]
print(json.dumps({"urls": urls, "shape": SHAPE}), flush=True)
sys.stdin.read()
"""
"""A program with stand-ins for vLLM servers; it ends when its input ends."""


# --- rollout servers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_of(count: int, directory: Path) -> Iterator[ServedEngine]:
    """Opens an engine over so many stand-in servers, which live in another process and reply at once."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    words = [sys.executable, "-c", SERVERS, str(count)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}, **pipes) as servers:
        try:
            assert servers.stdout is not None
            told = json.loads(servers.stdout.readline())
            config = RolloutConfig(
                engine="vllm", urls=tuple(told["urls"]), dtype="float32", transfer_dir=str(directory)
            )
            functions = PolicyFunctions(
                lambda params: params.items(),
                lambda params: {name: array_checksum(array) for name, array in params.items()},
                lambda _, sequences: [np.full(len(each), -1.0, np.float32) for each in sequences],
            )
            with contextlib.closing(
                ServedEngine(config, VllmBackend(), functions, hf_config=told["shape"], max_tokens=100)
            ) as engine:
                engine.publish(policy(), 0)
                yield engine
        finally:
            servers.kill()


def policy() -> dict[str, np.ndarray]:
    return {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}


@contextlib.contextmanager
def sample_from(count: int, directory: Path) -> Iterator[Callable[[], object]]:
    """Opens the sampling of 1,024 responses from so many servers."""
    prompts = [np.arange(1, 9, dtype=np.int32)] * PROMPTS
    with engine_of(count, directory) as engine:
        yield lambda: list(engine.generate(prompts, SAMPLES, SamplingParams(TOKENS), seed=0))


@contextlib.contextmanager
def publish_to(count: int, directory: Path) -> Iterator[Callable[[], object]]:
    """Opens the publish of a tiny policy to so many servers, each of which is verified."""
    with engine_of(count, directory) as engine:
        versions = iter(range(1, 10**6))
        yield lambda: engine.publish(policy(), next(versions))


# --- processes --------------------------------------------------------------------------------------------------------


class Exchange(Shared):
    """The exchange of a step: process 0 sends the sequences, and all processes compare their times."""

    name = "exchange"

    @together
    def make(self, arrays: dict[str, np.ndarray]) -> None:
        """Makes an exchange; process 0 calls it."""
        self.processes.compare()

    def take(self, made: None) -> None:
        """Keeps nothing of an exchange."""


def exchange(followers: int, _: Path) -> Callable[[], float]:
    """Returns the processor seconds of process 0 for an exchange with so many other processes."""

    def work() -> float:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, __file__]
        started = [
            subprocess.Popen([*words, str(index), str(followers + 1), str(port)], stdout=subprocess.PIPE, text=True)
            for index in range(followers + 1)
        ]
        try:
            return float(started[0].communicate(timeout=300)[0].splitlines()[-1])
        finally:
            for process in started:
                process.kill()
                process.wait()

    return work


def take_part(index: int, count: int, port: int) -> None:
    """Takes part in the exchanges as one of the processes. Process 0 prints the seconds of one."""
    processes: Processes = start_processes(count, index, f"127.0.0.1:{port}")
    jax.devices()
    act, arrays = Exchange(processes), {"tokens": np.zeros(MESSAGE_BYTES // 4, np.int32)}
    with processes:
        if not processes.is_leader:
            follow(processes, [act], act)
        else:
            act.make(arrays)  # the programs compile
            start = time.process_time()
            for _ in range(STEPS):
                act.make(arrays)
            print((time.process_time() - start) / STEPS, flush=True)
        processes.end(0)


# --- trackers ---------------------------------------------------------------------------------------------------------


class CountingTracker:
    """A tracker that reports the last row of the record, and keeps nothing."""

    rows = 0  # the number of rows of the record
    all_there = threading.Semaphore(0)  # each tracker releases it after the last row

    def __init__(self, run: TrackedRun) -> None:
        self.stored_step, self.where = 0, "in memory"

    def log(self, row: Row) -> None:
        """Releases the semaphore at the last row."""
        if row["step"] == CountingTracker.rows:
            CountingTracker.all_there.release()

    def finish(self, summary: Any, figures: Any, failed: bool) -> None:
        """Does nothing, because the tracker keeps nothing."""


KINDS = {f"Tracker{i}": type(f"Tracker{i}", (CountingTracker,), {}) for i in range(MOST_TRACKERS)}
globals().update(KINDS)  # trackers are named by module and class, and must be different


def feed(count: int, run_dir: Path, rows: int) -> Callable[[], object]:
    """Returns a function that gives a record of this many rows to this many trackers."""
    CountingTracker.rows = rows
    config = RecordConfig(trackers=tuple(f"{__name__}:Tracker{i}" for i in range(count)))

    def work() -> None:
        with Trackers(config) as trackers:
            trackers.start(run_dir, {}, {})
            for _ in range(count):
                CountingTracker.all_there.acquire()

    return work


if __name__ == "__main__":
    take_part(*map(int, sys.argv[1:]))
