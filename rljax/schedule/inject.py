"""A learning rate in the optimizer state, with functions that read and write it without recompiling."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.schedule.arguments import as_float
from rljax.schedule.length_decay import LengthTriggeredLR

_RATE = "learning_rate"
_InjectState = (optax.InjectHyperparamsState, optax.schedules.InjectStatefulHyperparamsState)


class _Float32Schedule(optax.schedules.StatefulSchedule):
    """A stateful schedule whose value is a strongly typed float32 scalar."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def init(self) -> Any:
        return self._schedule.init()

    def update(self, state: Any, **extra_args: Any) -> Any:
        return self._schedule.update(state, **extra_args)

    def __call__(self, state: Any, **extra_args: Any) -> jax.Array:
        return jnp.asarray(self._schedule(state, **extra_args), jnp.float32)


def inject_learning_rate(
    make_optimizer: Callable[[Any], optax.GradientTransformation],
    learning_rate: jax.typing.ArrayLike | optax.Schedule | optax.schedules.StatefulSchedule,
) -> optax.GradientTransformationExtraArgs:
    """Builds an optimizer whose learning rate is a float32 hyperparameter in its state.

    Only the rate is injected. ``optax.inject_hyperparams(optax.adamw)`` injects every number, and so casts b2 and eps
    to the dtype of the parameters. In bfloat16 b2 becomes 1, in float16 eps becomes 0, and both end in NaN.

    Args:
      make_optimizer: A function that takes the rate as its first argument, such as ``optax.adamw``.
      learning_rate: A number, which ``set_learning_rate`` may change later; a schedule of the count; or a
        ``StatefulSchedule`` such as ``length_triggered_schedule``, whose extra arguments go to ``update``.

    Returns:
      A gradient transformation that passes extra arguments on. Its updates and its state keep their dtypes.

    Raises:
      ValueError: The number is not a finite, non-negative scalar, ``make_optimizer`` is no function, or
        ``learning_rate`` is a ``LengthTriggeredLR``, which works on the host.
    """
    if not callable(make_optimizer):
        raise ValueError(
            "make_optimizer must be a function of the learning rate, such as optax.adamw or lambda rate: "
            f"optax.adamw(rate, b2=0.95), got a value of type {type(make_optimizer).__name__}."
        )
    if isinstance(learning_rate, LengthTriggeredLR) or learning_rate is LengthTriggeredLR:
        raise ValueError(
            f"learning_rate must be a number or a schedule, got {learning_rate!r}, which is a controller of the host: "
            "inject a number, and write each result of its step with set_learning_rate."
        )

    if callable(learning_rate) and not isinstance(learning_rate, optax.schedules.StatefulSchedule):
        learning_rate = optax.schedules.WrappedSchedule(learning_rate)
    rate = _Float32Schedule(learning_rate) if callable(learning_rate) else float(_checked(learning_rate))

    def build(learning_rate: Any) -> optax.GradientTransformation:
        return make_optimizer(learning_rate)

    inner = optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)(learning_rate=rate)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        new_updates, new_state = inner.update(updates, state, params, **extra_args)
        # A float32 rate promotes 16-bit updates, and moments computed from them, to float32. A wrapper that chooses
        # between this update and none (lax.cond) needs equal dtypes. Promoted moments would also recompile the step.
        return _cast_like(new_updates, updates), _cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def set_learning_rate(opt_state: Any, value: Any) -> Any:
    """Writes every injected rate of an optimizer state.

    The new value is a strongly typed float32 with the sharding of the old one. So a jitted step that takes the state is
    neither traced nor compiled again.

    Args:
      opt_state: An optimizer state, however nested: chain, MultiSteps, masked, multi_transform. If the rate is a flax
        Variable, it is written in place.
      value: A finite, non-negative scalar: Python, numpy, jax, or a tracer (which is not checked).

    Returns:
      The state with the new rate. All other leaves are the same objects.

    Raises:
      ValueError: No rate is injected, a rate is scheduled (the schedule would silently override the value), or the
        value is out of range.
    """
    if not isinstance(value, jax.core.Tracer):
        value = _checked(value)
    old_rates: list[Any] = []

    def write(node: Any) -> Any:
        if not isinstance(node, _InjectState):
            return node
        node = node._replace(inner_state=_map_states(write, node.inner_state))
        if _RATE not in node.hyperparams:
            return node
        if _RATE in getattr(node, "hyperparams_states", {}):
            raise ValueError(
                "the learning rate of this optimizer is set by its schedule, which would override the value "
                f"{value}: build the optimizer with a number to set the rate from outside."
            )
        old = node.hyperparams[_RATE]
        old_rates.append(old)
        new = old if isinstance(old, _variable_types()) else _placed_like(old, value)
        return node._replace(hyperparams={**node.hyperparams, _RATE: new})

    new_state = _map_states(write, opt_state)
    if not old_rates:
        raise ValueError(_none_injected(opt_state))
    # Variables are written last, so that an error above leaves all of them unchanged.
    for old in old_rates:
        if isinstance(old, _variable_types()):
            old.set_value(_placed_like(old.get_value(), value))
    return new_state


