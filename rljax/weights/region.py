"""Where in a tensor a part of it lies: rows and columns of the tensor as a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor as a matrix: its first axis and all others together; a vector is one row.

    Attributes:
      row: the first one.
      rows: how many.
      column: the first one.
      width: how many columns.
      stride: columns of the whole tensor.
    """

    row: int
    rows: int
    column: int
    width: int
    stride: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor of this shape."""
        rows = shape[0] if len(shape) > 1 else 1
        width = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
        return cls(0, rows, 0, width, width)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of a tensor of this shape."""
        whole = Region.whole(shape)
        inside = 0 <= self.row <= self.row + self.rows <= whole.rows
        return inside and 0 <= self.column <= self.column + self.width <= self.stride == whole.stride

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    @property
    def first(self) -> int:
        """Flat index in the tensor of the first element."""
        return self.row * self.stride + self.column
