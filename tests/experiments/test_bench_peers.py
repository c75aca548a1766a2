"""In the benchmark beside other trainers the sides get the same tokens. A ratio above 1 says that rljax is faster."""

import sys

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


def test_a_card_gets_the_shape_of_qwen3():
    case = bench_peers.CARD_CASES["Qwen3-0.6B, 8 recorded lengths"]
    policy = peer_steps.policy_of(case)
    assert (policy.num_heads, policy.num_kv_heads, policy.head_dim) == (16, 8, 128)
    assert max(map(sum, case.lengths())) == 2296
    assert sum(map(sum, case.lengths())) == 10_416


def test_rows_of_one_sequence_have_the_tokens_of_packed_rows():
    case = peer_steps.Case(width=64, layers=1, vocab=64, tokens=0, recorded=8)
    rows, batch = peer_steps.packed(case, alone=True), peer_steps.packed(case)
    assert rows.tokens.shape == (1, 8, 164)
    assert rows.segment_ids.max() == 1
    np.testing.assert_array_equal(np.sort(rows.tokens[rows.response_mask]), np.sort(batch.tokens[batch.response_mask]))


class Card(Clock):
    """A side on a card, with two steps that are not timed."""

    ended = False

    def send(self, **message):
        self.message = message

    def receive(self, limit_s=None):
        assert not self.ended
        if "compile" in self.message:
            return {"compile_s": 9.0}
        return {"seconds": self.seconds.pop(0), "norm": 1.0} if self.seconds else {"error": "out of memory"}

    def end(self):
        self.ended = True


@pytest.mark.parametrize("alone", [False, True])
def test_sides_on_a_card_have_the_ratio_of_medians_or_an_error(alone):
    workers = {"rljax": Card(9, 9, 1.0, 2.0, 4.0), "tunix": Card(9, 9, 3.0, 4.0, 5.0), "maxtext": Card(9, 9)}
    one = bench_peers.compare_on_card(peer_steps.Case(), workers, 3, 60, alone=alone)
    assert all(worker.ended for worker in workers.values())
    tunix = one["sides"]["tunix"]
    assert tunix == {
        "compile_s": 9.0,
        "norm": 1.0,
        "seconds": [3.0, 4.0, 5.0],
        "ratio": 2.0,
        "range": [0.75, 5.0],
    }
    assert one["sides"]["maxtext"] == {"compile_s": 9.0, "error": "out of memory"}
    assert bench_peers.row("case", "maxtext", one["sides"]["maxtext"]).startswith("| case | maxtext | out of memory")


def test_a_side_that_takes_too_long_ends_with_an_error():
    worker = bench_peers.Worker("rljax", sys.executable, "", bench_peers.ENVIRONMENTS["cpu"], None)
    assert worker.receive(0.01) == {"error": "it took more than 0 s"}
    worker.send(run=True)
    assert worker.receive(60) == {"error": "its process has ended"}
