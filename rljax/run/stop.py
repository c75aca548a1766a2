"""The request to stop: the first SIGINT or SIGTERM ends a run with or without the step under way, a second at once."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM inside a ``with`` block into a request; a second one acts as usual."""

    def __init__(self, grace_s: float = math.inf, signal_elsewhere: Callable[[], int | None] = lambda: None) -> None:
        """A run that nobody asked to stop.

        Args:
          grace_s: from the request to the end of the run, saving included (seconds).
          signal_elsewhere: the signal that another process of the run was sent, which counts like one of this process.
        """
        self.signal: int | None = None
        self._elsewhere = signal_elsewhere
        self._grace_s, self._asked_at = grace_s, 0.0
        self._began = time.monotonic()
        self._step_s: float | None = None
        self._save_s: Callable[[], float | None] = lambda: None
        self._previous: dict[int, Any] = {}
        self.is_unwanted: Callable[[], bool] = lambda: False
        """Whether what the calling thread samples will not be trained on."""

    def is_requested(self) -> bool:
        """True once a signal came."""
        if self.signal is None and (number := self._elsewhere()) is not None:
            self.request(number)
        return self.signal is not None

    def begin_step(self, last_step_s: float | None, last_save_s: Callable[[], float | None]) -> None:
        """A step begins. Given what the last step and the last save took (seconds); None where that is not known."""
        self._began, self._step_s, self._save_s = time.monotonic(), last_step_s, last_save_s

    def gives_up(self) -> bool:
        """Whether to end what is sampled: it is unwanted, or the step under way, which wants it, is not expected to be
        done, and saved, in what is left of the grace."""
        if self.is_unwanted():
            return True
        if not self.is_requested():
            return False
        return remaining_s(self._step_s, time.monotonic() - self._began, self._save_s()) > self.left_s()

    def left_s(self) -> float:
        """What is left of the grace (seconds); infinite while nobody asked."""
        return self._asked_at + self._grace_s - time.monotonic() if self.is_requested() else math.inf

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.request(number)

    def request(self, number: int) -> None:
        """The run is asked to stop, by this signal, of this process or another of the run."""
        self.signal, self._asked_at = number, time.monotonic()
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        what = "after this step"
        if self.gives_up():
            what = f"without what is still sampled, which is not expected within run.grace_s = {self._grace_s:g} s"
        print(f"\nstopping {what} (once more to stop at once)", file=sys.stderr)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def remaining_s(step_s: float | None, elapsed_s: float, save_s: float | None) -> float:
    """Expected time to the end of a step and its save, where the last ones took so long and this one has so far."""
    if step_s is None or save_s is None:
        return math.inf
    return max(step_s - elapsed_s, 0.0) + save_s
