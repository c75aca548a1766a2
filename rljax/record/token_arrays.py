"""Converts lists of token values to arrays, and vectors to the rows of a matrix."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def to_int32(name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Converts token ids to int32. Raises ValueError, with ``name`` in its message, if they do not fit."""
    wide = _to_array(f"{name}: token ids", ids)
    if wide.dtype.kind not in "iu" or (wide.size and not 0 <= wide.min() <= wide.max() < 2**31):
        raise ValueError(f"{name}: token ids must be integers in [0, 2**31), got {wide.dtype} {wide[:4]}")
    return wide.astype(np.int32)


def to_mask(name: str, mask: Sequence[bool] | np.ndarray) -> np.ndarray:
    """Converts a response mask to bool. Raises ValueError, with ``name`` in its message, if it has other values."""
    array = _to_array(f"{name}: response_mask", mask)
    is_bool = array.dtype.kind == "b"
    if array.size and not is_bool and (array.dtype.kind not in "iuf" or not np.isin(array, (0, 1)).all()):
        raise ValueError(f"{name}: response_mask must be true or false at each token, got {array[:4]}")
    return array.astype(bool)


def to_float32(what: str, values: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Converts values to float32; None becomes NaN, and text such as "-inf" becomes its number.

    Raises ValueError, with ``what`` in its message, if a value is not a number.
    """
    array = _to_array(what, values)
    if array.dtype.kind in "OU":
        with contextlib.suppress(ValueError):
            numbers = [math.nan if value is None else value for value in values]
            array = _to_array(what, [float(value) if isinstance(value, str) else value for value in numbers])
    if array.size and array.dtype.kind not in "iuf":
        raise ValueError(f"{what} must be numbers, got {array.dtype} {array[:4]}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _to_array(what: str, values: Any) -> np.ndarray:
    """Converts values to a vector. Raises ValueError if they are not a plain list."""
    with contextlib.suppress(ValueError, OverflowError):  # lists of several lengths in a list
        array = np.asarray(values)
        if array.ndim == 1:
            return array
    raise ValueError(f"{what} must be a list, got {values!r:.60}")


def to_rows(vectors: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Returns vectors of one dtype as the rows of a matrix [n, longest], with ``fill`` after the end of each vector."""
    width = max(map(len, vectors), default=0)
    rows = np.full((len(vectors), width), fill, vectors[0].dtype if len(vectors) else None)
    for row, vector in zip(rows, vectors, strict=True):
        row[: len(vector)] = vector
    return rows
