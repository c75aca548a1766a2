"""The request to stop a run, which all code that waits asks whether to go on, and the seconds of a step's phases."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rljax.distributed.processes import ALONE, Processes
from rljax.record.rows import Row
from rljax.rollout.engine import AHEAD
from rljax.run.checkpoint import Checkpointer

# The time that the first save is expected to take: a start in seconds, and the speed of a common disk.
_SAVE_S, _SAVE_BYTES_PER_S = 1.0, 3e8


class StopRequest:
    """The request to stop a run: whether it came, when the run must end, and whether a wait is given up.

    Inside a ``with`` block the first SIGINT or SIGTERM is the request, and a second one acts as usual. A signal that
    another process received is the request, too, but not the first. Code that waits for servers, responses, rewards or
    a command takes this object, a ``Stopping``. The object also knows the current phase of the run, so that a run
    without progress is found (``run.stuck_s``). A thread that samples the batches of coming steps *works ahead*: it has
    set ``AHEAD`` to the step.
    """

    def __init__(self, grace_s: float = math.inf, processes: Processes = ALONE) -> None:
        """Starts without a request. A signal to any of ``processes`` counts as a request.

        The run should end, saving included, at most ``grace_s`` seconds after the request.
        """
        self.signal: int | None = None  # the number of the signal that asked the run to stop; None: there was none
        self.awaited_step = 0  # the step whose batch the run waits for; work ahead for it is not given up early
        self.waits_for_ahead = False  # whether the run waits now for a thread that works ahead
        self.ahead_is_over = False  # whether all threads that work ahead give up: the run takes no further step
        self._grace_s, self._asked_at, self._processes = grace_s, 0.0, processes
        self._began = time.monotonic()
        self._step_s: float | None = None
        self._state_bytes = 0
        self._checkpointer: Checkpointer | None = None
        self._previous: dict[int, Any] = {}
        self._place = "starting"

    def is_requested(self) -> bool:
        """Returns whether a signal has come."""
        if self.signal is None and (number := self._processes.signal()) is not None:
            self.request(number, own=False)
        return self.signal is not None

    def left_s(self) -> float:
        """Returns the seconds that are left of the grace; infinity before a request."""
        return self._asked_at + self._grace_s - time.monotonic() if self.is_requested() else math.inf

    def gives_up(self) -> bool:
        """Returns whether the calling thread should give up its wait.

        A thread that works ahead gives up once ``ahead_is_over`` is true. It also gives up after a request, unless the
        run waits for its step. Otherwise a thread gives up after a request if the step is not expected to be done and
        saved within the grace.
        """
        ahead = AHEAD.get()
        if ahead is not None and (self.ahead_is_over or (self.is_requested() and ahead != self.awaited_step)):
            return True
        if not self.is_requested():
            return False
        save_s = None if self._checkpointer is None else self._checkpointer.last_save_s()
        if save_s is None:
            save_s = _SAVE_S + self._state_bytes / _SAVE_BYTES_PER_S
        step_s = math.inf if self._step_s is None else self._step_s - (time.monotonic() - self._began)
        return max(step_s, 0.0) + save_s > self.left_s()

    def begin_step(self, last_step_s: float | None, checkpointer: Checkpointer, state_bytes: int = 0) -> None:
        """Records that a step begins. The one before took ``last_step_s`` seconds without evaluation (None: not known).

        This step is expected to take as long. ``state_bytes`` is the size of the state that this process saves. It
        gives the expected time of the first save.
        """
        self._began, self._step_s, self._checkpointer = time.monotonic(), last_step_s, checkpointer
        self._state_bytes = state_bytes

    def at(self, place: str) -> None:
        """Records that the run has come to ``place``, a phase of a step."""
        self._place = place
        self._processes.at(place)

    def progress(self) -> None:
        """Reports progress, or a wait that has a limit of its own, so that the run does not count as stuck.

        Progress of a thread that works ahead counts only while the run waits for such a thread.
        """
        if self.waits_for_ahead or AHEAD.get() is None:
            self._processes.at(self._place)

    def request(self, number: int, *, own: bool = True) -> None:
        """Asks the run to stop, because this process (``own``) or another one was sent the signal ``number``.

        With ``own``, which only the main thread may give, the next signal acts as before the ``with`` block.
        """
        if self.signal is None:
            self.signal, self._asked_at = number, time.monotonic()
        if own:
            for each, handler in self._previous.items():
                signal.signal(each, handler)
        what = "after this step"
        if self.gives_up():
            what = f"without what is still sampled, which is not expected within run.grace_s = {self._grace_s:g} s"
        print(f"\nstopping {what}{' (once more to stop at once)' if own else ''}", file=sys.stderr)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, lambda number, frame: self.request(number))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Timers:
    """Measures the phases of one step; ``row`` has the seconds of each finished phase, under ``time/<phase>_s``."""

    def __init__(self, stop: StopRequest) -> None:
        """Starts the clock of the step. ``stop`` is told of each phase that begins."""
        self.row: Row = {}
        self._stop, self._start = stop, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a ``with`` block as the phase ``name``."""
        self._stop.at(name)
        start = time.perf_counter()
        yield
        self.row[f"time/{name}_s"] = time.perf_counter() - start

    def seconds(self) -> float:
        """Returns the seconds since the step began."""
        return time.perf_counter() - self._start
