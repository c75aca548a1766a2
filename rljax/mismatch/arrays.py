"""Helpers for code that serves both numpy arrays (float64 on the host) and jax arrays (float32 on the device)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ArrayLike = Any
"""A numpy or jax array. A call computes on the host in float64 if all its arrays are numpy, else on the device."""


def namespace_of(*arrays: ArrayLike) -> ModuleType:
    """Returns jax.numpy if any argument is a jax array or tracer, else numpy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def as_float(xp: ModuleType, array: ArrayLike) -> Any:
    """Casts the array: to float64 on the host, to at least float32 on the device. The result carries no gradient."""
    if xp is np:
        return np.asarray(array, np.float64)
    array = jnp.asarray(array)
    return jax.lax.stop_gradient(array.astype(jnp.promote_types(array.dtype, jnp.float32)))


def check_shape(name: str, array: ArrayLike, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless ``array`` has the ``expected`` shape."""
    if np.shape(array) != expected:
        raise ValueError(f"{name} must have the shape of trainer_logprobs {expected}, got {np.shape(array)}")


def count(xp: ModuleType, flags: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """Counts the flags that are set: int64 on the host, int32 on the device."""
    return xp.sum(flags, axis=axis, dtype=np.int64 if xp is np else np.int32)


def scalars(xp: ModuleType, values: dict[str, Any]) -> dict[str, Any]:
    """Converts the values to Python floats on the host. On the device they are returned unchanged."""
    return {name: float(value) for name, value in values.items()} if xp is np else values
