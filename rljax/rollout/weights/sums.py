"""Checksums of tensors on the host, of a whole one, of a part of it, and of what a delta changes."""

from __future__ import annotations

import functools

import numpy as np

from rljax.checksum import Checksum, checksum, mixed, place_weights
from rljax.rollout.weights.region import Region

_BLOCK = 2**15  # elements at a time, which stay in a processor's cache


def array_checksum(array: np.ndarray) -> Checksum:
    """Of a whole tensor of 16-bit or 32-bit elements."""
    return region_checksum(bits_of(array).reshape(-1), Region.whole(array.shape))


def region_checksum(bits: np.ndarray, region: Region) -> Checksum:
    """Of the elements of ``region``; those of a tensor's regions, each element in one of them, add up to the tensor's.

    Args:
      bits: uint16 or uint32, as many as the region has elements, row by row.
      region: where in the tensor they are.
    """
    rows, width = (1, region.size) if region.width == region.stride else (region.rows, region.width)
    matrix = bits.reshape(rows, width)
    rows_at_once = max(1, _BLOCK // max(1, width))
    count_rows, count_columns = (np.arange(n, dtype=np.int32) for n in (rows_at_once, min(width, _BLOCK)))
    steps = (count_rows * _int32(region.stride))[:, None] + count_columns
    sums = np.zeros(3, np.int64)
    for row in range(0, rows, rows_at_once):
        for column in range(0, width, _BLOCK):
            block = matrix[row : row + rows_at_once, column : column + _BLOCK]
            first = _int32(region.first + row * region.stride + column)
            sums += _sums(block, steps[: block.shape[0], : block.shape[1]] + first)
    return checksum(bits.size, *sums.tolist())


def changed_checksum(before: Checksum, old: np.ndarray, new: np.ndarray, places: np.ndarray) -> Checksum:
    """Of a tensor of which ``before`` is the checksum, once the bits ``old`` at ``places`` (int64) became ``new``."""
    places = places.astype(np.int32)
    first, second, placed = (_sums(new, places) - _sums(old, places)).tolist()
    return checksum(before.count, before.first + first, before.second + second, before.placed + placed)


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bit patterns of an array's elements, without a copy: uint16 or uint32 of its shape."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _sums(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The three sums of elements at places (int32, mod 2^32): int64 [3], right mod 2^32."""
    if bits.dtype == np.uint16:
        first, second = (table.take(bits) for table in _tables())
    else:
        first, second = mixed(bits.view(np.int32))
    placed = first * place_weights(places)
    return np.array([values.sum(dtype=np.int32) for values in (first, second, placed)], np.int64)


def _int32(number: int) -> np.int32:
    """What is left of ``number`` mod 2^32."""
    return np.uint32(number % 2**32).view(np.int32)


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The two mixed values of each pattern of 16 bits."""
    return mixed(np.arange(2**16, dtype=np.int32))
