"""The batches of a run, sampled in turn, or ahead of the loop on a thread.

With ``rollout.max_staleness`` k above 0 the batch of step s may be sampled as soon as policy version s - 1 - k is
published: while one step trains, the next batches are sampled. The time at which a prompt is sent bounds the staleness,
so no sampled response is dropped, not even a long one. Batches take the prompts in order and are sampled one after the
other. No batch is sampled during an evaluation.

The batch of step t + 1 begins before version t is published, if version t - 1 allows it. With ``rollout.update: wait``
this batch also ends before the publish. So with k = 1 each batch but the first is exactly one version old. Without
``wait`` the rest of the batch is sampled by version t, so no token is older than with ``wait``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from rljax.data.prompts import Problem, PromptStream
from rljax.errors import ServersLostError
from rljax.policy.model import Params
from rljax.rollout.engine import AHEAD, RolloutEngine, check_wanted
from rljax.run.sampling import TICK_S, Rollouts, SampleStep
from rljax.run.stop import StopRequest, Timers

_END_S = 60.0  # the longest wait for a batch to end once it is given up


@dataclass(eq=False)
class Batches:
    """The batches of the steps, in order. Each is sampled when ``take`` asks for it."""

    stream: PromptStream  # the problems in order
    sample_step: SampleStep  # the function that samples a batch; it may take further problems from the stream
    taken: int = field(default=0, init=False)  # the step of the last batch taken

    def start(self, step: int) -> None:
        """Allows sampling to begin, now that the policy after ``step`` is published."""
        self.taken = step

    def take(self, timers: Timers) -> Rollouts:
        """Returns the batch of the next step. Raises the errors of ``ResponseSource.begin``."""
        self.taken += 1
        with timers.phase("rollout"):
            return self.sample_step(self.stream.take(), self.taken)

    @contextlib.contextmanager
    def paused(self, params: Params, policy_version: int, timers: Timers, *, drains: bool) -> Iterator[None]:
        """Opens a ``with`` block in which no batch begins; the caller publishes ``params`` as ``policy_version`` in it.

        ``policy_version`` is the number of the last step taken, and ``timers`` are the timers of this step. With
        ``drains`` the batch under way ends before the block, so that only the caller uses the engine.
        """
        yield

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream after the problems of the last batch taken."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the stream from ``state_dict``; called before ``start``."""
        self.stream.load_state_dict(state)

    def close(self) -> None:
        """Gives up the batch under way, if any, and waits for its end."""


class _Job(NamedTuple):
    """A batch that the thread samples for a step, or has to sample again."""

    step: int
    problems: Sequence[Problem]
    data: dict[str, Any]  # the state of the stream after ``problems``, and after sampling also after their replacements
    version: int  # the newest policy version when its sampling began


