"""The length-triggered learning rate: Algorithm 1 of "Beyond Precision" (arXiv 2602.01826) and its decay period.

At update t = 1, 2, ... with period T the rate is ``max(init * factor ** (t // T), init * floor_ratio)``. Steps are
1-based and absolute, and the decay acts on update T itself. The period is either known (``length_decay_schedule``), or
set once per run from the step of the surge. The triggered schedule has two forms, which agree on every stream of
lengths: ``LengthTriggeredLR`` on the host and ``length_triggered_schedule`` in the optimizer state.
"""

import math
import operator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.schedule.surge import SurgeConfig, SurgeState, SurgeTracker, init_surge_state, update_surge_state

_INT32_MAX = 2**31 - 1
# The multiplier is read to nine decimals, so that its fractional part can be summed in int32.
_DENOMINATOR = 10**9
# The longest rate table. With a factor so close to 1 that more decays would follow, the rate stays at the last entry.
_MAX_DECAYS = 2**16


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
    if surge_step < 1:
        raise ValueError(f"surge_step must be at least 1, got surge_step = {surge_step}.")
    scaled = _scaled_multiplier(multiplier)
    return (2 * operator.index(surge_step) * scaled + _DENOMINATOR) // (2 * _DENOMINATOR)


def length_decay_schedule(
    init_value: float,
    decay_period: int | None,
    *,
    decay_factor: float = 0.5,
    floor_ratio: float = 0.1,
) -> optax.Schedule:
    """Builds Algorithm 1 with a known period as an optax schedule.

    Args:
      init_value: The rate of the first update, positive.
      decay_period: The number of updates from one decay to the next, at least 1. None: the rate stays at
        ``init_value``.
      decay_factor: The factor of each decay, in (0, 1).
      floor_ratio: The lowest rate as a fraction of ``init_value``, in [0, 1].

    Returns:
      A function from the optax count c (of update c + 1) to the rate. The count is an integer or an integer array; the
      rate is float32 of the same shape. It works under jit and vmap.

    Raises:
      ValueError: An argument is out of range.
    """
    rates = np.asarray(_decay_rates(init_value, decay_factor, floor_ratio), np.float32)
    if decay_period is not None and operator.index(decay_period) < 1:
        raise ValueError(f"decay_period must be at least 1 or None, got decay_period = {decay_period}.")
    period = _INT32_MAX if decay_period is None else min(decay_period, _INT32_MAX)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        # (count + 1) // period, without overflow when optax's saturating count is the largest int32.
        decays = count // period + (count % period == period - 1)
        return _look_up(rates, jnp.where(decay_period is None, 0, decays))

    return schedule


