"""Tables for a terminal."""

from collections.abc import Sequence
from typing import Any


def cell(value: Any, form: str = "") -> str:
    """Returns a value in the form of ``format``, or - for None."""
    return "-" if value is None else format(value, form)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells, the head first, with each column padded to its widest cell and two spaces between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)
