"""Checks of arguments: each function raises ValueError with the value that came and what was expected."""

import operator
from typing import Any

import numpy as np

_ROUNDING = 1e-6  # a share that was averaged in float32 may be above 1 by this much


class WrongTypeError(ValueError, TypeError):
    """An error of a value of the wrong type. It is a ValueError, as all errors here, and a TypeError, as in Python."""


def as_float(name: str, value: Any) -> float:
    """Returns a number as a Python float: a number of Python, or a scalar of numpy, jax or torch."""
    try:
        if _is_flag(value) or isinstance(value, str | bytes | bytearray) or np.ndim(value) != 0:
            raise TypeError("not a number")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongTypeError(
            f"{name} must be a scalar, got {name} = {_shown(value)}, a {type(value).__name__}."
        ) from error


def as_int(name: str, value: Any, least: int = 0) -> int:
    """Returns a whole number of any integer type as an int. It must be at least ``least``."""
    try:
        if _is_flag(value):
            raise TypeError("not a number")
        number = operator.index(value)
    except (TypeError, ValueError) as error:
        raise WrongTypeError(f"{name} must be a whole number, got {name} = {_shown(value)}.") from error
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {name} = {number}.")
    return number


def as_step(name: str, value: Any) -> int | None:
    """Returns a 1-based step, or None if ``value`` is None."""
    return None if value is None else as_int(name, value, 1)


def as_share(name: str, value: Any) -> float:
    """Returns a share in [0, 1], but for rounding; NaN where ``value`` is None or NaN, which means unknown."""
    share = float("nan") if value is None else as_float(name, value)
    if share < -_ROUNDING or share > 1.0 + _ROUNDING:
        raise ValueError(f"{name} must be in [0, 1], or None, got {name} = {_shown(value)}.")
    return share


def check_kind(name: str, value: Any, kind: type, advice: str = "") -> None:
    """Raises ValueError unless ``value`` is an instance of ``kind``. The message ends with ``advice``."""
    if not isinstance(value, kind):
        raise WrongTypeError(f"{name} must be a {kind.__name__}, got {name} = {_shown(value)}{advice}.")


def check_keys(state: Any, keys: set[str]) -> None:
    """Raises ValueError unless a state is a dictionary with exactly these keys."""
    if not isinstance(state, dict):
        raise ValueError(f"the state must be a dictionary with the keys {sorted(keys)}, got {_shown(state)}.")
    if set(state) != keys:
        raise ValueError(f"the state must have the keys {sorted(keys)}, got {sorted(state, key=str)}.")


def _is_flag(value: Any) -> bool:
    """Returns whether ``value`` is a boolean of Python, or of a library whose values have a dtype."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _shown(value: Any) -> str:
    return f"{value!r:.100}"
