"""Scores responses in worker processes with a time limit, so that a reward that hangs or crashes harms no other."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rljax.distributed.child import Child, ChildPool, Decoder, LostError
from rljax.errors import printable
from rljax.rewards.resolve import CHEAP, resolve_reward, score, score_responses

log = logging.getLogger(__name__)

_VERDICT = Decoder(tuple[float | None, str | None])
_SHOWN = 300  # characters of a worker's text in a message


class RewardPool:
    """A pool of worker processes that scores responses as they arrive; a context manager.

    A response cannot be scored if the reward raises, the worker dies, the reward is not finite, or no result comes
    within ``timeout_s``. It gets ``unscored`` and is counted separately.
    """

    def __init__(
        self,
        reward: str,
        workers: int | None = None,
        timeout_s: float = 10.0,
        *,
        memory_gib: float = 4.0,
        unscored: float = 0.0,
    ):
        """Checks the reward and starts the workers without waiting for them.

        Args:
          reward: The name of a reward for ``resolve_reward``.
          workers: The number of processes. 0 scores in this process, without a time limit. None means 0 for the rewards
            of the toy tasks, otherwise one less than the number of CPU cores, at most 8.
          timeout_s: The longest time for one response (seconds), without its waiting time. A slower worker is replaced.
          memory_gib: The memory limit of a worker, in GiB.
          unscored: The reward of a response that could not be scored.

        Raises:
          ValueError: The reward cannot be found or imported here, or another argument is out of its range.
        """
        if workers is None and reward in CHEAP:
            workers = 0
        if workers is not None and workers < 0:
            raise ValueError(f"workers must not be negative, got {workers}")
        if not 0.0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        self._function = resolve_reward(reward)
        self._timeout_s, self._unscored = timeout_s, unscored
        self._lock = threading.Lock()
        self._errors = self._timeouts = 0
        self._closed = False
        program = f"{score_responses.__module__}:{score_responses.__name__}"
        start = (program, (reward,), memory_gib)
        make = functools.partial(Child, "reward worker", *start, on_unasked=self._count_unasked)
        self._workers = ChildPool(make, workers)

    def submit(self, problem: Mapping[str, Any], response: str, truncated: bool) -> Future[float]:
        """Starts to score one response.

        The result of the future is a finite float, or ``unscored`` if the response cannot be scored. The future raises
        RuntimeError only if no worker can be started, and CancelledError after ``close``.

        Raises:
          RuntimeError: The pool is closed.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._workers:
            return self._workers.submit(functools.partial(self._score, problem, response, truncated))
        value, complaint = score(self._function, problem, response, truncated)
        future: Future[float] = Future()
        future.set_result(self._fail(str(complaint)) if value is None else value)
        return future

    def pop_metrics(self) -> dict[str, int]:
        """Returns the counts since the last call.

        ``reward/errors`` counts responses that could not be scored, and workers that sent something unasked.
        ``reward/timeouts`` counts the responses that took too long.
        """
        with self._lock:
            counts = {"reward/errors": self._errors, "reward/timeouts": self._timeouts}
            self._errors = self._timeouts = 0
        return counts

    def close(self) -> None:
        """Ends every worker at once and cancels the waiting responses; a second call does nothing."""
        self._closed = True
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score(self, problem: Mapping[str, Any], response: str, truncated: bool, worker: Child) -> float:
        try:
            value, complaint = worker.ask((problem, response, truncated), self._timeout_s, _VERDICT)
        except TimeoutError:
            return self._fail(f"no reward within {self._timeout_s:g} s", timed_out=True)
        except LostError as error:
            return self._fail(f"the worker {error}")
        if value is not None and math.isfinite(value):
            return value
        # After a memory error the memory may stay full, and the next response would fail, too.
        if (complaint or "").startswith(MemoryError.__name__):
            worker.replace()
        return self._fail(printable((complaint or "the worker sent no reward")[:_SHOWN]))

    def _count_unasked(self, said: str) -> None:
        with self._lock:
            self._errors += 1
        log.warning("a reward worker %s; the next response went to a new one", said)

    def _fail(self, complaint: str, *, timed_out: bool = False) -> float:
        """Counts a response that could not be scored, and returns its reward."""
        with self._lock:
            first = self._errors == 0
            self._errors += 1
            self._timeouts += timed_out
        if first:
            log.warning("a response could not be scored and earns 0: %s", complaint)
        return self._unscored
