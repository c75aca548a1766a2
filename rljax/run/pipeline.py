"""Where the loop takes the rollouts of a step from: sampled when it asks for them, or ahead of it on a thread.

With ``rollout.max_staleness`` k above 0 the batch of step s may be sampled as soon as policy version s - 1 - k is
published: while one step trains, the next batches are sampled. What bounds the staleness is when a prompt is sent, so
nothing that was sampled is dropped, whatever its length. Batches are made of prompts in their order and are sampled one
after the other; sampling excludes evaluating. Before version t is published the batch of step t + 1 is begun, if the
version before allows it. With ``rollout.update: wait`` it ends before that, too, so that with k = 1 each batch but the
first is one version old in every run; otherwise it goes on with version t, and is at most as old.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from rljax.data.prompts import Problem, PromptStream
from rljax.errors import ServersLostError
from rljax.record.rows import Row
from rljax.run.sampling import Rollouts

_TICK_S = 0.25  # between two looks at what is sampled
_END_S = 60.0  # that what is still sampled may take to end once it is given up

# (problems, step, called with each response, true gives it up) -> their responses, scored.
Sample = Callable[[Sequence[Problem], int, Callable[[], None], Callable[[], bool]], Rollouts]


class Sampled(NamedTuple):
    """The rollouts of one step.

    Attributes:
      rollouts: of its problems, in the order of the stream.
      row: what was counted while they were sampled.
    """

    rollouts: Rollouts
    row: Row


class Batches(Protocol):
    """Gives the batches of the steps in their order, each once.

    Attributes:
      phase: name of what a step spends on ``take``.
    """

    phase: str

    def start(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Sampling may begin: the policy after ``step`` is published. No step begins once ``should_stop`` is true."""

    def take(self, progressed: Callable[[], None]) -> Sampled:
        """The next step's; ``progressed`` is called, on the caller's thread, as more of it is sampled.

        Raises as ``RolloutEngine.generate``.
        """

    def paused(self, progressed: Callable[[], None], *, drains: bool = True) -> AbstractContextManager[None]:
        """Within it the caller alone uses the engine; at its end the policy of the last batch taken is published.

        Without ``drains`` a batch that is under way goes on, and only a new one does not begin.
        """

    def is_unwanted(self) -> bool:
        """Whether what the calling thread samples will not be trained on."""

    def state_dict(self) -> dict[str, Any]:
        """State of the stream after the problems of the last batch taken."""

    def close(self) -> None:
        """Gives up what is being sampled, and waits for that."""


