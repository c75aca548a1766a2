"""Tests of exact tests and intervals by hand."""

import numpy as np
import pytest
from exact_tests import fisher_p, share_interval, shift_interval, sign_flip_p


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.1, 0.2, 0.3], 2 / 8),  # all three up, or all three down
        ([-0.1, 0.2, 0.4], 4 / 8),  # the sums 0.7 and 0.5, and their opposites, reach 0.5
        ([0.1, 0.2, -0.3], 1.0),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2 / 64),
        ([0.0, 0.0], 1.0),
    ],
)
def test_signs_are_flipped_in_every_way(differences, expected):
    assert sign_flip_p(differences) == expected


def test_an_interval_of_three_pairs_by_hand():
    """The means of subsets of 1, 2 and 6 are 1, 1.5, 2, 3, 3.5, 4 and 6. With 75% each end loses one part of eight."""
    assert shift_interval([1.0, 2.0, 6.0], 0.75) == (1.0, 6.0)
    assert shift_interval([1.0, 2.0, 6.0], 0.5) == (1.5, 4.0)
    assert shift_interval([1.0, 2.0, 6.0], 0.95) is None
    with pytest.raises(ValueError, match="got 21 pairs, expected at most 20"):
        shift_interval([0.0] * 21, 0.95)


def test_an_interval_has_the_shifts_that_the_test_keeps():
    differences = np.random.default_rng(0).normal(0.3, 0.4, 8)
    low, high = shift_interval(list(differences), 0.95)
    for shift, is_kept in ((low - 1e-6, False), (low + 1e-6, True), (high - 1e-6, True), (high + 1e-6, False)):
        assert (sign_flip_p(list(differences - shift)) > 0.05) == is_kept


def test_two_shares_by_hand():
    # 5 of 8 stand against 2 of 8. The first row of a table has 0 to 7 of the 7, and there are C(16, 7) = 11440 tables.
    # Their ways are 8, 224, 1568, 3920, 3920, 1568, 224 and 8. Those of at most 1568 ways are 3600 together.
    assert fisher_p(5, 8, 2, 8) == pytest.approx(3600 / 11440)
    assert share_interval(8, 8, 0.95) == (pytest.approx(0.025**0.125), 1.0)
