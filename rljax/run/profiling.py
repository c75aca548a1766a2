"""The JAX profile of some steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax


class StepProfiler(ExitStack):
    """A context manager that profiles some steps into a directory, which TensorBoard and XProf read.

    The profile is also written when the run ends before the last of these steps.

    Attributes:
      running: Whether the profile has begun and has not ended.
    """

    def __init__(self, steps: Sequence[int], directory: Path):
        """Starts nothing yet.

        Args:
          steps: The first and the last step to profile, 1-based. Empty: no step.
          directory: The directory of the profile, which is made with the first step.
        """
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
