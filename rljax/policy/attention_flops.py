"""Floating-point operations that causal attention inside segments needs, whatever computes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class AttentionFlops(NamedTuple):
    """Operations of the products of one layer; a multiply-add is two."""

    forward: int  # scores, output
    backward: int  # scores again, gradients of the probabilities, and of queries, keys and values


def attention_flops(lengths: Iterable[int], *, num_heads: int, head_dim: int) -> AttentionFlops:
    """Needed operations of one layer: a segment of L tokens has L (L + 1) / 2 pairs of a query and a key.

    Args:
      lengths: tokens of each segment.
      num_heads: query heads; key-value heads do not matter.
      head_dim: width of a head.
    """
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    product = 2 * pairs * num_heads * head_dim
    return AttentionFlops(2 * product, 5 * product)
