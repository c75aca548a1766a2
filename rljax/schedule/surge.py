"""The rule that calls a surge of the mean response length, on the host.

"Beyond Precision" (arXiv 2602.01826) sets its decay period from the step at which the mean response length grows about
three-fold within a narrow window. The rule looks at the last ``window`` usable lengths:

1. The smoothed length is the median of the newest ``smooth`` lengths. The baseline is a lower quantile of all lengths
   before them. It is low enough that a surge in progress does not raise it, and high enough that a short dip does not
   lower it.
2. A step crosses when the smoothed length is at least ``ratio * baseline``.
3. The surge is called on the first crossing step whose newest ``persistence`` lengths are all at least
   ``held_ratio * baseline``. Between spikes the length falls back to the baseline; in a surge it does not. So a surge
   that rises over a few steps is called without delay.
4. A batch in which many responses reached the length limit is left out, because its mean length measures the limit. It
   counts when it is at least ``capped_ratio * baseline``: a surge that runs into the limit is called.

Both levels are order statistics, and the only arithmetic is float32 products with the baseline. So numpy and XLA decide
alike on every stream of lengths, ties included. ``rljax.schedule.in_graph`` has the same rule inside a compiled graph.
"""

import collections
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.schedule.arguments import as_float, as_int, as_share, as_step, check_keys, check_kind

# A backend may flush anything below the smallest normal float32 to zero, so such a length is ignored.
SMALLEST_LENGTH = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class SurgeConfig:
    """The rules by which a surge is called. The defaults suit surges after step 10 that take up to 40 steps."""

    ratio: float = 2.5
    """A step crosses when its smoothed length is at least this many times the baseline. Above 1."""
    window: int = 60
    """Number of past steps with a usable length that the rule looks at. Growth that takes longer is not a surge."""
    baseline_quantile: float = 0.3
    """The baseline is this quantile, in [0, 1], of the window without its newest ``smooth`` lengths. Between two
    lengths it takes the smaller. A surge that fills the rest of the window raises its own baseline."""
    smooth: int = 5
    """The smoothed length is the median of this many newest lengths (steps). It must be odd."""
    persistence: int = 6
    """Number of newest lengths (steps) that must all have left the baseline."""
    held_ratio: float = 1.5
    """A length has left the baseline when it is at least this many times the baseline. In (0, ratio]."""
    warmup: int = 10
    """Number of usable lengths (steps) before the tracker may report a surge."""
    max_truncated: float = 0.25
    """A batch is left out if a larger fraction of its responses, in [0, 1], reached the length limit, because its mean
    length then measures the limit. ``capped_ratio`` says when it counts all the same."""
    capped_ratio: float | None = 4.5
    """A batch above ``max_truncated`` counts when its length is at least this many times the baseline. The limit then
    lies far above the baseline, so the limit does not cause the growth. Above 1; None: such a batch never counts."""
    max_wait: int | None = None
    """Step at which the tracker calls although no surge was found. None: it waits forever."""

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {"max_wait": as_step("max_wait", self.max_wait)}
        for name in ("window", "smooth", "persistence", "warmup"):
            numbers[name] = as_int(name, getattr(self, name), 1)
        for name in ("ratio", "baseline_quantile", "held_ratio", "max_truncated", "capped_ratio"):
            if name != "capped_ratio" or self.capped_ratio is not None:
                numbers[name] = as_float(name, getattr(self, name))
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if not 1.0 < self.ratio < math.inf:
            raise ValueError(f"ratio must be finite and above 1, got ratio = {self.ratio}.")
        if not 0.0 <= self.baseline_quantile <= 1.0:
            raise ValueError(f"baseline_quantile must be in [0, 1], got baseline_quantile = {self.baseline_quantile}.")
        if self.smooth % 2 == 0:
            raise ValueError(f"smooth must be an odd number of steps, got smooth = {self.smooth}.")
        if not 0.0 < self.held_ratio <= self.ratio:
            raise ValueError(
                f"held_ratio must be in (0, ratio], got held_ratio = {self.held_ratio} and ratio = {self.ratio}."
            )
        if self.warmup <= self.smooth or self.warmup < self.persistence:
            raise ValueError(
                "warmup must be above smooth and at least persistence, got "
                f"warmup = {self.warmup}, smooth = {self.smooth} and persistence = {self.persistence} (steps)."
            )
        if self.window < self.warmup:
            raise ValueError(
                f"window must be at least warmup, got window = {self.window} and warmup = {self.warmup} (steps)."
            )
        if self.window > 1_000_000:
            raise ValueError(f"window must be at most 1000000 steps, got window = {self.window}.")
        if not 0.0 <= self.max_truncated <= 1.0:
            raise ValueError(f"max_truncated must be in [0, 1], got max_truncated = {self.max_truncated}.")
        if self.capped_ratio is not None and not self.capped_ratio > 1.0:
            raise ValueError(f"capped_ratio must be None or above 1, got capped_ratio = {self.capped_ratio}.")
        if self.max_wait is not None and self.max_wait >= 2**31:
            raise ValueError(f"max_wait must be below 2**31, got max_wait = {self.max_wait}.")

    def baseline_rank(self, seen: int) -> int:
        """Returns the rank (0: smallest) of the baseline among the older lengths of a window of ``seen`` lengths."""
        return math.floor(self.baseline_quantile * max(0, seen - self.smooth - 1))


