"""A learning rate that lives in the optimizer state, and how to read and write it without recompiling."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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

    Only the rate is injected. Injecting every number, as ``optax.inject_hyperparams(optax.adamw)`` does, casts b2 and
    eps to the dtype of the parameters: in bfloat16 b2 becomes 1, in float16 eps becomes 0, and both end in NaN.

    Args:
      make_optimizer: takes the rate as its first argument; ``optax.adamw`` itself will do.
      learning_rate: a number, which ``set_learning_rate`` may change later; or a schedule of the count; or a
        ``StatefulSchedule`` such as ``length_triggered_schedule``, whose extra arguments go to ``update``.

    Returns:
      A gradient transformation that passes extra arguments on. Its updates and its state keep their dtypes.

    Raises:
      ValueError: a number that is no finite, non-negative scalar.
    """

    rate: Any
    if isinstance(learning_rate, optax.schedules.StatefulSchedule):
        rate = _Float32Schedule(learning_rate)
    elif callable(learning_rate):
        schedule = learning_rate

        def rate(count: Any) -> jax.Array:
            return jnp.asarray(schedule(count), jnp.float32)

    else:
        rate = float(_checked(learning_rate))

    def build(learning_rate: Any) -> optax.GradientTransformation:
        return make_optimizer(learning_rate)

    inner = optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)(learning_rate=rate)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        new_updates, new_state = inner.update(updates, state, params, **extra_args)
        # A float32 rate lifts 16-bit updates, and moments taken after it, to float32. Either would break a wrapper
        # that picks between this update and none (lax.cond), and the latter would compile the step a second time.
        return _cast_like(new_updates, updates), _cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def set_learning_rate(opt_state: Any, value: Any) -> Any:
    """Writes every injected rate of an optimizer state.

    The value goes in as a strongly typed float32 with the sharding of the old one, so a jitted step that takes the
    state is neither traced nor compiled again.

    Args:
      opt_state: an optimizer state, however nested: chain, MultiSteps, masked, multi_transform. A flax Variable in
        the place of the rate is written in place.
      value: a finite, non-negative scalar: Python, numpy, jax, or a tracer (which is not checked).

    Returns:
      The state with the new rate; the other leaves are the same objects.

    Raises:
      ValueError: no rate is injected, or one is scheduled (the schedule would silently override the value), or the
        value is out of range.
    """
    if not isinstance(value, jax.core.Tracer):
        value = _checked(value)
    found: list[Any] = []

    def write(node: Any) -> Any:
        if not isinstance(node, _InjectState):
            return node
        node = node._replace(inner_state=_map_states(write, node.inner_state))
        if _RATE not in node.hyperparams:
            return node
        if _is_scheduled(node):
            raise ValueError(
                "the learning rate of this optimizer is set by its schedule, which would override the value "
                f"{value}: build the optimizer with a number to set the rate from outside."
            )
        old = node.hyperparams[_RATE]
        found.append(old)
        new = old if isinstance(old, _variable_types()) else _placed_like(old, value)
        return node._replace(hyperparams={**node.hyperparams, _RATE: new})

    new_state = _map_states(write, opt_state)
    if not found:
        raise ValueError(_none_injected(opt_state))
    # Variables last, so that an error above leaves none of them written.
    for old in found:
        if isinstance(old, _variable_types()):
            old.set_value(_placed_like(old.get_value(), value))
    return new_state


def get_learning_rate(opt_state: Any) -> jax.Array:
    """Reads the injected rate, a scheduled one included: the rate of the last update, the initial one before it.

    Args:
      opt_state: an optimizer state, however nested.

    Returns:
      The rate, float32, with the shape it has in the state: ().

    Raises:
      ValueError: no rate is injected, or several differ. Tracers cannot be compared: of several the first is returned.
    """
    rates: list[Any] = []

    def read(node: Any) -> Any:
        if isinstance(node, _InjectState):
            if _RATE in node.hyperparams:
                rates.append(_unwrapped(node.hyperparams[_RATE]))
            _map_states(read, node.inner_state)
        return node

    _map_states(read, opt_state)
    if not rates:
        raise ValueError(_none_injected(opt_state))
    concrete = [np.asarray(rate, np.float32) for rate in rates if not isinstance(rate, jax.core.Tracer)]
    if any(not np.array_equal(rate, concrete[0], equal_nan=True) for rate in concrete):
        raise ValueError(f"several learning rates are injected and they differ: {[rate.tolist() for rate in concrete]}")
    return jnp.asarray(rates[0], jnp.float32)


def _checked(value: Any) -> np.ndarray:
    rate = np.asarray(value, np.float32)
    if rate.shape or not 0.0 <= rate < np.inf:
        raise ValueError(f"the learning rate must be a finite, non-negative scalar, got {value!r}.")
    return rate


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype), tree, like)


def _map_states(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies the function to every injected state that no other contains, and to the leaves."""
    stop = (*_InjectState, *_variable_types())
    return jax.tree.map(function, tree, is_leaf=lambda node: isinstance(node, stop))


def _is_scheduled(state: Any) -> bool:
    return _RATE in getattr(state, "hyperparams_states", {})


def _variable_types() -> tuple[Any, ...]:
    # Where flax was never imported no node can be a Variable, and importing it here would make it a requirement.
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Variable,)


def _unwrapped(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, _variable_types()) else leaf


def _placed_like(old: Any, value: Any) -> jax.Array:
    if isinstance(value, jax.core.Tracer) or isinstance(old, jax.core.Tracer) or not getattr(old, "committed", False):
        # An uncommitted value has to stay so: committing it would give the step another signature.
        return jnp.broadcast_to(jnp.asarray(value, jnp.float32), jnp.shape(old))
    filled = np.broadcast_to(value, old.shape)
    # Needs no collective where the old value spans several processes, unlike jax.device_put.
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: filled[index])


def _none_injected(opt_state: Any) -> str:
    return (
        "this optimizer state holds no injected learning rate: build the optimizer with inject_learning_rate, "
        f"got a state of type {type(opt_state).__name__}."
    )