def get_learning_rate(opt_state: Any) -> jax.Array:
    """Returns the rate in an optimizer state: of the last update, or before the first update the initial rate.

    A schedule may have set it. The optimizer state may be nested in any way. The rate is float32, shape (). If there
    are several rates, they must be equal. Under jit they are not compared, and the first one is returned.

    Raises:
      ValueError: No rate is injected, or several rates differ.
    """
    rates: list[Any] = []

    def read(node: Any) -> Any:
        if isinstance(node, _InjectState):
            if _RATE in node.hyperparams:
                rate = node.hyperparams[_RATE]
                rates.append(rate.get_value() if isinstance(rate, _variable_types()) else rate)
            _map_states(read, node.inner_state)
        return node

    _map_states(read, opt_state)
    if not rates:
        raise ValueError(_none_injected(opt_state))
    concrete = [np.asarray(rate, np.float32) for rate in rates if not isinstance(rate, jax.core.Tracer)]
    if any(not np.array_equal(rate, concrete[0], equal_nan=True) for rate in concrete):
        raise ValueError(f"several learning rates are injected and they differ: {[rate.tolist() for rate in concrete]}")
    return jnp.array(rates[0], jnp.float32)  # a copy, because the next step may donate the state


def _checked(value: Any) -> np.ndarray:
    rate = np.float32(np.nan)
    with np.errstate(over="ignore"), contextlib.suppress(ValueError):
        rate = np.float32(as_float("learning_rate", value))
    if not 0.0 <= rate < np.inf:
        raise ValueError(f"the learning rate must be a finite, non-negative scalar, got {value!r}.")
    return np.asarray(rate)


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), tree, like)


def _map_states(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies the function to every outermost injected state, and to the leaves."""
    stop = (*_InjectState, *_variable_types())
    return jax.tree.map(function, tree, is_leaf=lambda node: isinstance(node, stop))


def _variable_types() -> tuple[Any, ...]:
    # If flax was never imported, no node can be a Variable. Importing it here would make it a requirement.
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Variable,)


def _placed_like(old: Any, value: Any) -> jax.Array:
    if isinstance(value, jax.core.Tracer) or isinstance(old, jax.core.Tracer) or not getattr(old, "committed", False):
        # An uncommitted value must stay uncommitted: committing it would give the step another signature.
        return jnp.broadcast_to(jnp.asarray(value, jnp.float32), jnp.shape(old))
    filled = np.broadcast_to(value, old.shape)
    # Unlike jax.device_put, this needs no collective if the old value spans several processes.
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: filled[index])


def _none_injected(opt_state: Any) -> str:
    return (
        "this optimizer state holds no injected learning rate: build the optimizer with inject_learning_rate, "
        f"got a state of type {type(opt_state).__name__}."
    )
