"""What kernels multiply inside a custom call, which the program's text does not say: by formula.

Attention.
A product of one query with one key costs two operations for each element of a head. A forward pass makes two such
products for every pair of a query and a key that it may see (scores, output), a backward pass five (scores again,
and the gradients of values, probabilities, queries and keys), or four and three where it is two kernels.

Grouped products of a mixture's experts. Each of m rows [m, d] meets one of e matrices [e, d, f], or gives to one of e
outer products: 2 m d f operations, with all rows that there is room for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rljax.plan.count import Work
from rljax.plan.hlo import Array, Computation, Instruction

# What the call's name or its metadata holds -> products for each pair, the first that fits.
_PRODUCTS = (
    (re.compile(r"__cudnn\$fmha\w*Backward"), 5),
    (re.compile(r"__cudnn\$fmha"), 2),
    (re.compile(r'"tpu_custom_call".*(splash|flash)\w*dkv'), 4),
    (re.compile(r'"tpu_custom_call".*(splash|flash)\w*dq'), 3),
    (re.compile(r'"tpu_custom_call".*(splash|flash)'), 2),
)
_GROUPED = re.compile(r'custom_call_target="mosaic_gpu\w*"|"tpu_custom_call".*(ragged|gmm)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class KernelUse:
    """A custom call's executions.

    Attributes:
      target: its name.
      count: executions.
      dtype: of its operands; empty where it is no kernel that is known here.
      flops: by formula; None where none is known.
    """

    target: str
    count: int
    dtype: str
    flops: int | None

    def plus(self, other: KernelUse) -> KernelUse:
        """The executions of both, of the same target and dtype."""
        flops = None if self.flops is None or other.flops is None else self.flops + other.flops
        return KernelUse(self.target, self.count + other.count, self.dtype, flops)


def causal_pairs(segments: Sequence[int]) -> int:
    """(query, key) pairs of a row whose segments have these lengths (tokens): each token sees itself and those before.

    >>> causal_pairs([3, 1])
    7
    """
    return sum(length * (length + 1) // 2 for length in segments)


class AttentionFlops(NamedTuple):
    """Operations of the products of one layer; a multiply-add is two."""

    forward: int  # scores, output
    backward: int  # scores again, gradients of the probabilities, and of queries, keys and values


def attention_flops(lengths: Sequence[int], *, num_heads: int, head_dim: int) -> AttentionFlops:
    """Operations that causal attention inside segments needs in one layer, whatever computes it.

    Args:
      lengths: tokens of each segment.
      num_heads: query heads; key-value heads do not matter.
      head_dim: width of a head.
    """
    product = 2 * causal_pairs(lengths) * num_heads * head_dim
    return AttentionFlops(2 * product, 5 * product)


def full_row(row_tokens: int, longest: int) -> list[int]:
    """Lengths of the segments of a row that is filled with the longest sequences.

    >>> full_row(10, 4)
    [4, 4, 2]
    """
    whole, rest = divmod(row_tokens, min(longest, row_tokens))
    return [min(longest, row_tokens)] * whole + [rest] * (rest > 0)


def kernel_uses(work: Work, segments: Sequence[int]) -> list[KernelUse]:
    """The custom calls of ``work``, those of the same name, dtype and formula together.

    Args:
      work: of one device.
      segments: lengths of the segments of every row (tokens).
    """
    uses: dict[tuple[str, str], KernelUse] = {}
    for computation, call, times in work.kernels:
        target = _TARGET.search(call.attributes)
        query = _query(computation, call)
        products = next((count for pattern, count in _PRODUCTS if pattern.search(call.attributes)), None)
        if grouped := _grouped_flops(computation, call):
            one = KernelUse(target.group(1) if target else "", times, *grouped)
            one = replace(one, flops=one.flops * times if one.flops else None)
        elif query is None or products is None:
            one = KernelUse(target.group(1) if target else "", times, "", None)
        else:
            flops = 2 * products * causal_pairs(segments) * math.prod(query.dims) // sum(segments)
            one = KernelUse(target.group(1) if target else "", times, query.dtype, flops * times)
        before = uses.get((one.target, one.dtype))
        uses[one.target, one.dtype] = one if before is None else before.plus(one)
    return list(uses.values())


def _grouped_flops(computation: Computation, call: Instruction) -> tuple[str, int] | None:
    """(dtype, operations) of one execution of a grouped product's kernel; None of another call."""
    if not _GROUPED.search(call.attributes):
        return None
    operands = [array for operand in computation.operand_arrays(call) for array in operand if "float" in array.dtype]
    results = [array for array in call.arrays if "float" in array.dtype]
    stacks = [array for array in (*operands, *results) if len(array.dims) == 3]
    rows = [array for array in operands if len(array.dims) == 2]
    if not stacks or not rows:
        return None
    return rows[0].dtype, 2 * rows[0].dims[0] * math.prod(stacks[0].dims[1:])


def _query(computation: Computation, call: Instruction) -> Array | None:
    """The first operand with rows or heads, tokens and a head's width."""
    arrays = [array for operand in computation.operand_arrays(call) for array in operand]
    return next((array for array in arrays if "float" in array.dtype and len(array.dims) >= 3), None)
