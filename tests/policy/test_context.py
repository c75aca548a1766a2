"""Tests of rows that devices share: the piece and the heads of each device."""

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.context import fold, heads_of_device, unfold


def test_a_folded_row_has_a_row_for_each_device():
    row = jnp.arange(16).reshape(2, 8)
    folded = fold(row, 2)
    assert folded.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    np.testing.assert_array_equal(unfold(folded, 2), row)


@pytest.mark.parametrize(
    ("parts", "heads", "expected"),
    [
        (8, (32, 8), 4),  # one group each
        (16, (32, 8), 2),  # half a group each
        (8, (40, 8), 5),
        (8, (12, 2), 2),  # six devices have two heads of a group of six
        (4, (12, 2), 3),
        (16, (12, 2), 1),
    ],
)
def test_heads_of_a_device_by_hand(parts, heads, expected):
    assert heads_of_device(parts, *heads) == expected


def test_a_row_that_devices_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"mesh.context = 3 splits rows into 3 pieces.* got 1 rows of 8 tokens"):
        fold(jnp.zeros((1, 8)), 3)
