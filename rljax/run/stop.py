"""The request to stop: the first SIGINT or SIGTERM ends a run after the step under way, a second one at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM inside a ``with`` block into a request; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
