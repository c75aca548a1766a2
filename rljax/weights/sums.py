"""Checksums of tensors on the host, of a whole one, of a part of it, and of what a delta changes."""

from __future__ import annotations

import functools

import numpy as np

from rljax.weights.checksum import PLACE_FACTOR, Checksum, checksum, mixed
from rljax.weights.region import Region

# Elements at a time: what is made of them, 24 bytes each, stays in a core's own cache. Other threads run only within a
# call of numpy: with shorter ones they wait for each other.
_BLOCK = 2**15


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
    rows_at_once = min(rows, max(1, _BLOCK // max(1, width)))
    row_places, column_places = np.arange(rows_at_once) * region.stride, np.arange(min(width, _BLOCK))
    steps = _times_factor((row_places[:, None] + column_places).astype(np.uint32))
    sums = _Sums(steps.size)
    for row in range(0, rows, rows_at_once):
        for column in range(0, width, _BLOCK):
            block = matrix[row : row + rows_at_once, column : column + _BLOCK]
            first = region.first + row * region.stride + column
            sums.add(block, steps[: block.shape[0], : block.shape[1]], first)
    return checksum(bits.size, *sums.values)


def changed_checksum(before: Checksum, old: np.ndarray, new: np.ndarray, places: np.ndarray) -> Checksum:
    """Of a tensor of which ``before`` is the checksum, once the bits ``old`` at ``places`` (int64) became ``new``."""
    added, removed = (_Sums(min(places.size, _BLOCK)) for _ in range(2))
    for start in range(0, places.size, _BLOCK):
        some = slice(start, start + _BLOCK)
        here = _times_factor(places[some].astype(np.uint32))
        added.add(new[some], here)
        removed.add(old[some], here)
    known = (before.first, before.second, before.placed)
    values = (sum(each) for each in zip(known, added.values, (-value for value in removed.values), strict=True))
    return checksum(before.count, *values)


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bit patterns of an array's elements, without a copy: uint16 or uint32 of its shape."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


class _Sums:
    """Adds up blocks of elements, in memory that is taken once: new memory costs more than the arithmetic.

    Attributes:
      values: the three sums so far, right mod 2^32.
    """

    def __init__(self, most: int) -> None:
        """``most``: elements of the largest block."""
        self.values = [0, 0, 0]
        self._patterns = np.empty(most, np.intp)
        self._mixed, self._weights, self._spare = (np.empty(most, np.uint32) for _ in range(3))

    def add(self, bits: np.ndarray, products: np.ndarray, start: int = 0) -> None:
        """Adds a block.

        Args:
          bits: elements, uint16 or uint32.
          products: of their places in the tensor and ``PLACE_FACTOR``, counted from ``start`` (uint32).
          start: a place.
        """
        if bits.dtype == np.uint16:
            patterns, first = (each[: bits.size].reshape(bits.shape) for each in (self._patterns, self._mixed))
            np.copyto(patterns, bits)
            first_table, second_table = _tables()
            # No pattern is beyond a table; of the ways to treat one that is, this one is the fastest.
            second = _total(second_table.take(patterns, mode="wrap", out=first))
            first_table.take(patterns, mode="wrap", out=first)
        else:
            first, other = (each.view(np.uint32) for each in mixed(bits.view(np.int32)))
            second = _total(other)
        total = _total(first)
        np.multiply(first, self._place_weights(products, start), out=first)
        self.values = [sum(both) for both in zip(self.values, (total, second, _total(first)), strict=True)]

    def _place_weights(self, products: np.ndarray, start: int) -> np.ndarray:
        """As ``rljax.weights.checksum.place_weights``."""
        weights, shifted = (each[: products.size].reshape(products.shape) for each in (self._weights, self._spare))
        np.add(products, np.uint32(start * PLACE_FACTOR % 2**32), out=weights)
        np.right_shift(weights, 15, out=shifted)
        np.bitwise_xor(weights, shifted, out=weights)
        return np.bitwise_or(weights, 1, out=weights)


def _times_factor(places: np.ndarray) -> np.ndarray:
    """In the memory of ``places``, uint32."""
    return np.multiply(places, np.uint32(PLACE_FACTOR), out=places)


def _total(values: np.ndarray) -> int:
    return int(values.sum(dtype=np.uint32))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The two mixed values of each pattern of 16 bits."""
    first, second = mixed(np.arange(2**16, dtype=np.int32))
    return first.view(np.uint32), second.view(np.uint32)
