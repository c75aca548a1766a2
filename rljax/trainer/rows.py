"""Puts sequences into rows, and rows into micro-batches, so that there is little padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

FORWARD_SHARE = 1 / 3
"""The cost of a forward without backward, as a share of forward and backward: 2 of 6 operations for each parameter."""
_SLACK = 64  # A row is full enough if less than 1/64 of it is free.
_MOST_LENGTHS = 64  # More lengths hardly fill a row better, and their cost grows with the square of the sequences.


class Layout(NamedTuple):
    """The row and the micro-batch of each sequence of a batch."""

    rows: dict[tuple[int, int], list[int]]  # the indices of the sequences in each row, by (micro-batch, row in it)
    with_loss: int  # the number of leading micro-batches that together hold all sequences in the loss
    used: int  # the number of micro-batches that have sequences

    @property
    def cost(self) -> float:
        """The cost of the layout, in units of one micro-batch of forward and backward."""
        return self.with_loss + FORWARD_SHARE * (self.used - self.with_loss)


def lay_out_rows(lengths: Sequence[int], in_loss: Sequence[bool], shape: tuple[int, int, int]) -> Layout:
    """Lays out sequences so that their micro-batches cost as little as possible.

    Sequences without loss fill the space that sequences in the loss leave free. If it costs less, they get
    micro-batches of their own, after the others, which take only a forward. Rows are dealt in turn to the micro-batches
    of one kind, longest sequences first. So these micro-batches are alike, and the spread of their gradients is noise.
    There are at least two micro-batches with loss if two rows have loss.

    ``lengths`` include prompt and response (tokens). ``shape`` is the number of micro-batches, of rows in each, and of
    tokens in a row. First fit needs at most ``packing.max_micro_batches`` micro-batches, in any order.

    Raises:
      ValueError: A sequence is longer than a row, or the sequences need more rows than there are.
    """
    micro_batches, rows_per_micro_batch, row_tokens = shape
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loss_first = sorted(longest_first, key=lambda i: not in_loss[i])
    least = _least_cost(lengths, in_loss, row_tokens * rows_per_micro_batch)
    layouts: list[Layout] = []
    for rows in _candidates(lengths, longest_first, loss_first, row_tokens):
        layouts.append(deal_rows(rows, in_loss, rows_per_micro_batch))
        if layouts[-1].cost <= least and layouts[-1].used <= micro_batches:
            break
    fitting = [layout for layout in layouts if layout.used <= micro_batches]
    if not fitting:
        count = len(layouts[0].rows)
        raise ValueError(f"{count} rows do not fit {micro_batches} micro-batches of {rows_per_micro_batch}")
    return min(fitting, key=lambda layout: layout.cost)


def deal_rows(rows: Sequence[list[int]], in_loss: Sequence[bool], rows_per_micro_batch: int) -> Layout:
    """Deals rows, lists of indices of sequences, to micro-batches: rows with loss first, otherwise in their order."""
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
    """Yields ways to fill rows, the quickest first."""
    for fill_rows in (first_fit, fill_one_by_one):
        yield fill_rows(lengths, longest_first, row_tokens)
        if loss_first != longest_first:
            yield fill_rows(lengths, loss_first, row_tokens)


def _least_cost(lengths: Sequence[int], in_loss: Sequence[bool], micro_batch_tokens: int) -> float:
    """Returns a lower bound of the cost of any layout: the cost if every row were full."""
    with_loss = sum(length for length, carries in zip(lengths, in_loss, strict=True) if carries)
    counts = (-(-tokens // micro_batch_tokens) for tokens in (with_loss, sum(lengths)))
    return Layout({}, *counts).cost


def first_fit(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Places each item in the first row of ``row_tokens`` that has room, in ``order``. Longest first makes few rows.

    Returns the indices of the items of each row. Raises ValueError if an item is longer than a row.
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
    """Fills one row after another: the first item is the next one of ``order``, the others fill the row best.

    The sums that later items can reach are the bits of an integer (subset sum by dynamic programming). Items are tried
    in order until a sum leaves less than 1/64 of the row free. At most 64 lengths are tried for a row, in even steps.
    First fit leaves larger gaps if sequences take half a row or more. Source: minimum bin slack, Gupta and Ho 1999.
    Returns the indices of the items of each row.
    """
    runs = [list(run) for _, run in itertools.groupby(order, lengths.__getitem__)]  # neighbours of one length
    of_runs, left = np.asarray([lengths[run[0]] for run in runs], np.int64), np.asarray([*map(len, runs)], np.int64)
    rows = []
    while (there := np.flatnonzero(left)).size:
        first = runs[there[0]].pop(0)
        left[there[0]] -= 1
        room = row_tokens - lengths[first]
        row = [first]
        for run, copy in _fill_room(of_runs, left, room, room - row_tokens // _SLACK):
            row.append(runs[run].pop(copy))
            left[run] -= 1
        rows.append(row)
    return rows


def _fill_room(lengths: np.ndarray, counts: np.ndarray, room: int, enough: int) -> list[tuple[int, int]]:
    """Chooses items that fill ``room`` best, or to at least ``enough``. A *run* is ``counts`` items of one length.

    Returns (run, index in the run) of each item, the last ones first.
    """
    # Copies of a length that do not fit together add no sum, so that they are not tried.
    most = np.where(lengths <= room, np.minimum(counts, room // np.maximum(lengths, 1)), 0)
    runs = np.flatnonzero(most)
    if runs.size and 2 * int(lengths[runs].min()) > room:  # a single item fits
        longest = np.maximum.accumulate(lengths[runs])
        last = int(np.argmax(longest >= enough)) if longest[-1] >= enough else -1
        return [(int(runs[np.argmax(longest == longest[last])]), 0)]
    runs = runs[:: -(-runs.size // _MOST_LENGTHS) or 1]
    within, reached, tried = (1 << (room + 1)) - 1, [1], list[tuple[int, int]]()
    for run, copy in ((each, copy) for each in runs.tolist() for copy in range(int(most[each]))):
        reached.append(reached[-1] | (reached[-1] << int(lengths[run])) & within)
        tried.append((run, copy))
        if reached[-1].bit_length() - 1 >= enough:
            break
    total = reached[-1].bit_length() - 1
    chosen = []
    for (run, copy), before in zip(reversed(tried), reversed(reached[:-1]), strict=True):
        if not before >> total & 1:
            chosen.append((run, copy))
            total -= int(lengths[run])
    return chosen