class SurgeTracker:
    """A tracker on the host that calls the surge at most once per run.

    Attributes:
      config: The rules.
      step: The number of observed batches, unusable ones included.
      surge_step: The 1-based step at which the surge was called, or None.
      ignored: The number of lengths so far that were not finite and positive.
      held_out: The number of batches so far that were left out because of ``max_truncated``.
      smoothed: The median of the newest ``smooth`` lengths at the last step tested for a surge; None before one.
      baseline: The baseline at that step. Like ``smoothed``, it is also None after ``load_state_dict``.
    """

    def __init__(self, config: SurgeConfig = SurgeConfig()) -> None:
        check_kind("config", config, SurgeConfig)
        self.config = config
        self._ratio = np.float32(config.ratio)
        self._held_ratio = np.float32(config.held_ratio)
        self._max_truncated = np.float32(config.max_truncated)
        self._capped_ratio = np.float32(np.inf if config.capped_ratio is None else config.capped_ratio)
        self._lengths: collections.deque[float] = collections.deque(maxlen=config.window)
        self._crossing_since: int | None = None
        self.step = 0
        self.surge_step: int | None = None
        self.ignored = 0
        self.held_out = 0
        self.smoothed: float | None = None
        self.baseline: float | None = None

    def __repr__(self) -> str:
        counts = f"surge_step={self.surge_step}, ignored={self.ignored}, held_out={self.held_out}"
        return f"{type(self).__name__}(step={self.step}, {counts})"

    @property
    def crossing_step(self) -> int | None:
        """The first step of the crossing that led to the call. None before the call, or if ``max_wait`` caused it."""
        return None if self.surge_step is None else self._crossing_since

    def update(self, length: Any, truncated_fraction: Any = None) -> bool:
        """Observes one batch.

        Args:
          length: The mean response length of the batch (tokens), or any other positive signal: a scalar, rounded to
            float32. If it is not finite and positive, the batch counts in ``step`` and ``ignored`` only.
          truncated_fraction: The share of responses that reached the length limit, in [0, 1]. None or NaN: unknown.

        Returns:
          True on the step of the call, False on every other step.

        Raises:
          ValueError: An argument is not a scalar, or the share is not in [0, 1].
        """
        value = _as_float32("length", length)
        with np.errstate(over="ignore"):
            truncated = bool(np.float32(as_share("truncated_fraction", truncated_fraction)) > self._max_truncated)
        self.step += 1
        called = self._observe(value, truncated)
        if not called and self.surge_step is None and self.step >= (self.config.max_wait or math.inf):
            self._crossing_since = None
            called = True
        if called:
            self.surge_step = self.step
        return called

    def _observe(self, value: np.float32, truncated: bool) -> bool:
        """Adds a length to the window; returns whether it makes a call."""
        if not (math.isfinite(value) and value >= SMALLEST_LENGTH):
            self.ignored += 1
            return False
        lengths = [*self._lengths, float(value)][-self.config.window :]
        if truncated and not self._grown_far(lengths):
            self.held_out += 1
            return False
        if self.surge_step is not None:
            return False
        self._lengths.append(float(value))
        return len(lengths) >= self.config.warmup and self._decide(lengths)

    def _grown_far(self, lengths: list[float]) -> bool:
        """Returns whether the newest length is at least ``capped_ratio`` baselines."""
        if len(lengths) <= self.config.smooth:
            return False
        with np.errstate(over="ignore"):
            return bool(lengths[-1] >= self._capped_ratio * np.float32(self._baseline_of(lengths)))

    def _baseline_of(self, lengths: list[float]) -> float:
        return sorted(lengths[: -self.config.smooth])[self.config.baseline_rank(len(lengths))]

    def _decide(self, lengths: list[float]) -> bool:
        config = self.config
        self.baseline = self._baseline_of(lengths)
        self.smoothed = sorted(lengths[-config.smooth :])[config.smooth // 2]
        baseline = np.float32(self.baseline)
        with np.errstate(over="ignore"):
            crosses = self.smoothed >= self._ratio * baseline
            held = min(lengths[-config.persistence :]) >= self._held_ratio * baseline
        if not crosses:
            self._crossing_since = None
            return False
        if self._crossing_since is None:
            self._crossing_since = self.step
        return bool(held)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later decisions depend on, as JSON types; under 4 KB for windows of up to 200 steps."""
        return {
            "step": self.step,
            # The shortest decimal that reads back as the same float32.
            "lengths": [float(str(np.float32(length))) for length in self._lengths],
            "crossing_since": self._crossing_since,
            "surge_step": self.surge_step,
            "ignored": self.ignored,
            "held_out": self.held_out,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the result of ``state_dict()``. With a narrower window, only the newest lengths count.

        Raises:
          ValueError: A key is missing or unknown, or a value is not of the form that ``state_dict`` writes. Nothing is
            loaded then.
        """
        check_keys(state, set(self.state_dict()))
        step, ignored, held_out = (as_int(key, state[key]) for key in ("step", "ignored", "held_out"))
        crossing_since, surge_step = (as_step(key, state[key]) for key in ("crossing_since", "surge_step"))
        for key in ("crossing_since", "surge_step", "ignored", "held_out"):
            if (state[key] or 0) > step:
                raise ValueError(f"{key} must be at most step = {step}, got {key} = {state[key]}.")
        if not isinstance(state["lengths"], list | tuple | np.ndarray):
            raise ValueError(f"lengths must be a list of numbers, got lengths = {state['lengths']!r:.100}.")
        lengths = [float(_as_float32("lengths", length)) for length in state["lengths"]]
        if not all(SMALLEST_LENGTH <= length < math.inf for length in lengths):
            raise ValueError(f"lengths must be finite and positive, got lengths = {lengths!r:.100}.")
        self.step, self.ignored, self.held_out = step, ignored, held_out
        self._crossing_since, self.surge_step = crossing_since, surge_step
        self._lengths = collections.deque(lengths, maxlen=self.config.window)
        self.smoothed = self.baseline = None


def _as_float32(name: str, value: Any) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(as_float(name, value))
