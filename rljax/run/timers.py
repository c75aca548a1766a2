"""The seconds that each phase of a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rljax.record.rows import Row
from rljax.run.stop import StopRequest


class Timers:
    """Measures the phases of one step.

    Attributes:
      row: The seconds of each finished phase, under ``time/<phase>_s``.
    """

    def __init__(self, stop: StopRequest) -> None:
        """Starts the clock of the step. ``stop`` is told of each phase that begins."""
        self.row: Row = {}
        self._stop, self._start = stop, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block as the phase ``name``."""
        self._stop.at(name)
        start = time.perf_counter()
        yield
        self.row[f"time/{name}_s"] = time.perf_counter() - start

    def seconds(self) -> float:
        """Returns the seconds since the step began."""
        return time.perf_counter() - self._start
