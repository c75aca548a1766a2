"""The seconds that each phase of a step takes, and the JAX profile of some steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from rljax.record.rows import Row
from rljax.run.stop import StopRequest


class Timers:
    """Measures the phases of one step; ``row`` has the seconds of each finished phase, under ``time/<phase>_s``."""

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


class StepProfiler(ExitStack):
    """A context manager that profiles some steps into a directory, which TensorBoard and XProf read.

    The profile is also written when the run ends before the last of these steps. ``running`` says whether a profile is
    being taken.
    """

    def __init__(self, steps: Sequence[int], directory: Path):
        """Starts nothing yet; ``steps`` are the first and the last step to profile, 1-based. Empty: no step."""
        super().__init__()
        self._first, self._last = steps or (0, -1)
        self._directory = directory
        self.running = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Opens the context of step ``number``: the profile starts before the first step and ends after the last."""
        if not self.running and self._first <= number <= self._last:
            self.enter_context(jax.profiler.trace(self._directory))
            self.running = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number >= self._last:
            self.close()
            self.running = False