@dataclass(eq=False)
class BatchesAhead(Batches):
    """Batches that are sampled on a thread, up to ``max_staleness`` steps before their turn.

    The thread and ``take`` never call ``sample_step`` at the same time.

    When all servers are lost, a server that comes back can only be verified with the next policy. The current policy is
    gone, because a step under way has donated it. The lost batch is sampled again after the next publish. If ``take``
    is called before that, it samples the batch on the caller's thread.
    """

    engine: RolloutEngine  # it prepares each version while a batch is still sampled
    stop: StopRequest  # the request to stop, which ends waits
    _: KW_ONLY
    steps: int  # the last step
    max_staleness: int  # the most steps by which a batch is sampled before its turn
    always_drains: bool = True  # whether every publish waits for the batch under way

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rljax-sampling", daemon=True)
        self._changed = threading.Condition()  # guards the fields below
        self._version = self._begun = 0
        self._data: dict[str, Any] | None = None  # the state of the stream to save; None before the start
        # The sampled batches by step, with the time at which the sampling of each began.
        self._ready: dict[int, tuple[Rollouts, _Job, float]] = {}
        self._under_way: _Job | None = None
        self._lost: _Job | None = None
        self._error: BaseException | None = None
        self._is_paused = self._is_closed = False

    def start(self, step: int) -> None:
        """Allows sampling. The thread starts at the first ``take``, so an evaluation before it has the engine alone."""
        self._version = self.taken = self._begun = step
        self._data = self.stream.state_dict()

    def take(self, timers: Timers) -> Rollouts:
        """Waits for the batch of the next step; ``time/ahead_s`` says how long before this call its sampling began."""
        step, asked = self.taken + 1, time.perf_counter()
        if self._thread.ident is None:
            self._thread.start()
        with timers.phase("wait"):
            with self._changed:
                self.stop.awaited_step = step
                self._wait(lambda: step in self._ready or self._lost is not None or self._error is not None)
                job = None if step in self._ready else self._lost
                if job is not None:
                    self._lost, self._under_way = None, job
            if job is not None:
                self._finish(job)
        with self._changed:
            if step not in self._ready:
                assert self._error is not None
                raise self._error
            sampled, job, began = self._ready.pop(step)
            self.taken, self._data = step, job.data
            sampled.row["time/ahead_s"] = asked - began
            return sampled

    @contextlib.contextmanager
    def paused(self, params: Params, policy_version: int, timers: Timers, *, drains: bool) -> Iterator[None]:
        """Prepares the version in the engine, and waits until the next batch has begun, if it may begin.

        With ``drains`` or ``always_drains`` it also waits until no batch is under way.
        """
        with timers.phase("prepare"):
            self.engine.prepare(params, policy_version)
        following = self.taken + 1
        with timers.phase("drain"), self._changed:
            self._wait(lambda: self._begun >= following or not self._may_begin(following))
            self._is_paused = True
            if drains or self.always_drains:
                self._wait(lambda: self._under_way is None)
        yield
        with self._changed:
            self._is_paused = False
            self._version = self.taken
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream after the problems of the last batch taken."""
        return self.stream.state_dict() if self._data is None else self._data

    def close(self) -> None:
        """Gives up the batch under way. Waits for the thread at most 60 s, and at most half of the remaining grace."""
        self.stop.ahead_is_over = True
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(min(_END_S, max(0.0, self.stop.left_s() / 2)))

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Waits until ``is_so`` returns True, or raises StoppedWaitingError. The caller holds ``_changed``."""
        self.stop.waits_for_ahead = True
        try:
            while not self._changed.wait_for(is_so, TICK_S):
                check_wanted(self.stop)
        finally:
            self.stop.waits_for_ahead = False

    def _may_begin(self, step: int) -> bool:
        """Returns whether the thread goes on to the batch of ``step`` without a further publish."""
        is_over = self._is_closed or self._error is not None or self._lost is not None
        return not is_over and step <= min(self.steps, self._version + 1 + self.max_staleness)

    def _next_job(self) -> _Job | None:
        """Returns the batch for the thread to sample now, or None. The caller holds the condition ``_changed``."""
        if self._is_paused or self._is_closed or self._under_way is not None:
            return None
        if self._lost is not None:
            job, renewed = self._lost, self._version > self._lost.version
            if renewed:
                self._lost = None
            return job._replace(version=self._version) if renewed else None
        if not self._may_begin(self._begun + 1):
            return None
        self._begun += 1
        problems = self.stream.take()
        return _Job(self._begun, problems, self.stream.state_dict(), self._version)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (job := self._next_job()) is None:
                    if self._is_closed or self._error is not None:
                        return
                    self._changed.wait()
                self._under_way = job
                AHEAD.set(job.step)
                self._changed.notify_all()
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Samples the batch that is under way, on the caller's thread."""
        began = time.perf_counter()
        outcome: Rollouts | BaseException
        self.stream.load_state_dict(job.data)  # A lost batch may have taken further problems. They are taken again.
        try:
            outcome = self.sample_step(job.problems, job.step)
            outcome.row["time/rollout_s"] = time.perf_counter() - began
        except BaseException as error:
            outcome = error
        with self._changed:
            self._under_way = None
            if isinstance(outcome, Rollouts):
                self._ready[job.step] = (outcome, job._replace(data=self.stream.state_dict()), began)
            elif isinstance(outcome, ServersLostError) and threading.current_thread() is self._thread:
                self._lost = job
            else:
                self._error = outcome
            self._changed.notify_all()
