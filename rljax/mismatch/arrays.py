"""Arrays that may be numpy's (float64 on the host) or jax's (float32 on the device): one text serves both."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ArrayLike = Any
"""A numpy or a jax array; in one call either all are numpy (float64 on the host) or at least one is jax."""


def namespace_of(*arrays: ArrayLike) -> ModuleType:
    """jax.numpy when any argument is a jax array (or tracer), else numpy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def as_float(xp: ModuleType, array: ArrayLike) -> Any:
    """The array in float64 on the host; on the device in float32, or float64 when it is that already; no gradient."""
    if xp is np:
        return np.asarray(array, np.float64)
    array = jnp.asarray(array)
    return jax.lax.stop_gradient(array.astype(jnp.promote_types(array.dtype, jnp.float32)))


def check_shape(name: str, array: ArrayLike, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless ``array`` has the ``expected`` shape."""
    if np.shape(array) != expected:
        raise ValueError(f"{name} must have the shape of trainer_logprobs {expected}, got {np.shape(array)}")


def count(xp: ModuleType, flags: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """How many flags are set: int64 on the host, int32 on the device."""
    return xp.sum(flags, axis=axis, dtype=np.int64 if xp is np else np.int32)


def scalars(xp: ModuleType, values: dict[str, Any]) -> dict[str, Any]:
    """The values as Python floats on the host; on the device as they are."""
    return {name: float(value) for name, value in values.items()} if xp is np else values
