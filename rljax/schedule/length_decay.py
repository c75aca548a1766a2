"""The length-triggered learning rate: Algorithm 1 of "Beyond Precision" (arXiv 2602.01826) and its decay period.

At update t = 1, 2, ... with period T the rate is ``max(init * factor ** (t // T), init * floor_ratio)``. Steps are
1-based and absolute, and the decay acts on update T itself. The period is either known (``length_decay_schedule``), or
set once per run from the step of the surge. The triggered schedule has three forms, which agree on every stream of
lengths: ``LengthTriggeredLR`` on the host, ``length_triggered_schedule`` in an optax state, and
``rljax.schedule.torch.LengthTriggeredScheduler``.
"""

import functools
import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np

from rljax.schedule.arguments import as_float, as_int, as_step, check_keys, check_kind
from rljax.schedule.surge import SurgeTracker

# The multiplier is read to nine decimals, so that its fractional part can be summed in int32.
DENOMINATOR = 10**9
# The longest rate table. With a factor so close to 1 that more decays would follow, the rate stays at the last entry.
_MAX_DECAYS = 2**16
SILENT_STEPS = 20  # the steps without a usable length after which one warning is given


def decay_period_from_surge(surge_step: int, multiplier: float = 1.8) -> int:
    """Computes the decay period that a surge sets: ``multiplier * surge_step``, rounded half up in integers.

    Args:
      surge_step: The 1-based step at which the surge was called.
      multiplier: The ratio of period to surge step, at least 1. It is read as its shortest decimal, to nine places.

    Returns:
      The period in steps: 198 for 110, 162 for 90.

    Raises:
      ValueError: An argument is out of range.
    """
    step = as_int("surge_step", surge_step, 1)
    return (2 * step * scaled_multiplier(multiplier) + DENOMINATOR) // (2 * DENOMINATOR)


