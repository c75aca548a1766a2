"""Which sequences share a row, and which rows a micro-batch: as little computed for nothing as can be found quickly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

FORWARD_SHARE = 1 / 3
"""Of the cost of a micro-batch's forward and backward, what a forward alone costs: 2 of 6 operations a parameter."""
_SLACK = 64  # a row is full enough when less than this part of it is free


class Layout(NamedTuple):
    """Rows of a batch, and the micro-batches they are dealt to."""

    rows: dict[tuple[int, int], list[int]]  # (micro-batch, row of it) -> indices of the sequences
    with_loss: int  # micro-batches, the first ones, that hold all sequences in the loss
    used: int  # micro-batches that hold anything

    @property
    def cost(self) -> float:
        """In micro-batches of forward and backward."""
        return self.with_loss + FORWARD_SHARE * (self.used - self.with_loss)


def lay_out_rows(
    lengths: Sequence[int], in_loss: Sequence[bool], *, row_tokens: int, rows_per_micro_batch: int, micro_batches: int
) -> Layout:
    """Lays out sequences so that their micro-batches cost least.

    Sequences without loss fill what those in the loss leave free, and get micro-batches of their own, which take a
    forward alone, where that costs less than mixing them; then all sequences in the loss are in the micro-batches
    before. Rows are dealt to micro-batches of a kind in turn, longest sequences first, so that these are alike and the
    spread of their gradients is noise; for that they are at least two wherever there are two rows with loss.

    Args:
      lengths: of each sequence, prompt and response (tokens).
      in_loss: whether it carries loss.
      row_tokens: of a row.
      rows_per_micro_batch: rows.
      micro_batches: that there are. First fit needs no more than ``packing.max_micro_batches``, in whatever order.

    Raises:
      ValueError: a sequence longer than a row, or more rows than there are.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loss_first = sorted(longest_first, key=lambda i: not in_loss[i])
    least = _least_cost(lengths, in_loss, row_tokens * rows_per_micro_batch)
    layouts: list[Layout] = []
    for rows in _candidates(lengths, longest_first, loss_first, row_tokens):
        layouts.append(_deal(rows, in_loss, rows_per_micro_batch))
        if layouts[-1].cost <= least and layouts[-1].used <= micro_batches:
            break
    fitting = [layout for layout in layouts if layout.used <= micro_batches]
    if not fitting:
        count = len(layouts[0].rows)
        raise ValueError(f"{count} rows do not fit {micro_batches} micro-batches of {rows_per_micro_batch}")
    return min(fitting, key=lambda layout: layout.cost)


def _deal(rows: Sequence[list[int]], in_loss: Sequence[bool], rows_per_micro_batch: int) -> Layout:
    """Rows to micro-batches, those with loss before the others and otherwise in their order."""
    rows = sorted(rows, key=lambda members: not any(in_loss[i] for i in members))
    count = sum(any(in_loss[i] for i in members) for members in rows)
    used = -(-len(rows) // rows_per_micro_batch)
    with_loss = max(-(-count // rows_per_micro_batch), min(2, count, used))
    without, first = used - with_loss, with_loss * rows_per_micro_batch
    dealt = {(i % with_loss, i // with_loss): members for i, members in enumerate(rows[:first])}
    dealt |= {(with_loss + i % without, i // without): members for i, members in enumerate(rows[first:])}
    return Layout(dealt, with_loss, used)


def _candidates(
    lengths: Sequence[int], longest_first: Sequence[int], loss_first: Sequence[int], row_tokens: int
) -> Iterator[list[list[int]]]:
    """Ways to fill rows, the quickest first."""
    for fill_rows in (first_fit, fill_one_by_one):
        yield fill_rows(lengths, longest_first, row_tokens)
        if loss_first != longest_first:
            yield fill_rows(lengths, loss_first, row_tokens)


def _least_cost(lengths: Sequence[int], in_loss: Sequence[bool], micro_batch_tokens: int) -> float:
    """What no layout goes below: every row full."""
    with_loss = sum(length for length, carries in zip(lengths, in_loss, strict=True) if carries)
    counts = (-(-tokens // micro_batch_tokens) for tokens in (with_loss, sum(lengths)))
    return Layout({}, *counts).cost


def first_fit(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Places each item in the first row with room. Returns the item indices of each row.

    Args:
      lengths: of the items (tokens).
      order: in which they are placed; longest first makes few rows.
      row_tokens: of a row.

    Raises:
      ValueError: an item longer than a row.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for index in order:
        if lengths[index] > row_tokens:
            raise ValueError(f"a sequence of {lengths[index]} tokens does not fit a row of {row_tokens}")
        row = int(np.argmax(room[: len(rows)] >= lengths[index])) if rows else 0
        if row >= len(rows) or room[row] < lengths[index]:
            row = len(rows)
            rows.append([])
            room[row] = row_tokens
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def fill_one_by_one(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Fills one row after another: its first item is the next of ``order``, with those that fill it best.

    The sums that later items reach are the bits of an integer (subset sum by dynamic programming); items are tried in
    order until a sum leaves less than 1/64 of the row free. With sequences of half a row and more, first fit leaves
    gaps that this does not (minimum bin slack, Gupta and Ho 1999). Arguments and result as those of ``first_fit``.
    """
    rows, left = [], list(order)
    while left:
        first, *others = left
        room = row_tokens - lengths[first]
        within, reached, tried = (1 << (room + 1)) - 1, [1], []
        for index in others:
            if lengths[index] > room:
                continue
            reached.append(reached[-1] | (reached[-1] << lengths[index]) & within)
            tried.append(index)
            if reached[-1].bit_length() > room - row_tokens // _SLACK:
                break
        total = reached[-1].bit_length() - 1
        row = [first]
        for index, before in zip(reversed(tried), reversed(reached[:-1]), strict=True):
            if not before >> total & 1:
                row.append(index)
                total -= lengths[index]
        rows.append(row)
        placed = set(row)
        left = [index for index in left if index not in placed]
    return rows
