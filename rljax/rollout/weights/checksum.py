"""Whether a server holds the trainer's weights: one checksum a tensor on each side, and how they are compared.

A checksum is two sums (mod 2^32) over the mixed bits of a tensor's elements. The order of the elements does not matter,
so the shards of tensor parallelism add up to the whole; for the same reason elements that changed places are not seen.
Needs neither numpy, jax nor torch, so that the trainer and the plugin inside a server run the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A tied head is no tensor of the trainer's: it is the embedding.
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_NAMED = 4  # differing tensors that a message names
_MODULUS = 2**32


@dataclass(frozen=True)
class Checksum:
    """Of one tensor, or of one worker's part of it.

    Attributes:
      count: number of elements.
      first: sum of the first mixed value of every element, mod 2^32.
      second: sum of the second one, mod 2^32.
    """

    count: int
    first: int
    second: int


def checksum(count: int, first: int, second: int) -> Checksum:
    """From sums of :func:`mixed` of any size and sign."""
    return Checksum(count, first % _MODULUS, second % _MODULUS)


def mixed(bits: Any) -> tuple[Any, Any]:
    """The two values of each element that are summed.

    Args:
      bits: int32 array of numpy, jax or torch: the bit patterns of the elements (16-bit ones below 65,536).

    Returns:
      Two int32 arrays of the same shape. Both maps are one-to-one, and 0 stays 0.
    """
    first = _mix(bits, 0x7FEB352D, 0x846CA68B - _MODULUS)
    return first, _mix(first, 0x2C1B3C6D, 0x297A2D39)


def _mix(x: Any, multiplier: int, another: int) -> Any:
    """Shift and multiply, in int32 that wraps around; >> keeps the sign, so the bits it brings in are masked off."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * multiplier
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * another
    return x ^ ((x >> 16) & 0xFFFF)


def differences(expected: Mapping[str, Checksum], workers: Sequence[Mapping[str, Checksum | None]]) -> list[str]:
    """Each tensor whose bits differ, with how in brackets; none when a server holds exactly ``expected``.

    A tensor may be whole on several workers, or in parts whose counts add up to the whole, or in parts of which each
    is on as many workers as others (key-value heads, where there are more workers than heads).

    Args:
      expected: the trainer's tensors by name.
      workers: of each worker the tensors it holds by name; None for one that was not loaded.
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


def _difference(wanted: Checksum, parts: Sequence[Checksum]) -> str:
    if all(part.count == wanted.count for part in parts):
        return "" if all(part == wanted for part in parts) else "other bits"
    count = sum(part.count for part in parts)
    if count % wanted.count:
        return f"{count} elements instead of {wanted.count}"
    copies = count // wanted.count
    together = checksum(count, sum(part.first for part in parts), sum(part.second for part in parts))
    same = together == checksum(count, copies * wanted.first, copies * wanted.second)
    return "" if same else "other bits"


def described(found: Sequence[str]) -> str:
    """How many of :func:`differences` there are, and the first few."""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{len(found)} {'tensors differ' if found[1:] else 'tensor differs'}: {', '.join(found[:_NAMED])}{more}"
