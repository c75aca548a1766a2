"""Scores responses in worker processes with a time limit: one that hangs or kills its worker harms no other."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rljax.rewards.process import RewardProcess
from rljax.rewards.resolve import CHEAP, RewardFunction, Verdict, resolve_reward, reward_path, score

log = logging.getLogger(__name__)


class RewardPool:
    """Scores responses as they arrive; a context manager.

    A response that cannot be scored (an exception, a dead worker, a reward that is not finite, or no result within
    ``timeout_s``) gets 0.0 and is counted apart from the rewards of 0.
    """

    def __init__(
        self,
        reward: str | RewardFunction,
        workers: int | None = None,
        timeout_s: float = 10.0,
        *,
        memory_gib: float | None = 4.0,
    ):
        """Checks the reward and starts the workers, without waiting for them.

        Args:
          reward: as ``resolve_reward`` takes it, or a function at the top level of a module (any, when workers is 0).
          workers: processes; 0 scores in this process, without a time limit; None: 0 for the rewards of the toy tasks,
            otherwise one less than the number of CPU cores, at most 8.
          timeout_s: longest that one response may take (seconds), waiting time not counted; then its worker is
            replaced.
          memory_gib: memory limit of a worker (GiB); None: no limit.

        Raises:
          ValueError: the reward cannot be found, or not by a worker.
        """
        if workers is None:
            workers = 0 if reward in CHEAP else max(1, min(8, (os.cpu_count() or 2) - 1))
        if workers < 0:
            raise ValueError(f"workers must not be negative, got {workers}")
        if not 0.0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        if memory_gib is not None and not memory_gib > 0.0:
            raise ValueError(f"memory_gib must be positive, got {memory_gib}")
        self._function = resolve_reward(reward) if isinstance(reward, str) else reward
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._errors = self._timeouts = 0
        self._closed = False
        memory = None if memory_gib is None else int(memory_gib * 2**30)
        self._workers = [
            RewardProcess(reward if isinstance(reward, str) else reward_path(reward), memory) for _ in range(workers)
        ]
        # One thread a process: each waits for the process that it took from the idle ones.
        self._threads = ThreadPoolExecutor(max(workers, 1))
        self._idle: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def submit(self, problem: Mapping[str, Any], response: str, truncated: bool) -> Future[float]:
        """Starts to score one response.

        Returns:
          A future of its reward. ``result()`` is a finite float, 0.0 if the response could not be scored; it raises
          RuntimeError only when no worker can be started, and CancelledError after ``close``.

        Raises:
          RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._workers:
            return self._threads.submit(self._score, problem, response, truncated)
        future: Future[float] = Future()
        future.set_result(self._settle(score(self._function, problem, response, truncated)))
        return future

    def pop_metrics(self) -> dict[str, int]:
        """Counts since the last call: ``reward/errors``, responses that could not be scored; ``reward/timeouts``,
        those of them that took too long.
        """
        with self._lock:
            counts = {"reward/errors": self._errors, "reward/timeouts": self._timeouts}
            self._errors = self._timeouts = 0
        return counts

    def close(self) -> None:
        """Ends every worker at once and cancels the waiting responses. Calling it again does nothing."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score(self, problem: Mapping[str, Any], response: str, truncated: bool) -> float:
        process = self._idle.get()
        try:
            return self._settle(process.score(problem, response, truncated, self._timeout_s))
        except TimeoutError as error:
            return self._settle((None, str(error)), timed_out=True)
        finally:
            self._idle.put(process)

    def _settle(self, verdict: Verdict, *, timed_out: bool = False) -> float:
        value, complaint = verdict
        if value is not None:
            return value
        with self._lock:
            first = self._errors == 0
            self._errors += 1
            self._timeouts += timed_out
        if first:
            log.warning("a response could not be scored and earns 0: %s", complaint)
        return 0.0
