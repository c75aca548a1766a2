"""Tests of sequences that share a row and a micro-batch: each is computed once, and as few as possible with loss."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_calls import count_calls

from rljax.trainer.packing import fill_one_by_one, first_fit, lay_out_rows, max_micro_batches


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def test_first_fit_by_hand():
    # 7 opens row 0, and 5 opens row 1. Neither 4 fits row 0 (3 left). The first goes to row 1 (5 left), and the next
    # opens row 2.
    assert first_fit([4, 5, 7, 4, 3], [2, 1, 0, 3, 4], 10) == [[2, 4], [1, 0], [3]]


def test_an_item_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        first_fit([3, 11], [1, 0], 10)


def test_rows_filled_one_by_one_by_hand():
    # In rows of 16 first fit gives 6 5 5 | 4 3 3 3 3. In rows of 12 it gives 6 5 | 5 4 3 | 3 3 3, because after 6 it
    # takes the next 5. If rows are filled one by one, 6 takes 3 3 to make 12, and 5 takes 4 3 to make 12. Then 5 3 are
    # left.
    lengths = [6, 5, 5, 4, 3, 3, 3, 3]
    assert [sum(lengths[i] for i in row) for row in first_fit(lengths, range(8), 12)] == [11, 12, 9]
    assert [sum(lengths[i] for i in row) for row in fill_one_by_one(lengths, range(8), 12)] == [12, 12, 8]
    assert [sorted(row) for row in fill_one_by_one(lengths, range(8), 16)] == [[0, 1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.parametrize("lengths", [[8192], [8192, 5000], [8192, 7000, 5000, 3000]])
def test_the_calls_of_filling_grow_with_the_sequences(lengths):
    """Rows of 18,432 hold two sequences of 8,192. Further ones are not tried, however many there are."""

    def calls(times):
        every = lengths * times
        return count_calls(lambda: fill_one_by_one(every, longest_first(every), 18432)).total()

    assert calls(128) < 2.2 * calls(64)


def test_different_lengths_cost_no_more_and_fill_as_well():
    """The lengths from 2,000 to 8,000 are all different, and rows of 18,432 take a few of them."""

    def fill(count):
        lengths = np.linspace(2000, 8000, count).astype(int).tolist()
        rows = []
        calls = count_calls(lambda: rows.extend(fill_one_by_one(lengths, longest_first(lengths), 18432))).total()
        return calls, len(rows) / (sum(lengths) / 18432)

    (few, _), (many, surplus) = fill(400), fill(800)
    assert many < 2.2 * few
    assert surplus < 1.02


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), row=st.integers(30, 60))
def test_the_first_row_is_as_full_as_its_first_item_allows(lengths, row):
    order = longest_first(lengths)
    filled = sum(lengths[i] for i in fill_one_by_one(lengths, order, row)[0])
    others = [lengths[i] for i in order[1:]]
    sums = (lengths[order[0]] + sum(some) for k in range(len(lengths)) for some in itertools.combinations(others, k))
    assert filled == max(total for total in sums if total <= row)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=80),
    row=st.integers(20, 100),
    rows=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_every_sequence_has_one_place_in_the_micro_batches(lengths, row, rows, seed, share):
    in_loss = (np.random.default_rng(seed).random(len(lengths)) < share).tolist()
    most = max_micro_batches(len(lengths), 20, row, rows)
    layout = lay_out_rows(lengths, in_loss, (most, rows, row))
    assert sorted(i for members in layout.rows.values() for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= row for members in layout.rows.values())
    assert all(members for members in layout.rows.values())
    assert layout.used <= most
    assert {micro for micro, _ in layout.rows} == set(range(layout.used))
    assert all(place < rows for _, place in layout.rows)
    carrying = {micro for (micro, _), members in layout.rows.items() if any(in_loss[i] for i in members)}
    assert carrying == set(range(layout.with_loss))
    mixed = -(-len(first_fit(lengths, longest_first(lengths), row)) // rows)
    assert layout.cost <= mixed


def test_sequences_without_loss_fill_up_and_then_stand_alone():
    """A micro-batch has two rows of 10.

    Rows with loss of 8, 7, 7 and 6 take 2, 3, 3 and 4, and three 9s need two forwards.
    """
    lengths = [8, 7, 7, 6, 2, 3, 3, 4, 9, 9, 9]
    in_loss = [True] * 4 + [False] * 7
    layout = lay_out_rows(lengths, in_loss, (6, 2, 10))
    assert (layout.with_loss, layout.used, layout.cost) == (2, 4, pytest.approx(2 + 2 / 3))
    assert layout.rows == {
        (0, 0): [0, 4],
        (1, 0): [1, 5],
        (0, 1): [2, 6],
        (1, 1): [3, 7],
        (2, 0): [8],
        (3, 0): [9],
        (2, 1): [10],
    }


def test_two_micro_batches_have_loss_for_the_noise():
    """A micro-batch has four rows. Two rows have loss and four do not.

    A forward alone would leave one micro-batch with loss.
    """
    layout = lay_out_rows([9] * 6, [True, True] + [False] * 4, (6, 4, 10))
    assert (layout.with_loss, layout.used) == (2, 2)
    assert {place: members for place, members in layout.rows.items() if members[0] < 2} == {(0, 0): [0], (1, 0): [1]}


def test_a_batch_without_loss_takes_forwards_alone():
    layout = lay_out_rows([9] * 6, [False] * 6, (2, 4, 10))
    assert (layout.with_loss, layout.used) == (0, 2)


def test_more_rows_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 rows do not fit 1 micro-batches of 2"):
        lay_out_rows([9] * 3, [True] * 3, (1, 2, 10))
