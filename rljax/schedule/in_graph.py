"""The schedules inside a compiled graph: the surge rule, the triggered rate and the rate of a known period, for optax.

They decide as ``SurgeTracker`` and ``LengthTriggeredLR`` do on every stream. This module needs jax and optax.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.schedule.arguments import as_float, as_share, as_step, check_kind
from rljax.schedule.length_decay import DENOMINATOR, decay_rates, scaled_multiplier
from rljax.schedule.sample_size import check_base
from rljax.schedule.surge import SMALLEST_LENGTH, SurgeConfig

_INT32_MAX = 2**31 - 1


def length_decay_schedule(
    init_value: float, decay_period: int | None, *, decay_factor: float = 0.5, floor_ratio: float = 0.1
) -> optax.Schedule:
    """Builds Algorithm 1 of arXiv 2602.01826, with a known decay period, as an optax schedule.

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
    rates = np.asarray(decay_rates(init_value, decay_factor, floor_ratio), np.float32)
    period = min(as_step("decay_period", decay_period) or _INT32_MAX, _INT32_MAX)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.int32)
        # (count + 1) // period, without overflow when optax's saturating count is the largest int32.
        decays = count // period + (count % period == period - 1)
        return _look_up(rates, jnp.where(decay_period is None, 0, decays))

    return schedule


class SurgeState(NamedTuple):
    """The numbers of a ``SurgeTracker`` inside a graph. 0 as a step means that there is none."""

    step: jax.Array  # shape=(), dtype=jnp.int32
    lengths: jax.Array  # shape=(window,), dtype=jnp.float32, oldest to newest; only the last `seen` are set
    seen: jax.Array  # shape=(), dtype=jnp.int32
    crossing_since: jax.Array  # shape=(), dtype=jnp.int32, kept after the call
    surge_step: jax.Array  # shape=(), dtype=jnp.int32
    ignored: jax.Array  # shape=(), dtype=jnp.int32
    held_out: jax.Array  # shape=(), dtype=jnp.int32


