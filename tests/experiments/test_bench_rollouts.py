"""The benchmark of rollouts bounds the ratios of its turns by an exact interval."""

import pytest
from bench_rollouts import as_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (4, "2.50 (1.00 - 4.00)"),  # too few for an interval of 95%, so these are the extremes
        (6, "3.50 (1.00 - 6.00)"),  # 1 - 2 / 2^6 = 96.9%
        (9, "5.00 (2.00 - 8.00)"),  # 1 - 2 (1 + 9) / 2^9 = 96.1%; without two values at each end it would be 82%
        (20, "10.50 (6.00 - 15.00)"),  # the tabulated ranks of the sign test
    ],
)
def test_the_interval_of_a_median_has_exact_ranks(count, text):
    assert as_text([float(value) for value in reversed(range(1, count + 1))]) == text
