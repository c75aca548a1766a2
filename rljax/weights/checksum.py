"""The checksum of a tensor: the same from numpy, jax and torch, and from the parts of a tensor put together.

It is three sums (mod 2^32) over the mixed bits of a tensor's elements. In two of them the order of the elements does
not matter, so that the shards of tensor parallelism add up to the whole wherever their elements belong. In the third
each element is multiplied by a number of its place in the whole tensor: it adds up over parts whose places are known,
and sees elements that changed places, which the others cannot.
Needs neither numpy, jax nor torch, so that the trainer and the plugin inside a server run the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MODULUS = 2**32
PLACE_FACTOR = 0x9E3779B1  # of place_weights


@dataclass(frozen=True)
class Checksum:
    """Of one tensor, or of one worker's part of it.

    Attributes:
      count: number of elements.
      first: sum of the first mixed value of every element, mod 2^32.
      second: sum of the second one, mod 2^32.
      placed: sum of the first ones, each times the weight of its place, mod 2^32; of a part, as though it were the
        beginning of a tensor where the places are not known.
    """

    count: int
    first: int
    second: int
    placed: int


def checksum(count: int, first: int, second: int, placed: int) -> Checksum:
    """From sums of :func:`mixed` and of products with :func:`place_weights`, of any size and sign."""
    return Checksum(count, first % _MODULUS, second % _MODULUS, placed % _MODULUS)


def mixed(bits: Any) -> tuple[Any, Any]:
    """The two values of each element that are summed.

    Args:
      bits: int32 array of numpy, jax or torch: the bit patterns of the elements (16-bit ones below 65,536).

    Returns:
      Two int32 arrays of the same shape. Both maps are one-to-one, and 0 stays 0.
    """
    first = _mix(bits, 0x7FEB352D, 0x846CA68B - _MODULUS)
    return first, _mix(first, 0x2C1B3C6D, 0x297A2D39)


def place_weights(places: Any) -> Any:
    """What the first mixed value of an element at each place is multiplied by: int32, odd.

    Args:
      places: int32 array of numpy, jax or torch: the flat index of each element in the whole tensor, row by row, mod
        2^32.
    """
    x = places * (PLACE_FACTOR - _MODULUS)
    x = _shifted_onto(x, 15, 0x1FFFF)
    x |= 1
    return x


def _mix(x: Any, multiplier: int, another: int) -> Any:
    """Shift and multiply, in int32 that wraps around."""
    x = _shifted_onto(x, 16, 0xFFFF)
    x *= multiplier
    x = _shifted_onto(x, 15, 0x1FFFF)
    x *= another
    return _shifted_onto(x, 16, 0xFFFF)


def _shifted_onto(x: Any, by: int, kept: int) -> Any:
    """A new array: x ^ x >> by, where >> keeps the sign, so that the bits it brings in are masked off.

    Arrays that can be changed in place are, once they are this module's own: new memory costs more than the sums.
    """
    shifted = x >> by
    shifted &= kept
    shifted ^= x
    return shifted
