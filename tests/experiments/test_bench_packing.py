"""The benchmark of packing counts places as a step does."""

import bench_packing
import pytest


def test_shares_are_of_the_places_that_are_computed():
    lengths, mean, cut = bench_packing.draw("all cut off", 0)
    assert (len(lengths), mean, cut) == (1024, 8192, 1)
    # A row of 9,216 holds one sequence, and a row of 33,792 holds four.
    shares = bench_packing.measure(lengths, 9216, 4)
    assert shares["row_share"] == shares["share"] == pytest.approx(sum(lengths) / (1024 * 9216))
    assert bench_packing.measure(lengths, 33792, 4)["share"] > 0.98
