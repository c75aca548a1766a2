"""In the benchmark beside other trainers the sides get the same tokens. A ratio above 1 says that rljax is faster."""

import bench_peers
import numpy as np
import peer_steps
import pytest


def test_packed_and_padded_rows_have_the_same_tokens():
    case = peer_steps.Case(width=64, layers=1, vocab=64, tokens=0)
    rows, batch = peer_steps.padded(case), peer_steps.packed(case)
    given = np.sort(rows["completion_ids"][rows["completion_mask"] == 1])
    np.testing.assert_array_equal(np.sort(batch.tokens[batch.response_mask]), given)
    assert len(given) == sum(response for _, response in case.lengths())
    # There are 32 responses of 4 to 33 tokens. A row for each would be mostly padding.
    assert rows["completion_mask"].size > 2 * len(given)
    assert batch.tokens.size < 1.1 * (batch.segment_ids > 0).sum()


class Clock:
    """A side whose steps take the given seconds."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def ask(self, **message):
        return {"seconds": self.seconds.pop(0)} if "run" in message else {"norm": 1.0, "compile_core_s": 0.1}


def test_ratios_are_of_the_same_turn():
    workers = {"rljax": Clock(1.0, 2.0, 4.0), "tunix": Clock(3.0, 4.0, 4.0)}
    sides = bench_peers.compare(peer_steps.Case(), workers, 3, {"tunix": {"compile_core_s": 7.0}})["sides"]
    assert sides["tunix"]["ratio"] == pytest.approx(2.0)  # the median of 3, 2 and 1
    assert sides["tunix"]["range"] == [1.0, 3.0]
    assert sides["tunix"]["compile_core_s"] == 7.0
    assert (
        bench_peers.row("case", "tunix", sides["tunix"])
        == "| case | tunix | 4000 | 2.00 | 1.00 - 3.00 |  | 7.0 | 1.0000 |"
    )


def test_the_interval_of_a_median_is_exact():
    # At most one of ten values lies below the median with probability 11/1,024, and at most two with 56/1,024.
    assert bench_peers.median_interval([5, 1, 9, 3, 7, 2, 8, 4, 6, 10]) == [2, 9]
    assert bench_peers.median_interval([6, 5, 4, 3, 2, 1]) == [1, 6]  # both ends together have 2/64
    assert bench_peers.median_interval([5, 4, 3, 2, 1]) is None  # both ends together would hold at 94% only
