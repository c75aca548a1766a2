"""A recorder of the values inside a policy's forward, which can also put given values in their places.

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


class Given(NamedTuple):
    """The values to put in the places of computed ones, by name. Flags switch each on or off without a compilation."""

    values: Values
    flags: dict[str, Bool[Array, "*l"]]  # whether the value of this name, in each layer if it is a block's, is put in


class Recorder(NamedTuple):
    """The values that a forward has recorded so far, and the values to put in place of computed ones."""

    recorded: Values
    given: Given


_active: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)
_NOTHING = Given({}, {})


@contextlib.contextmanager
def recording(given: Given = _NOTHING) -> Iterator[Values]:
    """Records every ``tap`` inside the context. Yields the dictionary that receives the values by name."""
    recorder = Recorder({}, given)
    token = _active.set(recorder)
    try:
        yield recorder.recorded
    finally:
        _active.reset(token)


def tap(name: str, x: Array) -> Array:
    """Records ``x``, and returns it or the value that is given in its place, in the shape and dtype of ``x``."""
    recorder = _active.get()
    if recorder is None:
        return x
    recorder.recorded[name] = x
    if name not in recorder.given.values:
        return x
    value = recorder.given.values[name].astype(x.dtype).reshape(x.shape)
    return jnp.where(recorder.given.flags[name], value, x)


def given_to_layers() -> Given:
    """Returns the values that are given to blocks, without the prefix of their names. It is empty outside a context."""
    recorder = _active.get()
    if recorder is None:
        return _NOTHING
    prefix = f"{LAYERS}/"
    values, flags = (
        {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
        for arrays in recorder.given
    )
    return Given(values, flags)


@contextlib.contextmanager
def recording_layer(given: Given) -> Iterator[Values]:
    """Records one block inside the body of the scan. Outside of ``recording`` nothing is recorded."""
    if _active.get() is None:
        yield {}
        return
    with recording(given) as recorded:
        yield recorded


def record_layers(stacked: Values) -> None:
    """Records the values of all blocks, which have a leading layers axis. It does nothing outside of ``recording``."""
    recorder = _active.get()
    if recorder is not None:
        recorder.recorded.update({f"{LAYERS}/{name}": x for name, x in stacked.items()})