class LengthTriggeredLR:
    """A controller on the host: it takes the mean response length of a batch and returns the rate of that very update.

    Attributes:
      tracker: The ``SurgeTracker`` that watches the lengths.
      decay_period: The period in steps, or None before the surge was called.
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
        self._rates = _decay_rates(init_value, decay_factor, floor_ratio)
        _scaled_multiplier(multiplier)
        self._multiplier = multiplier
        self.tracker = SurgeTracker() if tracker is None else tracker
        self.decay_period = self._period_of_call()

    @property
    def surge_step(self) -> int | None:
        """The 1-based step at which the surge was called, or None."""
        return self.tracker.surge_step

    @property
    def learning_rate(self) -> float:
        """The rate of the last observed update; ``init_value`` before the first."""
        decays = 0 if self.decay_period is None else self.tracker.step // self.decay_period
        return self._rates[min(decays, len(self._rates) - 1)]

    def step(self, length: Any, truncated_fraction: Any = None) -> float:
        """Observes the batch of one update.

        Args:
          length: The mean response length of the batch in tokens, a scalar.
          truncated_fraction: The share of responses that reached the length limit, in [0, 1]. None: unknown.

        Returns:
          The rate for this very update.
        """
        if self.tracker.update(length, truncated_fraction):
            self.decay_period = self._period_of_call()
        return self.learning_rate

    def state_dict(self) -> dict[str, Any]:
        """Returns the tracker's state and the period, as JSON types."""
        return {"tracker": self.tracker.state_dict(), "decay_period": self.decay_period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the result of ``state_dict()``. A period that was set is kept, even if the multiplier differs.

        Raises:
          ValueError: A key is missing or unknown.
        """
        if set(state) != {"tracker", "decay_period"}:
            raise ValueError(f"the state must have the keys ['decay_period', 'tracker'], got {sorted(state)}.")
        self.tracker.load_state_dict(state["tracker"])
        self.decay_period = state["decay_period"]

    def _period_of_call(self) -> int | None:
        surge_step = self.tracker.surge_step
        return None if surge_step is None else decay_period_from_surge(surge_step, self._multiplier)


class LengthTriggeredState(NamedTuple):
    """The state of ``length_triggered_schedule``. A period of 0 means that none is set."""

    surge: SurgeState
    decay_period: jax.Array  # shape=(), dtype=jnp.int32
    # The period that a call on this step would set: multiplier * step, rounded half up, summed up in billionths.
    next_period: jax.Array  # shape=(), dtype=jnp.int32
    next_remainder: jax.Array  # shape=(), dtype=jnp.int32


class LengthTriggeredSchedule(optax.schedules.StatefulSchedule):
    """The stateful schedule that ``length_triggered_schedule`` builds."""

    def __init__(self, config: SurgeConfig, multiplier: float, rates: tuple[float, ...]) -> None:
        self._config = config
        self._rates = np.asarray(rates, np.float32)
        whole, self._part = divmod(_scaled_multiplier(multiplier), _DENOMINATOR)
        self._whole = min(whole, _INT32_MAX)

    def init(self) -> LengthTriggeredState:
        """Returns the state before the first update."""
        return LengthTriggeredState(
            surge=init_surge_state(self._config),
            decay_period=jnp.zeros([], jnp.int32),
            next_period=jnp.zeros([], jnp.int32),
            next_remainder=jnp.asarray(_DENOMINATOR // 2, jnp.int32),
        )

    def update(self, state: LengthTriggeredState, **extra_args: Any) -> LengthTriggeredState:
        """Observes one batch.

        Args:
          state: The state before this batch.
          **extra_args: The scalars ``response_length`` (required) and ``truncated_fraction`` (optional).

        Returns:
          The state after this batch.

        Raises:
          ValueError: ``response_length`` is missing.
        """
        if extra_args.get("response_length") is None:
            raise ValueError(
                "the length-triggered schedule needs response_length=, the mean response length of this batch, "
                f"in every update; got the extra arguments {sorted(extra_args)}."
            )
        surge = update_surge_state(
            self._config, state.surge, extra_args["response_length"], extra_args.get("truncated_fraction")
        )
        remainder = state.next_remainder + self._part
        carry = remainder >= _DENOMINATOR
        grown = jnp.minimum(state.next_period, _INT32_MAX - self._whole) + self._whole
        next_period = jnp.minimum(grown, _INT32_MAX - carry) + carry
        return LengthTriggeredState(
            surge=surge,
            decay_period=jnp.where(surge.surge_step == surge.step, next_period, state.decay_period),
            next_period=next_period,
            next_remainder=remainder - jnp.where(carry, _DENOMINATOR, 0),
        )

    def __call__(self, state: LengthTriggeredState, **extra_args: Any) -> jax.Array:
        """Returns the rate of the update whose batch is described; the initial rate without ``response_length``."""
        # inject_hyperparams reads the rate before it updates the state, so this method observes the new batch as well.
        if extra_args.get("response_length") is None:
            return _look_up(self._rates, jnp.zeros([], jnp.int32))
        state = self.update(state, **extra_args)
        decays = state.surge.step // jnp.maximum(state.decay_period, 1)
        return _look_up(self._rates, jnp.where(state.decay_period == 0, 0, decays))


def length_triggered_schedule(
    init_value: float,
    *,
    config: SurgeConfig = SurgeConfig(),  # noqa: B008 (frozen)
    multiplier: float = 1.8,
    decay_factor: float = 0.5,
    floor_ratio: float = 0.1,
) -> LengthTriggeredSchedule:
    """Builds the in-graph form, for ``inject_learning_rate`` or ``optax.inject_hyperparams``.

    The optimizer's ``update`` then takes ``response_length=``, the mean response length of the batch (tokens, shape
    ()), and optionally ``truncated_fraction=`` (shape ()), once per update. ``optax.MultiSteps`` passes on only the
    arguments of the last mini-batch of each group: pass the mean over the group there.

    Args:
      init_value: The rate until the first decay, positive.
      config: The rules by which the surge is called.
      multiplier: The ratio of decay period to surge step, at least 1.
      decay_factor: The factor of each decay, in (0, 1).
      floor_ratio: The lowest rate as a fraction of ``init_value``, in [0, 1].

    Returns:
      An ``optax.schedules.StatefulSchedule`` whose value is float32, shape (). Its ``update`` raises ValueError if
      ``response_length`` is missing.

    Raises:
      ValueError: An argument is out of range.
    """
    return LengthTriggeredSchedule(config, multiplier, _decay_rates(init_value, decay_factor, floor_ratio))


def _scaled_multiplier(multiplier: float) -> int:
    if not 1.0 <= multiplier < math.inf:
        raise ValueError(f"multiplier must be finite and at least 1, got multiplier = {multiplier}.")
    return round(Fraction(repr(float(multiplier))) * _DENOMINATOR)


def _decay_rates(init_value: float, decay_factor: float, floor_ratio: float) -> tuple[float, ...]:
    """Returns the rates after 0, 1, 2, ... decays, up to the first one that is at the floor or 0 in float32."""
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


def _look_up(rates: np.ndarray, decays: jax.Array) -> jax.Array:
    return jnp.asarray(rates)[jnp.minimum(decays, rates.size - 1)]
