"""Scores responses in worker processes with a time limit: one that hangs or kills its worker harms no other."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from rljax.rewards.process import RewardProcess
from rljax.rewards.resolve import CHEAP, RewardFunction, Verdict, resolve_reward, reward_path, score

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Task:
    problem: Mapping[str, Any]
    response: str
    truncated: bool
    future: Future[float]


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
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._broken: RuntimeError | None = None
        self._workers: list[RewardProcess] = []
        self._threads: list[threading.Thread] = []
        if workers:
            path = reward if isinstance(reward, str) else reward_path(reward)
            memory = None if memory_gib is None else int(memory_gib * 2**30)
            self._workers = [RewardProcess(path, memory) for _ in range(workers)]
            self._threads = [threading.Thread(target=self._serve, args=(w,), daemon=True) for w in self._workers]
            for thread in self._threads:
                thread.start()

    def submit(self, problem: Mapping[str, Any], response: str, truncated: bool) -> Future[float]:
        """Starts to score one response.

        Returns:
          A future of its reward. ``result()`` is a finite float, 0.0 if the response could not be scored; it raises
          RuntimeError only when no worker can be started, and CancelledError after ``close``.

        Raises:
          RuntimeError: the pool is closed.
        """
        task = _Task(problem, response, truncated, Future())
        if not self._workers:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._settle(task, score(self._function, problem, response, truncated))
            return task.future
        # Under the lock, or a task could be put behind the last sentinel of ``close``.
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._tasks.put(task)
        return task.future

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
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.stop()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _serve(self, process: RewardProcess) -> None:
        while (task := self._tasks.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            if self._broken is not None or self._closed:
                task.future.set_exception(self._broken or CancelledError())
                continue
            try:
                verdict = process.score(task.problem, task.response, task.truncated, self._timeout_s)
                self._settle(task, verdict)
            except TimeoutError as error:
                self._settle(task, (None, str(error)), timed_out=True)
            except RuntimeError as error:
                self._broken = error
                task.future.set_exception(CancelledError() if self._closed else error)

    def _settle(self, task: _Task, verdict: Verdict, *, timed_out: bool = False) -> None:
        value, complaint = verdict
        if value is not None:
            task.future.set_result(value)
            return
        if self._closed:  # close() ended the worker; the response did nothing wrong
            task.future.set_exception(CancelledError())
            return
        with self._lock:
            first = self._errors == 0
            self._errors += 1
            self._timeouts += timed_out
        if first:
            log.warning("a response could not be scored and earns 0: %s", complaint)
        task.future.set_result(0.0)
