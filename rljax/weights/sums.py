"""The checksum of a tensor. numpy, jax and torch compute the same one, and the checksums of its parts add up to it.

It is three sums (mod 2^32) over the mixed bits of a tensor's elements. The first two do not depend on the order of the
elements. So shards of tensor parallelism add up to the whole even if their places are unknown. In the third sum each
element is multiplied by a number that depends on its place in the whole tensor. It adds up over parts whose places are
known. Only this sum shows elements that changed places.

The trainer and the plugins inside servers run the same code. torch is imported only where a torch tensor is summed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rljax.weights.format import Checksum, TensorRegion

_PLACE_FACTOR = 0x9E3779B1
# The elements that are summed at a time. Their temporary arrays, 24 bytes an element, stay in a core's own cache. The
# block is not smaller, because threads run side by side only within numpy calls, and short calls wait for each other.
_BLOCK = 2**15
_PART = 2**22  # the elements of a vector that a thread sums at a time
_TORCH_BLOCK = 2**20  # the elements of a torch tensor that are summed at a time
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # the trainer publishes a tied head only as the embedding
_MOST_NAMES = 4  # the most names of tensors in a message


def mixed(bits: Any) -> tuple[Any, Any]:
    """Returns the first and the second mixed value of each element, int32. Both maps are one-to-one, and 0 stays 0.

    ``bits`` is an int32 array of numpy, jax or torch; the bit patterns of 16-bit elements are below 65,536.
    """
    first = _mix(bits, 0x7FEB352D, 0x846CA68B - 2**32)
    return first, _mix(first, 0x2C1B3C6D, 0x297A2D39)


def place_weights(places: Any) -> Any:
    """Returns an odd int32 number for each place; the first mixed value of its element is multiplied by this number.

    A place is the flat index in the whole tensor, row by row, mod 2^32. ``places`` is an int32 array of numpy, jax or
    torch.
    """
    x = places * (_PLACE_FACTOR - 2**32)
    x = _shifted_onto(x, 15, 0x1FFFF)
    x |= 1
    return x


def _mix(x: Any, multiplier: int, another: int) -> Any:
    x = _shifted_onto(x, 16, 0xFFFF)
    x *= multiplier
    x = _shifted_onto(x, 15, 0x1FFFF)
    x *= another
    return _shifted_onto(x, 16, 0xFFFF)


def _shifted_onto(x: Any, by: int, kept: int) -> Any:
    """Returns x ^ (x >> by) as a new array. ``kept`` masks off the sign bits that the arithmetic shift brings in."""
    shifted = x >> by
    shifted &= kept
    shifted ^= x
    return shifted


def bits_of(array: np.ndarray) -> np.ndarray:
    """Returns the bit patterns of an array's elements, without a copy: uint16 or uint32 of the same shape."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def array_checksum(array: np.ndarray) -> Checksum:
    """Returns the checksum of a whole tensor of 16-bit or 32-bit elements. Several threads sum a large one."""
    bits = bits_of(array).reshape(-1)
    size = len(bits)
    regions = [TensorRegion(0, 1, at, min(_PART, size - at), size) for at in range(0, max(1, size), _PART)]
    with ThreadPoolExecutor(min(len(regions), os.cpu_count() or 1)) as threads:
        parts = list(threads.map(lambda r: region_checksum(bits[r.column : r.column + r.width], r), regions))
    sums = ((part.first, part.second, part.placed) for part in parts)
    return Checksum.from_sums(size, *map(sum, zip(*sums, strict=True)))


