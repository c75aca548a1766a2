"""A JAX profile of some steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax


class StepProfiler(ExitStack):
    """Profiles the steps ``first`` to ``last`` into a directory that TensorBoard and XProf read.

    A context manager: the profile is also written when the run ends earlier.
    """

    def __init__(self, steps: Sequence[int], directory: Path):
        """Starts nothing yet.

        Args:
          steps: (first, last), 1-based; empty: never.
          directory: made when the first step is profiled.
        """
        super().__init__()
        self._first, self._last = steps or (0, -1)
        self._directory = directory
        self.running = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context of step ``number``: profiling starts before the first step and stops after the last."""
        if not self.running and self._first <= number <= self._last:
            self.enter_context(jax.profiler.trace(self._directory))
            self.running = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number >= self._last:
            self.close()
            self.running = False
