"""Scores responses in worker processes with a time limit, so that a reward that hangs or crashes harms no other."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rljax.rewards.resolve import CHEAP, RewardFunction, Verdict, describe, resolve_reward, reward_path, score

log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 60.0
_STARTS = 3  # a start may fail while memory is short


class RewardPool:
    """A pool of worker processes that scores responses as they arrive; a context manager.

    A response cannot be scored if the reward raises, the worker dies, the reward is not finite, or no result comes
    within ``timeout_s``. It gets 0.0 and is counted separately.
    """

    def __init__(
        self,
        reward: str | RewardFunction,
        workers: int | None = None,
        timeout_s: float = 10.0,
        *,
        memory_gib: float | None = 4.0,
    ):
        """Checks the reward and starts the workers without waiting for them.

        Args:
          reward: The name of a reward for ``resolve_reward``, or a function at the top level of a module. With no
            workers it may be any function.
          workers: The number of processes. 0 scores in this process, without a time limit. None means 0 for the rewards
            of the toy tasks, otherwise one less than the number of CPU cores, at most 8.
          timeout_s: The longest time for one response, in seconds, without waiting; after it the worker is replaced.
          memory_gib: The memory limit of a worker, in GiB; None means no limit.

        Raises:
          ValueError: The reward cannot be found, or a worker cannot import it.
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
            _Worker(reward if isinstance(reward, str) else reward_path(reward), memory) for _ in range(workers)
        ]
        # Each process has a thread that waits for it.
        self._threads = ThreadPoolExecutor(max(workers, 1))
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def worker_count(self) -> int:
        """The number of worker processes; 0 if this process scores."""
        return len(self._workers)

    def submit(self, problem: Mapping[str, Any], response: str, truncated: bool) -> Future[float]:
        """Starts to score one response.

        Returns:
          A future of the reward. ``result()`` is a finite float, 0.0 if the response could not be scored. It raises
          RuntimeError only if no worker can be started, and CancelledError after ``close``.

        Raises:
          RuntimeError: The pool is closed.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._workers:
            return self._threads.submit(self._score, problem, response, truncated)
        future: Future[float] = Future()
        future.set_result(self._settle(score(self._function, problem, response, truncated)))
        return future

    def pop_metrics(self) -> dict[str, int]:
        """Returns the counts since the last call.

        ``reward/errors`` counts responses that could not be scored; ``reward/timeouts`` counts the late ones of them.
        """
        with self._lock:
            counts = {"reward/errors": self._errors, "reward/timeouts": self._timeouts}
            self._errors = self._timeouts = 0
        return counts

    def close(self) -> None:
        """Ends every worker at once and cancels the waiting responses; a second call does nothing."""
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


class _Worker:
    """A worker process that is replaced when it dies or is too slow. One thread scores; any thread may stop it."""

    def __init__(self, path: str, memory_bytes: int | None):
        self._setup = (path, memory_bytes)
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def score(self, problem: Mapping[str, Any], response: str, truncated: bool, timeout_s: float) -> Verdict:
        """Scores a response within ``timeout_s``, without the start of the process; raises TimeoutError after it."""
        self._wait_until_ready()
        try:
            self._connection.send((problem, response, truncated, timeout_s))
            verdict: Verdict | None = self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, ConnectionError):
            return None, f"the worker died ({self._replace()})"
        except Exception as error:  # a problem that cannot be pickled
            return None, describe(error)
        # After a memory error the memory may stay full, and the next response would fail, too.
        if verdict is None or (verdict[1] or "").startswith(MemoryError.__name__):
            self._replace()
        if verdict is None:
            raise TimeoutError(f"no reward within {timeout_s:g} s")
        return verdict

    def stop(self) -> None:
        """Ends the process; no other process is started."""
        with self._lock:
            self._stopped = True
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """Ends the process, if it still runs, and the processes that the reward has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._connection, theirs = multiprocessing.Pipe()
            self._ready = False
            with theirs:
                # Without -P the files beside worker.py would hide other modules of the same names.
                # The session is new so that only the trainer gets Ctrl-C of the terminal.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # a reward may print a gigabyte for each response
                    start_new_session=True,
                )
        self._connection.send((sys.path, *self._setup))

    def _wait_until_ready(self) -> None:
        """Waits until the process has imported the reward; a process that died while idle is replaced first."""
        if self._ready and self._process.poll() is not None:
            self._replace()
        if self._ready:
            return
        for _ in range(_STARTS):
            try:
                ready = self._connection.poll(_START_S)
                complaint = self._connection.recv() if ready else f"not ready within {_START_S:g} s"
            except (EOFError, ConnectionError):
                complaint = "the process died while it started"
            if complaint is None:
                self._ready = True
                return
            complaint = f"{complaint} ({self._replace()})"
        raise RuntimeError(f"a reward worker cannot be started: {complaint}")

    def _replace(self) -> str:
        """Ends the process, if it still runs, and starts another; returns the exit status of the first."""
        self._connection.close()
        try:
            # The process may end shortly after its connection.
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._kill()
        status = self._process.wait()
        self._start()
        return f"exit status {status}"
