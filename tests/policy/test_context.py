"""Tests of the zigzag order of a row over devices: its inverse, the blocks of each device, and even work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.policy.context import fold, from_zigzag, heads_of_device, unfold, zigzag, zigzag_blocks
from rljax.policy.flash import block_pairs


@settings(deadline=None, max_examples=25)
@given(parts=st.integers(1, 16), size=st.integers(1, 4), before=st.integers(1, 3))
def test_zigzag_and_its_inverse_are_permutations(parts, size, before):
    row = np.arange(before * 2 * parts * size).reshape(before, 2 * parts, size)

    @jax.jit
    def there_and_back(row):
        ordered = zigzag(row, 1)
        return ordered, from_zigzag(ordered, 1)

    ordered, back = there_and_back(row)
    assert ordered.shape == (before, parts, 2, size)
    np.testing.assert_array_equal(ordered, row[:, zigzag_blocks(parts)])
    np.testing.assert_array_equal(back, row)


@settings(deadline=None, max_examples=25)
@given(parts=st.integers(2, 16), size=st.integers(1, 5))
def test_each_device_has_the_same_number_of_pairs(parts, size):
    n = 2 * parts * size
    pairs = block_pairs(n, parts)
    # A device has s early and s late ones of 2 p s blocks. So it has (2 p - 1) s^2 pairs with blocks before them, and s
    # (s + 1) pairs within them.
    assert pairs.shape == (parts, (2 * parts - 1) * size**2 + size * (size + 1), 3)
    every = {(i, j) for _, i, j in pairs.reshape(-1, 3).tolist()}
    assert every == {(i, j) for i in range(n) for j in range(i + 1)}
    assert len(every) == pairs.shape[0] * pairs.shape[1]


def test_pairs_name_the_place_of_their_queries_on_the_device():
    first, second = block_pairs(4, 2)
    assert first.tolist() == [[0, 0, 0], [1, 3, 0], [1, 3, 1], [1, 3, 2], [1, 3, 3]]
    assert second.tolist() == [[0, 1, 0], [0, 1, 1], [1, 2, 0], [1, 2, 1], [1, 2, 2]]


def test_a_folded_row_has_an_early_and_a_late_block():
    row = jnp.arange(16).reshape(2, 8)
    folded = fold(row, 2)
    assert folded.tolist() == [[0, 1, 6, 7], [8, 9, 14, 15], [2, 3, 4, 5], [10, 11, 12, 13]]
    np.testing.assert_array_equal(unfold(folded, 2), row)


@pytest.mark.parametrize(
    ("parts", "heads", "expected"),
    [
        (8, (32, 8), 4),  # one group each
        (16, (32, 8), 2),  # half a group each
        (8, (40, 8), 5),
        (8, (12, 2), 2),  # six devices have two heads of a group of six
        (4, (12, 2), 3),
        (3, (32, 8), None),  # neither whole groups nor parts of one
        (16, (12, 2), 1),
    ],
)
def test_heads_of_a_device_by_hand(parts, heads, expected):
    assert heads_of_device(parts, *heads) == expected


def test_a_row_that_devices_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"mesh.context = 3 splits rows into 6 blocks.* got 1 rows of 8 tokens"):
        fold(jnp.zeros((1, 8)), 3)
