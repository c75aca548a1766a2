"""A recorder of the values inside a policy's forward, which can also put other values in their places.

It acts while a function is traced, and only inside ``recording``. Elsewhere ``tap`` returns its argument, so it does
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
"""The prefix of the values inside blocks, which have a leading layers axis outside of the scan over blocks."""
Values = dict[str, Array]


class Substitutes(NamedTuple):
    """The values to put in the places of computed ones, by name. Flags switch each on or off without a compilation."""

    values: Values
    flags: dict[str, Bool[Array, "*l"]]  # whether the value of this name, in each layer if it is a block's, is put in


class TapRecorder(NamedTuple):
    """The values that a forward has recorded so far, and the substitutes for computed ones."""

    recorded: Values
    substitutes: Substitutes


_active: contextvars.ContextVar[TapRecorder | None] = contextvars.ContextVar("recorder", default=None)
_NONE = Substitutes({}, {})


@contextlib.contextmanager
def recording(substitutes: Substitutes = _NONE) -> Iterator[Values]:
    """Records every ``tap`` inside the context. Yields the dictionary that receives the values by name."""
    recorder = TapRecorder({}, substitutes)
    token = _active.set(recorder)
    try:
        yield recorder.recorded
    finally:
        _active.reset(token)


def tap(name: str, x: Array) -> Array:
    """Records ``x``, and returns it or its substitute, in the shape and dtype of ``x``."""
    recorder = _active.get()
    if recorder is None:
        return x
    recorder.recorded[name] = x
    if name not in recorder.substitutes.values:
        return x
    value = recorder.substitutes.values[name].astype(x.dtype).reshape(x.shape)
    return jnp.where(recorder.substitutes.flags[name], value, x)


def substitutes_of_layers() -> Substitutes:
    """Returns the substitutes of the blocks' values, without the prefix of their names; none outside of a context."""
    recorder = _active.get()
    if recorder is None:
        return _NONE
    prefix = f"{LAYERS}/"
    values, flags = (
        {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
        for arrays in recorder.substitutes
    )
    return Substitutes(values, flags)


@contextlib.contextmanager
def recording_layer(substitutes: Substitutes) -> Iterator[Values]:
    """Records one block inside the body of the scan. Outside of ``recording`` nothing is recorded."""
    if _active.get() is None:
        yield {}
        return
    with recording(substitutes) as recorded:
        yield recorded


def record_layers(stacked: Values) -> None:
    """Records the values of all blocks, which have a leading layers axis. It does nothing outside of ``recording``."""
    recorder = _active.get()
    if recorder is not None:
        recorder.recorded.update({f"{LAYERS}/{name}": x for name, x in stacked.items()})
