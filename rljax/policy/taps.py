"""A recorder of the values inside a policy's forward, which can also replace them by other values.

It works while a function is traced, and only inside ``recording``. Elsewhere ``tap`` returns its argument, so it does
not change a program that does not record.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

LAYERS = "layers"
"""The prefix of the names of values inside blocks. Outside of the scan these have a leading axis over the periods."""
Values = dict[str, Array]


class Substitutes(NamedTuple):
    """The values that replace computed ones, by name. Flags switch each value on or off without a compilation."""

    values: Values
    flags: dict[str, Bool[Array, "*l"]]  # whether to use the value; in a stack of blocks, one flag for each block


# The values that a forward has recorded so far, and the substitutes for computed ones.
_active: contextvars.ContextVar[tuple[Values, Substitutes] | None] = contextvars.ContextVar("recorder", default=None)
_NONE = Substitutes({}, {})


@contextlib.contextmanager
def recording(substitutes: Substitutes = _NONE) -> Iterator[Values]:
    """Records every ``tap`` inside the context. Yields the dictionary that receives the values by name."""
    recorded: Values = {}
    token = _active.set((recorded, substitutes))
    try:
        yield recorded
    finally:
        _active.reset(token)


def is_recording() -> bool:
    """Returns whether the calls of ``tap`` record values."""
    return _active.get() is not None


def tap(name: str, x: Array) -> Array:
    """Records ``x``, and returns it or its substitute, in the shape and dtype of ``x``."""
    recorder = _active.get()
    if recorder is None:
        return x
    recorded, substitutes = recorder
    recorded[name] = x
    if name not in substitutes.values:
        return x
    return jnp.where(substitutes.flags[name], substitutes.values[name].astype(x.dtype).reshape(x.shape), x)


def stack_paths(period: int) -> list[tuple[str, ...]]:
    """Returns the paths of the stacks of blocks, in the pytree of parameters and as prefixes of recorded values.

    A period has ``period`` blocks. For each of them there is one stack over all periods.
    """
    return [(LAYERS,)] if period == 1 else [(LAYERS, str(stack)) for stack in range(period)]


def substitutes_of_stack(stack: tuple[str, ...]) -> Substitutes:
    """Returns the substitutes of a stack's values, without the prefix of their names; none outside ``recording``."""
    recorder = _active.get()
    if recorder is None:
        return _NONE
    (_, substitutes), prefix = recorder, "/".join(stack) + "/"
    values, flags = (
        {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
        for arrays in substitutes
    )
    return Substitutes(values, flags)


def recording_layer(substitutes: Substitutes) -> contextlib.AbstractContextManager[Values]:
    """Returns a context that records one block in the body of the scan. Outside ``recording`` it records nothing."""
    return contextlib.nullcontext({}) if _active.get() is None else recording(substitutes)


def record_stack(stack: tuple[str, ...], stacked: Values) -> None:
    """Records the values of a stack of blocks, with an axis over the periods. Outside ``recording`` it does nothing."""
    recorder = _active.get()
    if recorder is not None:
        recorded, _ = recorder
        recorded.update({"/".join((*stack, name)): x for name, x in stacked.items()})