def update_surge_state(
    config: SurgeConfig,
    state: SurgeState,
    length: jax.typing.ArrayLike,
    truncated_fraction: jax.typing.ArrayLike | None = None,
) -> SurgeState:
    """Observes one batch, as a pure function of arrays for use under jit, scan and vmap.

    It decides exactly as ``SurgeTracker.update`` does. Both numbers have shape () and are cast to float32. ``config``
    is fixed at trace time. On the step of the call ``surge_step == step`` in the result.

    A compiled graph cannot warn. A length that is not finite and positive is only counted, in ``ignored``.

    Raises:
      ValueError: An argument is not a scalar, or a Python or numpy share is not in [0, 1].
    """
    value = _as_float32("length", length)
    if truncated_fraction is not None and not isinstance(truncated_fraction, jax.Array):
        as_share("truncated_fraction", truncated_fraction)
    truncated = _as_float32("truncated_fraction", 0.0 if truncated_fraction is None else truncated_fraction)
    usable = jnp.isfinite(value) & (value >= SMALLEST_LENGTH)
    waits = state.surge_step == 0
    # The window if this length counts. The baseline depends only on the older lengths, so it serves both tests.
    lengths = jnp.append(state.lengths[1:], value)
    seen = jnp.minimum(state.seen + 1, config.window)
    baseline = _baseline(config, lengths, seen)
    capped = truncated > jnp.float32(config.max_truncated)
    capped_ratio = np.inf if config.capped_ratio is None else config.capped_ratio
    held_out = usable & capped & ~(value >= jnp.float32(capped_ratio) * baseline)
    counts = usable & ~held_out & waits

    step = state.step + 1
    smoothed = jnp.sort(lengths[-config.smooth :])[config.smooth // 2]
    crosses = (seen >= config.warmup) & (smoothed >= jnp.float32(config.ratio) * baseline)
    held = jnp.min(lengths[-config.persistence :]) >= jnp.float32(config.held_ratio) * baseline
    surges = counts & crosses & held
    overdue = waits & ~surges & (config.max_wait is not None and step >= config.max_wait)
    since = jnp.where(crosses, jnp.where(state.crossing_since == 0, step, state.crossing_since), 0)
    since = jnp.where(counts, since, state.crossing_since)
    return SurgeState(
        step=step,
        lengths=jnp.where(counts, lengths, state.lengths),
        seen=jnp.where(counts, seen, state.seen),
        crossing_since=jnp.where(overdue, 0, since),
        surge_step=jnp.where(surges | overdue, step, state.surge_step),
        ignored=state.ignored + ~usable,
        held_out=state.held_out + held_out,
    )


def _as_float32(name: str, value: jax.typing.ArrayLike) -> jax.Array:
    """Returns a number as float32, shape (). Raises ValueError if it is not a scalar or is a boolean."""
    if not isinstance(value, jax.Array):
        as_float(name, value)
    elif value.shape or value.dtype == jnp.bool_:
        raise ValueError(f"{name}: scalars are expected, got {value.dtype}{list(value.shape)}.")
    return jnp.asarray(value, jnp.float32)


def _baseline(config: SurgeConfig, lengths: jax.Array, seen: jax.Array) -> jax.Array:
    ranks = jnp.asarray([config.baseline_rank(n) for n in range(config.window + 1)], jnp.int32)
    is_set = jnp.arange(config.window, dtype=jnp.int32) >= config.window - seen
    older = jnp.where(is_set, lengths, jnp.inf)[: -config.smooth]
    return jnp.sort(older)[ranks[seen]]


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
        check_kind("config", config, SurgeConfig)
        self._config, self._multiplier = config, multiplier
        self._rates = np.asarray(rates, np.float32)
        whole, self._part = divmod(scaled_multiplier(multiplier), DENOMINATOR)
        self._whole = min(whole, _INT32_MAX)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._rates[0]:g}, multiplier={self._multiplier:g}, floor={self._rates[-1]:g})"

    def init(self) -> LengthTriggeredState:
        """Returns the state before the first update."""

        def zero() -> jax.Array:
            return jnp.zeros([], jnp.int32)

        lengths = jnp.zeros([self._config.window], jnp.float32)
        return LengthTriggeredState(
            surge=SurgeState(zero(), lengths, zero(), zero(), zero(), zero(), zero()),
            decay_period=zero(),
            next_period=zero(),
            next_remainder=jnp.asarray(DENOMINATOR // 2, jnp.int32),
        )

    def update(self, state: LengthTriggeredState, **extra_args: Any) -> LengthTriggeredState:
        """Observes one batch, and returns the state after it.

        ``extra_args`` has the scalar ``response_length``, and optionally ``truncated_fraction``.

        Raises:
          ValueError: ``response_length`` is missing, or ``state`` is not a state of this schedule.
        """
        _check_state(state)
        if extra_args.get("response_length") is None:
            raise ValueError(
                "the length-triggered schedule needs response_length=, the mean response length of this batch, "
                f"in every update; got the extra arguments {sorted(extra_args)}."
            )
        surge = update_surge_state(
            self._config, state.surge, extra_args["response_length"], extra_args.get("truncated_fraction")
        )
        remainder = state.next_remainder + self._part
        carry = remainder >= DENOMINATOR
        grown = jnp.minimum(state.next_period, _INT32_MAX - self._whole) + self._whole
        next_period = jnp.minimum(grown, _INT32_MAX - carry) + carry
        return LengthTriggeredState(
            surge=surge,
            decay_period=jnp.where(surge.surge_step == surge.step, next_period, state.decay_period),
            next_period=next_period,
            next_remainder=remainder - jnp.where(carry, DENOMINATOR, 0),
        )

    def __call__(self, state: LengthTriggeredState, **extra_args: Any) -> jax.Array:
        """Returns the rate of the update whose batch ``extra_args`` has; the initial rate without ``response_length``.

        Raises:
          ValueError: ``state`` is not a state of this schedule, such as the count that optax gives to plain schedules.
        """
        _check_state(state)
        # inject_hyperparams reads the rate before it updates the state, so this method observes the new batch as well.
        if extra_args.get("response_length") is None:
            return _look_up(self._rates, jnp.zeros([], jnp.int32))
        state = self.update(state, **extra_args)
        decays = state.surge.step // jnp.maximum(state.decay_period, 1)
        return _look_up(self._rates, jnp.where(state.decay_period == 0, 0, decays))


def _check_state(state: Any) -> None:
    """Raises ValueError, with the right use, if an optimizer calls the schedule with its count."""
    if not isinstance(state, LengthTriggeredState):
        raise ValueError(
            "the length-triggered schedule has a state and is no function of the count, but it was called with "
            f"{state!r:.60}: build the optimizer as inject_learning_rate(optax.adamw, length_triggered_schedule(rate)) "
            "and call its update with response_length=."
        )


def length_triggered_schedule(
    init_value: float,
    *,
    config: SurgeConfig = SurgeConfig(),  # noqa: B008 (frozen)
    multiplier: float = 1.8,
    decay_factor: float = 0.5,
    floor_ratio: float = 0.1,
) -> LengthTriggeredSchedule:
    """Builds the length-triggered rate for optax: for ``inject_learning_rate`` or ``optax.inject_hyperparams``.

    The optimizer's ``update`` then takes ``response_length=``, the mean response length of the batch (tokens, shape
    ()), and optionally ``truncated_fraction=`` (shape ()), once per update. ``optax.MultiSteps`` passes on only the
    arguments of the last mini-batch of each group: pass the mean over the group there. A compiled graph cannot warn
    about lengths that are not finite and positive. Their count is in the state, as ``surge.ignored``.

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
    return LengthTriggeredSchedule(config, multiplier, decay_rates(init_value, decay_factor, floor_ratio))


class SampleSizeState(NamedTuple):
    """The state of a schedule whose rate is multiplied by the factor of the sample size."""

    schedule: Any  # the state of the schedule that is scaled
    factor: jax.Array  # shape=(), dtype=jnp.float32, of the last observed batch; it scales the next rate


class SampleSizeSchedule(optax.schedules.StatefulSchedule):
    """The stateful schedule that ``scaled_by_sample_size`` builds."""

    def __init__(self, schedule: optax.schedules.StatefulSchedule, base: float) -> None:
        check_base(base)
        self._schedule, self._base = schedule, base

    def init(self) -> SampleSizeState:
        """Returns the state before the first update, whose rate has the factor 1."""
        return SampleSizeState(self._schedule.init(), jnp.ones([], jnp.float32))

    def update(self, state: SampleSizeState, **extra_args: Any) -> SampleSizeState:
        """Observes one batch. Raises ValueError if ``effective_sample_share``, shape (), is missing."""
        if extra_args.get("effective_sample_share") is None:
            raise ValueError(
                "a rate scaled by the sample size needs effective_sample_share=, the effective sample size of this "
                f"batch in [0, 1], in every update; got the extra arguments {sorted(extra_args)}."
            )
        share = extra_args["effective_sample_share"]
        if not isinstance(share, jax.Array):
            as_share("effective_sample_share", share)
        share = _as_float32("effective_sample_share", share)
        factor = jnp.where(jnp.isnan(share), 0.0, jnp.sqrt(jnp.clip(share / self._base, 0.0, 1.0)))
        return SampleSizeState(self._schedule.update(state.schedule, **extra_args), factor)

    def __call__(self, state: SampleSizeState, **extra_args: Any) -> jax.Array:
        """Returns the rate of the update whose batch ``extra_args`` describes, times the factor of the batch before."""
        return jnp.asarray(self._schedule(state.schedule, **extra_args), jnp.float32) * state.factor


def scaled_by_sample_size(
    schedule: float | optax.Schedule | optax.schedules.StatefulSchedule, base: float = 1.0
) -> SampleSizeSchedule:
    """Builds a schedule whose rate is the rate of ``schedule`` times ``sample_size_factor`` of the batch before.

    The optimizer's ``update`` then takes ``effective_sample_share=`` beside the arguments of the schedule.

    Args:
      schedule: The rate: a number, a function of the optax count, or a ``StatefulSchedule`` such as
        ``length_triggered_schedule``.
      base: The effective sample share from which on the factor is 1, in (0, 1].

    Raises:
      ValueError: ``base`` is out of range.
    """
    if isinstance(schedule, optax.schedules.StatefulSchedule):
        return SampleSizeSchedule(schedule, base)
    plain: Any = schedule if callable(schedule) else optax.constant_schedule(as_float("schedule", schedule))
    return SampleSizeSchedule(optax.schedules.WrappedSchedule(plain), base)


def _look_up(rates: np.ndarray, decays: jax.Array) -> jax.Array:
    return jnp.asarray(rates)[jnp.minimum(decays, rates.size - 1)]