class InTurn:
    """``Batches`` that are sampled when they are asked for."""

    phase = "rollout"

    def __init__(self, stream: PromptStream, sample: Sample, pop_metrics: Callable[[], Row]):
        """``sample`` is called with the problems of each batch, ``pop_metrics`` after it for its row."""
        self._stream, self._sample, self._pop_metrics, self._step = stream, sample, pop_metrics, 0

    def start(self, step: int, should_stop: Callable[[], bool]) -> None:
        """See Batches."""
        del should_stop
        self._step = step

    def take(self, progressed: Callable[[], None]) -> Sampled:
        """See Batches."""
        self._step += 1
        rollouts = self._sample(self._stream.next_batch(), self._step, progressed, self.is_unwanted)
        return Sampled(rollouts, self._pop_metrics())

    def paused(self, progressed: Callable[[], None], *, drains: bool = True) -> AbstractContextManager[None]:
        """See Batches."""
        del progressed, drains
        return contextlib.nullcontext()

    def is_unwanted(self) -> bool:
        """See Batches."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """See Batches."""
        return self._stream.state_dict()

    def close(self) -> None:
        """See Batches."""


class _Done(NamedTuple):
    """A batch that was sampled.

    Attributes:
      sampled: what the loop takes.
      job: that it was.
      began: when its sampling did (``time.perf_counter()``).
    """

    sampled: Sampled
    job: _Job
    began: float


class _Job(NamedTuple):
    """A batch that is sampled, or is to be sampled again.

    Attributes:
      step: that it is for.
      problems: of it.
      data: state of the stream after them.
      version: published when it was begun.
    """

    step: int
    problems: Sequence[Problem]
    data: dict[str, Any]
    version: int


class Ahead:
    """``Batches`` that are sampled on a thread, up to ``max_staleness`` steps before their turn.

    A server that comes back is verified with the policy, which a step under way has taken over. So where all servers
    are lost, the batch is asked for again after the next publish, or in ``take`` on the caller's thread, if that comes
    first.
    """

    phase = "wait"

    def __init__(
        self, stream: PromptStream, sample: Sample, pop_metrics: Callable[[], Row], *, steps: int, max_staleness: int
    ):
        """Begins nothing yet.

        Args:
          stream: of the problems.
          sample: called on the thread, or by ``take``, never by both at once.
          pop_metrics: called after it, for the batch's row.
          steps: of the run; no batch is sampled for a later one.
          max_staleness: most policy versions from the one that samples a batch to the one that it is trained from.
        """
        self._stream, self._sample, self._pop_metrics = stream, sample, pop_metrics
        self._steps, self._max_staleness = steps, max_staleness
        self._should_stop: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name="rljax-sampling", daemon=True)
        self._changed = threading.Condition()  # guards all that follows
        self._version = self._taken = self._begun = 0
        self._data: dict[str, Any] | None = None  # None before the start: what the stream says then
        self._ready: dict[int, _Done] = {}
        self._under_way: _Job | None = None
        self._lost: _Job | None = None
        self._error: BaseException | None = None
        self._is_paused = self._is_publishing = self._is_closed = False
        self._awaited = 0  # step whose batch is waited for
        self._responses = 0  # sampled so far

    def start(self, step: int, should_stop: Callable[[], bool]) -> None:
        """See Batches."""
        self._version = self._taken = self._begun = step
        self._data, self._should_stop = self._stream.state_dict(), should_stop
        self._thread.start()

    def take(self, progressed: Callable[[], None]) -> Sampled:
        """See Batches."""
        step, asked = self._taken + 1, time.perf_counter()
        with self._changed:
            self._awaited = step
            self._wait(lambda: step in self._ready or self._lost is not None or self._error is not None, progressed)
            job = None if step in self._ready else self._lost
            if job is not None:
                self._lost, self._under_way = None, job
        if job is not None:
            self._finish(job, progressed)
        with self._changed:
            if step not in self._ready:
                assert self._error is not None
                raise self._error
            sampled, job, began = self._ready.pop(step)
            self._taken, self._data = step, job.data
            return sampled._replace(row=sampled.row | {"time/ahead_s": asked - began})

    @contextlib.contextmanager
    def paused(self, progressed: Callable[[], None], *, drains: bool = True) -> Iterator[None]:
        """See Batches."""
        following = self._taken + 1
        with self._changed:
            self._wait(lambda: self._begun >= following or not self._may_begin(following), progressed)
            self._is_paused = True
            if drains:
                self._wait(lambda: self._under_way is None, progressed)
            self._is_publishing = True
        yield
        with self._changed:
            self._is_paused = self._is_publishing = False
            self._version = self._taken
            self._changed.notify_all()

    def is_unwanted(self) -> bool:
        """See Batches."""
        job = self._under_way
        if threading.current_thread() is not self._thread or job is None:
            return False
        return self._is_closed or (self._should_stop() and job.step != self._awaited)

    def state_dict(self) -> dict[str, Any]:
        """See Batches."""
        return self._stream.state_dict() if self._data is None else self._data

    def close(self) -> None:
        """See Batches."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _wait(self, is_so: Callable[[], bool], progressed: Callable[[], None]) -> None:
        """Waits until ``is_so``; the caller has the condition."""
        seen = self._responses
        while not self._changed.wait_for(is_so, _TICK_S):
            if self._responses != seen:
                seen = self._responses
                progressed()

    def _may_begin(self, step: int) -> bool:
        """Whether the thread goes on to the batch of ``step`` without a further publish."""
        is_over = self._is_closed or self._error is not None or self._lost is not None
        return not is_over and step <= min(self._steps, self._version + 1 + self._max_staleness)

    def _next_job(self) -> _Job | None:
        """What the thread is to sample now, if anything; the caller has the condition."""
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
        problems = self._stream.next_batch()
        return _Job(self._begun, problems, self._stream.state_dict(), self._version)

    def _run(self) -> None:
        """The thread: all batches, in their order."""
        while True:
            with self._changed:
                while (job := self._next_job()) is None:
                    if self._is_closed or self._error is not None:
                        return
                    self._changed.wait()
                self._under_way = job
                self._changed.notify_all()
            self._finish(job, lambda: None)

    def _finish(self, job: _Job, progressed: Callable[[], None]) -> None:
        """Samples the batch that is under way, on the caller's thread."""

        def count() -> None:
            self._responses += 1
            progressed()

        began = time.perf_counter()
        outcome: Sampled | BaseException
        try:
            rollouts = self._sample(job.problems, job.step, count, self.is_unwanted)
            seconds = time.perf_counter() - began
            with self._changed:  # what a publish counts is of its own step
                self._changed.wait_for(lambda: not self._is_publishing or self._is_closed)
            outcome = Sampled(rollouts, self._pop_metrics() | {"time/rollout_s": seconds})
        except BaseException as error:
            outcome = error
        with self._changed:
            self._under_way = None
            if isinstance(outcome, Sampled):
                self._ready[job.step] = _Done(outcome, job, began)
            elif isinstance(outcome, ServersLostError) and threading.current_thread() is self._thread:
                self._lost = job
            else:
                self._error = outcome
            self._changed.notify_all()