class LengthTriggeredLR:
    """A controller on the host: it takes the mean response length of a batch and returns the rate of that very update.

    ``decay_period`` is the period in steps, or None before the ``tracker`` called the surge.
    """

    def __init__(
        self,
        init_value: float,
        *,
        tracker: SurgeTracker | None = None,
        multiplier: float = 1.8,
        decay_factor: float = 0.5,
        floor_ratio: float = 0.1,
    ) -> None:
        """Checks the arguments and starts before the first update.

        Args:
          init_value: The rate until the first decay, positive.
          tracker: The tracker that calls the surge. None: ``SurgeTracker()``.
          multiplier: The ratio of decay period to surge step, at least 1.
          decay_factor: The factor of each decay, in (0, 1).
          floor_ratio: The lowest rate as a fraction of ``init_value``, in [0, 1].

        Raises:
          ValueError: An argument is out of range.
        """
        self._rates = decay_rates(init_value, decay_factor, floor_ratio)
        scaled_multiplier(multiplier)
        self._multiplier, self._decay_factor, self._floor_ratio = map(float, (multiplier, decay_factor, floor_ratio))
        self.tracker = SurgeTracker() if tracker is None else tracker
        check_kind("tracker", self.tracker, SurgeTracker, ": give SurgeTracker(config)")
        self.decay_period = self._period_of_call()

    def __repr__(self) -> str:
        state = f"learning_rate={self.learning_rate:g}, step={self.tracker.step}, decay_period={self.decay_period}"
        return f"{type(self).__name__}({self._rates[0]:g}, {state})"

    @property
    def surge_step(self) -> int | None:
        """The 1-based step at which the surge was called, or None."""
        return self.tracker.surge_step

    @property
    def learning_rate(self) -> float:
        """The rate of the last observed update; ``init_value`` before the first."""
        return self._rate_at(self._rates, self.tracker.step)

    def rate_from(self, init_value: float, step: int | None = None) -> float:
        """Returns the rate of a parameter group that begins with another rate.

        Args:
          init_value: The group's rate until the first decay, at least 0. A rate of 0 stays 0.
          step: The step whose rate is returned, with the present decay period. None: the last observed step.

        Raises:
          ValueError: ``init_value`` is negative or not finite.
        """
        if init_value == 0.0:
            return 0.0
        rates = _cached_rates(as_float("init_value", init_value), self._decay_factor, self._floor_ratio)
        return self._rate_at(rates, self.tracker.step if step is None else step)

    def step(self, length: Any, truncated_fraction: Any = None) -> float:
        """Observes the batch of one update.

        Args:
          length: The mean response length of the batch in tokens, a scalar.
          truncated_fraction: The share of responses that reached the length limit, in [0, 1]. None: unknown.

        Returns:
          The rate for this very update.

        Warns:
          RuntimeWarning: 20 lengths so far were not finite and positive. The warning comes once.

        Raises:
          ValueError: An argument is not a scalar, or the share is not in [0, 1].
        """
        ignored = self.tracker.ignored
        if self.tracker.update(length, truncated_fraction):
            self.decay_period = self._period_of_call()
        if ignored < SILENT_STEPS == self.tracker.ignored:
            warnings.warn(
                f"{SILENT_STEPS} of {self.tracker.step} mean response lengths were not finite and positive, such as "
                f"{float(length)}: they are ignored, and the surge cannot be seen in them",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.learning_rate

    def state_dict(self) -> dict[str, Any]:
        """Returns the tracker's state and the period, as JSON types."""
        return {"tracker": self.tracker.state_dict(), "decay_period": self.decay_period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the result of ``state_dict()``. A period that was set is kept, even if the multiplier differs.

        Raises:
          ValueError: A key is missing or unknown, or a value is not of the form that ``state_dict`` writes. Nothing is
            loaded then.
        """
        check_keys(state, {"decay_period", "tracker"})
        period = as_step("decay_period", state["decay_period"])
        if period is None and isinstance(state["tracker"], dict) and state["tracker"].get("surge_step") is not None:
            raise ValueError(f"decay_period must be a period after the call of a surge, got decay_period = {period}.")
        self.tracker.load_state_dict(state["tracker"])
        self.decay_period = period

    def _rate_at(self, rates: tuple[float, ...], step: int) -> float:
        decays = 0 if self.decay_period is None else step // self.decay_period
        return rates[min(decays, len(rates) - 1)]

    def _period_of_call(self) -> int | None:
        surge_step = self.tracker.surge_step
        return None if surge_step is None else decay_period_from_surge(surge_step, self._multiplier)


class OfController:
    """The base class of schedulers and callbacks for other libraries, each of which holds a ``LengthTriggeredLR``."""

    _controller: LengthTriggeredLR

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self.tracker.step}, decay_period={self.decay_period})"

    @property
    def tracker(self) -> SurgeTracker:
        """The tracker that watches the lengths."""
        return self._controller.tracker

    @property
    def surge_step(self) -> int | None:
        """The 1-based rollout batch at which the surge was called, or None."""
        return self._controller.surge_step

    @property
    def decay_period(self) -> int | None:
        """The period in rollout batches, or None before the surge was called."""
        return self._controller.decay_period


def scaled_multiplier(multiplier: float) -> int:
    """Returns the multiplier in units of ``1 / DENOMINATOR``; raises ValueError if it is not finite or below 1."""
    if not 1.0 <= as_float("multiplier", multiplier) < math.inf:
        raise ValueError(f"multiplier must be finite and at least 1, got multiplier = {multiplier}.")
    return round(Fraction(repr(float(multiplier))) * DENOMINATOR)


def decay_rates(init_value: float, decay_factor: float, floor_ratio: float) -> tuple[float, ...]:
    """Returns the rates after 0, 1, 2, ... decays, up to the first one that is at the floor or 0 in float32.

    Raises ValueError if an argument is out of range.
    """
    given = (("init_value", init_value), ("decay_factor", decay_factor), ("floor_ratio", floor_ratio))
    init_value, decay_factor, floor_ratio = (as_float(name, value) for name, value in given)
    if not 0.0 < init_value < math.inf:
        raise ValueError(f"init_value must be finite and positive, got init_value = {init_value}.")
    if not 0.0 < decay_factor < 1.0:
        raise ValueError(f"decay_factor must be in (0, 1), got decay_factor = {decay_factor}.")
    if not 0.0 <= floor_ratio <= 1.0:
        raise ValueError(f"floor_ratio must be in [0, 1], got floor_ratio = {floor_ratio}.")
    floor = init_value * floor_ratio
    rates = [init_value]
    while len(rates) <= _MAX_DECAYS and rates[-1] > floor and np.float32(rates[-1]) > 0:
        rates.append(min(rates[-1], max(init_value * decay_factor ** len(rates), floor)))
    return tuple(rates)


_cached_rates = functools.lru_cache(maxsize=64)(decay_rates)
