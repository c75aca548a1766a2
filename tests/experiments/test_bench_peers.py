"""In the benchmark beside tunix both sides get the same tokens. A ratio above 1 says that rljax is faster."""

import bench_peers
import numpy as np
import peer_steps


def test_packed_and_padded_rows_have_the_same_tokens():
    case = peer_steps.Case(width=64, layers=1, vocab=64, tokens=0)
    rows, batch = peer_steps.padded(case), peer_steps.packed(case)
    given = np.sort(rows["completion_ids"][rows["completion_mask"] == 1])
    np.testing.assert_array_equal(np.sort(batch.tokens[batch.response_mask]), given)
    assert len(given) == sum(response for _, response in case.lengths())
    # Eight responses have 4 to 33 tokens. A row for each would be mostly padding.
    assert rows["completion_mask"].size > 2 * len(given)
    assert batch.tokens.size == 5 * 164  # five rows of the longest sequence
    of_card = bench_peers.CASES["cuda"]["Qwen3-0.6B, 8 recorded lengths"]
    assert (peer_steps.policy_of(of_card).head_dim, sum(map(sum, of_card.lengths()))) == (128, 10_416)


class Card:
    """A side on a card whose steps take the given seconds. Two of them are not timed."""

    ended = False

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def send(self, fields=None):
        self.fields = fields

    def receive(self, limit_s):
        assert not self.ended
        if self.fields:
            return {"compile_s": 9.0}
        return {"seconds": self.seconds.pop(0), "norm": 1.0} if self.seconds else {"error": "out of memory"}

    def end(self):
        self.ended = True


def test_sides_have_the_ratio_of_medians_or_an_error():
    workers = {"rljax": Card(9, 9, 1.0, 2.0, 4.0), "tunix": Card(9, 9, 3.0, 4.0, 5.0), "third": Card(9, 9)}
    sides = bench_peers.compare(peer_steps.Case(), workers, 3, 60)["sides"]
    assert all(worker.ended for worker in workers.values())
    timed = {"seconds": [3.0, 4.0, 5.0], "ratio": 2.0, "range": [0.75, 5.0]}
    assert sides["tunix"] == {"compile_s": 9.0, "norm": 1.0} | timed
    assert sides["third"] == {"compile_s": 9.0, "error": "out of memory"}
    assert bench_peers.row("case", "third", sides["third"]).startswith("| case | third | out of memory")


def test_a_side_that_takes_too_long_ends_with_an_error():
    worker = bench_peers.Worker("rljax", "", bench_peers.ENVIRONMENTS["cpu"])
    assert worker.receive(0.01) == {"error": "it took more than 0 s"}
    worker.send()
    assert worker.receive(60) == {"error": "its process has ended"}
