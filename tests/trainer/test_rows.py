"""Tests of sequences that share a row and a micro-batch: each is computed once, and padding is spread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.trainer.packing import first_fit, lay_out_rows, max_micro_batches


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def test_first_fit_by_hand():
    # 7 opens row 0, and 5 opens row 1. Neither 4 fits row 0 (3 left). The first goes to row 1 (5 left), and the next
    # opens row 2.
    assert first_fit([4, 5, 7, 4, 3], [2, 1, 0, 3, 4], 10) == [[2, 4], [1, 0], [3]]


def test_an_item_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        first_fit([3, 11], [1, 0], 10)


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