def region_checksum(bits: np.ndarray, region: TensorRegion) -> Checksum:
    """Returns the checksum of a part of a tensor. The checksums of all parts of a tensor add up to the tensor's.

    ``bits`` are the bit patterns of the region's elements, row by row: a vector of uint16 or uint32.
    """
    rows, width = (1, region.size) if region.width == region.stride else (region.rows, region.width)
    matrix = bits.reshape(rows, width)
    rows_at_once = min(rows, max(1, _BLOCK // max(1, width)))
    row_places, column_places = np.arange(rows_at_once) * region.stride, np.arange(min(width, _BLOCK))
    steps = _times_factor(row_places[:, None] + column_places)
    sums = _RunningSums(steps.size)
    for row in range(0, rows, rows_at_once):
        for column in range(0, width, _BLOCK):
            block = matrix[row : row + rows_at_once, column : column + _BLOCK]
            first = region.first + row * region.stride + column
            sums.add(block, steps[: block.shape[0], : block.shape[1]], first)
    return Checksum.from_sums(bits.size, *sums.values)


def changed_checksum(before: Checksum, old: np.ndarray, new: np.ndarray, places: np.ndarray) -> Checksum:
    """Returns the checksum of a tensor, given its checksum ``before`` some elements changed.

    ``old`` and ``new`` are the bits of these elements, vectors of uint16 or uint32. ``places`` are their flat indices
    in the tensor, int64.
    """
    added, removed = (_RunningSums(min(places.size, _BLOCK)) for _ in range(2))
    for start in range(0, places.size, _BLOCK):
        some = slice(start, start + _BLOCK)
        here = _times_factor(places[some])
        added.add(new[some], here)
        removed.add(old[some], here)
    known = (before.first, before.second, before.placed)
    values = (sum(each) for each in zip(known, added.values, (-value for value in removed.values), strict=True))
    return Checksum.from_sums(before.count, *values)


class _RunningSums:
    """The three sums over blocks of elements. Memory is allocated once, because it costs more than the arithmetic."""

    def __init__(self, most: int) -> None:
        """Allocates the memory for blocks of up to ``most`` elements."""
        self.values = [0, 0, 0]  # the sums, which are correct mod 2^32
        self._patterns = np.empty(most, np.intp)
        self._mixed, self._weights, self._spare = (np.empty(most, np.uint32) for _ in range(3))

    def add(self, bits: np.ndarray, products: np.ndarray, start: int = 0) -> None:
        """Adds a block of elements, whose bits are uint16 or uint32.

        ``products`` are the places of the elements, counted from ``start``, times ``_PLACE_FACTOR`` (uint32).
        """
        if bits.dtype == np.uint16:
            patterns, first = (each[: bits.size].reshape(bits.shape) for each in (self._patterns, self._mixed))
            np.copyto(patterns, bits)
            first_table, second_table = _tables()
            # No pattern lies outside a table, so the mode does not matter. "wrap" is numpy's fastest.
            second = _total(second_table.take(patterns, mode="wrap", out=first))
            first_table.take(patterns, mode="wrap", out=first)
        else:
            first, other = (each.view(np.uint32) for each in mixed(bits.view(np.int32)))
            second = _total(other)
        total = _total(first)
        # The next lines compute ``place_weights`` in the memory that is allocated already.
        weights, shifted = (each[: products.size].reshape(products.shape) for each in (self._weights, self._spare))
        np.add(products, np.uint32(start * _PLACE_FACTOR % 2**32), out=weights)
        np.right_shift(weights, 15, out=shifted)
        np.bitwise_xor(weights, shifted, out=weights)
        np.bitwise_or(weights, 1, out=weights)
        np.multiply(first, weights, out=first)
        self.values = [sum(both) for both in zip(self.values, (total, second, _total(first)), strict=True)]


def _times_factor(places: np.ndarray) -> np.ndarray:
    products = places.astype(np.uint32)
    return np.multiply(products, np.uint32(_PLACE_FACTOR), out=products)


def _total(values: np.ndarray) -> int:
    return int(values.sum(dtype=np.uint32))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the two mixed values of each 16-bit pattern."""
    first, second = mixed(np.arange(2**16, dtype=np.int32))
    return first.view(np.uint32), second.view(np.uint32)


def tensor_checksum(tensor: Any) -> Checksum:
    """Returns the checksum of a torch tensor of 16-bit or 32-bit elements, on any device, in little extra memory."""
    import torch

    bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    return array_checksum(bits.numpy()) if bits.device.type == "cpu" else device_checksum(bits)


def device_checksum(bits: Any) -> Checksum:
    """Returns the checksum of a whole tensor, whose bits are a torch vector of int16 or int32 on any device."""
    import torch

    sums = torch.zeros(3, dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(_TORCH_BLOCK)):
        words = part.to(torch.int32) & 0xFFFF if bits.element_size() == 2 else part
        first, second = mixed(words)
        start = number * _TORCH_BLOCK
        places = torch.arange(start, start + len(part), device=part.device).to(torch.int32)
        placed = first * place_weights(places)
        sums += torch.stack([values.sum(dtype=torch.int64) for values in (first, second, placed)])
    return Checksum.from_sums(len(bits), *sums.tolist())


def as_published(tensor: Any, dtype: Any) -> Any:
    """Converts a torch tensor to ``dtype`` if that changes no value, and otherwise returns it as it is.

    A server may hold a tensor in float32 that was published in 16 bits. vLLM does so with the bias of a linear layer on
    a CPU with AMX. A tensor with a value that ``dtype`` cannot represent must keep another checksum than the trainer's.
    """
    import torch

    if tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def differences(expected: Mapping[str, Checksum], workers: Sequence[Mapping[str, Checksum | None]]) -> list[str]:
    """Returns the name of each tensor whose bits differ, with the difference in brackets.

    The list is empty if the workers of a server together hold ``expected``. A tensor may be whole on several workers,
    or in parts whose counts add up to the whole. A part may be on several workers if every part is on equally many, as
    key-value heads are if there are more workers than heads. A worker has None for a tensor that it did not load.
    """
    found = []
    for name in dict.fromkeys([*expected, *(name for worker in workers for name in worker)]):
        wanted = expected.get(name) or expected.get(_TIED.get(name, ""))
        parts = [worker[name] for worker in workers if name in worker]
        if wanted is None:
            found.append(f"{name} (the trainer has none)")
        elif not parts or None in parts:
            found.append(f"{name} (not loaded)")
        elif how := _difference(wanted, [part for part in parts if part is not None]):
            found.append(f"{name} ({how})")
    return found


def describe_differences(found: Sequence[str]) -> str:
    """Returns a text with the number of :func:`differences`, and the first few of them."""
    return f"{len(found)} {'tensors differ' if found[1:] else 'tensor differs'}: {named_few(found)}"


def named_few(names: Sequence[str]) -> str:
    """Returns a text with the first few names of tensors, and the number of names that are left out."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _difference(wanted: Checksum, parts: Sequence[Checksum]) -> str:
    if all(part.count == wanted.count for part in parts):
        return "" if all(part == wanted for part in parts) else "other bits"
    count = sum(part.count for part in parts)
    if count % wanted.count:
        return f"{count} elements instead of {wanted.count}"
    copies = count // wanted.count
    # The trainer does not know which places a worker's part has, so the third sums are not compared here.
    together = Checksum.from_sums(count, sum(part.first for part in parts), sum(part.second for part in parts), 0)
    same = together == Checksum.from_sums(count, copies * wanted.first, copies * wanted.second, 0)
    return "" if same else "other bits"
