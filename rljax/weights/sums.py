"""The checksum of a tensor. numpy, jax and torch compute the same one, and the checksums of its parts add up to it.

It is three sums (mod 2^32) over the mixed bits of a tensor's elements. The first two do not depend on the order of the
elements. So shards of tensor parallelism add up to the whole even if their places are unknown. In the third sum each
element is multiplied by a number that depends on its place in the whole tensor. It adds up over parts whose places are
known. Only this sum shows elements that changed places.

The trainer and the plugins inside servers run the same code. numba compiles it for arrays in the host's memory. Both
numba and torch are imported only where something is summed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rljax.weights.format import Checksum, TensorRegion

_PLACE_FACTOR = 0x9E3779B1
_WORD = 0xFFFFFFFF  # the bits of a sum that count
_PART = 2**22  # the elements of a vector that a thread sums at a time
_TORCH_BLOCK = 2**20  # the elements of a torch tensor that are summed at a time
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # the trainer publishes a tied head only as the embedding
_MOST_NAMES = 4  # the most names of tensors in a message


def mixed(bits: Any) -> tuple[Any, Any]:
    """Returns the first and the second mixed value of each element, int32. Both maps are one-to-one, and 0 stays 0.

    ``bits`` is an int32 array of numpy, jax or torch; the bit patterns of 16-bit elements are below 65,536. numba
    compiles the same lines for single integers, of which the low 32 bits count.
    """
    first = _mix(bits, 0x7FEB352D, 0x846CA68B - 2**32)
    return first, _mix(first, 0x2C1B3C6D, 0x297A2D39)


def place_weights(places: Any) -> Any:
    """Returns an odd int32 number for each place, by which the third sum multiplies the first mixed value there.

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
    """Returns the bits of an array's elements, uint16 or uint32 of the same shape. A contiguous array is not copied."""
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
    return Checksum.from_sums(bits.size, *_compiled()[0](bits.reshape(rows, width), region.first, region.stride))


def changed_checksum(before: Checksum, old: np.ndarray, new: np.ndarray, places: np.ndarray) -> Checksum:
    """Returns the checksum of a tensor, given its checksum ``before`` some elements changed.

    ``old`` and ``new`` are the bits of these elements, vectors of uint16 or uint32. ``places`` are their flat indices
    in the tensor, int64.
    """
    known = (before.first, before.second, before.placed)
    added, removed = (_compiled()[1](bits, places) for bits in (new, old))
    return Checksum.from_sums(before.count, *(k + a - r for k, a, r in zip(known, added, removed, strict=True)))


@functools.cache
def _compiled() -> tuple[Callable[..., tuple[int, int, int]], Callable[..., tuple[int, int, int]]]:
    """Returns ``_matrix_sums`` and ``_vector_sums``, compiled by numba.

    numba is imported here, because vLLM 0.32 cannot start on a CPU after it was imported.
    """
    from numba import extending, njit

    for called in (_shifted_onto, _mix, mixed, place_weights, _added):
        extending.register_jitable(called)
    return njit(nogil=True)(_matrix_sums), njit(nogil=True)(_vector_sums)


def _matrix_sums(matrix: np.ndarray, first: int, stride: int) -> tuple[int, int, int]:
    """Returns the three sums of a matrix of bits, correct mod 2^32. Rows are ``stride`` places apart."""
    sums = 0, 0, 0
    for row in range(matrix.shape[0]):
        start = first + row * stride
        for column in range(matrix.shape[1]):
            sums = _added(sums, matrix[row, column], start + column)
    return sums


def _vector_sums(bits: np.ndarray, places: np.ndarray) -> tuple[int, int, int]:
    """Returns the three sums of elements with these bits at these places, correct mod 2^32."""
    sums = 0, 0, 0
    for i in range(bits.size):
        sums = _added(sums, bits[i], places[i])
    return sums


def _added(sums: tuple[int, int, int], bits: int, place: int) -> tuple[int, int, int]:
    first, second = mixed(bits)
    placed = first * place_weights(place)
    return sums[0] + (first & _WORD), sums[1] + (second & _WORD), sums[2] + (placed & _WORD)


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
