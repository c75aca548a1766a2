"""Tests of exact tests and intervals: numbers by hand, and scipy's if it is installed."""


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
    assert fisher_p(1, 1, 0, 1) == 1.0


def test_the_interval_of_a_share_by_hand():
    """For all of eight, the eighth power of the lower bound is 0.025. None of eight is its mirror."""
    low, high = share_interval(8, 8, 0.95)
    assert (low, high) == (pytest.approx(0.025**0.125), 1.0)
    assert share_interval(0, 8, 0.95) == (0.0, pytest.approx(1 - low))
    assert share_interval(1, 2, 0.95) == pytest.approx((1 - 0.975**0.5, 0.975**0.5))


def test_scipy_agrees():
    stats = pytest.importorskip("scipy.stats")
    for one, other in ((0, 0), (1, 8), (2, 5), (3, 2)):
        expected = stats.fisher_exact([[one, 3 - one], [other, 8 - other]]).pvalue
        assert fisher_p(one, 3, other, 8) == pytest.approx(expected)
        interval = stats.binomtest(other, 8).proportion_ci(0.9, "exact")
        assert share_interval(other, 8, 0.9) == pytest.approx((interval.low, interval.high), abs=1e-9)
    differences = np.random.default_rng(1).normal(0.2, 1.0, 7)
    found = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(list(differences)) == pytest.approx(found.pvalue)
