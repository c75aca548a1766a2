"""The row of a trajectory is recounted by hand from its turns and from its environment's texts."""

import numpy as np
from records import response

from rljax.run.episodes import TokenRecorder
from rljax.tokens import as_stored


def turn(tokens, logprobs, versions, **arrays):
    return response((0, 0), tokens, logprobs, versions, **arrays)


def ints(*values):
    return np.asarray(values, np.int32)


def test_turns_and_texts_stand_in_their_order():
    """Versions have no gap where an environment wrote. A trajectory without a turn has no tokens."""
    recorder = TokenRecorder(ints(7, 8))
    assert recorder.tokens().tolist() == [7, 8]
    row = recorder.response(0, 0, truncated=False)
    assert (row.length, row.response.dtype, row.versions.tolist(), row.trained_rows) == (0, np.int32, [], ())
    recorder.add_turn(turn([1, 2], [-0.1, -0.2], [2, 3]))
    recorder.add_text(ints(50, 51, 52))
    assert recorder.tokens().tolist() == [7, 8, 1, 2, 50, 51, 52]
    recorder.add_turn(turn([4], [-0.4], 4))
    recorder.add_turn(turn([5, 6], [-0.5, -0.6], [4, 5]))  # an environment may write nothing
    row = recorder.response(2, 1, truncated=True)
    assert (row.prompt_index, row.sample_index, row.truncated, row.prompt.tolist()) == (2, 1, True, [7, 8])
    assert row.response.tolist() == [1, 2, 50, 51, 52, 4, 5, 6]
    np.testing.assert_array_equal(row["rollout_logprobs"], np.float32([-0.1, -0.2, 0, 0, 0, -0.4, -0.5, -0.6]))
    assert row.turns.tolist() == [1, 1, 0, 0, 0, 2, 3, 3]
    assert (row.length, recorder.count, recorder.turn) == (5, 8, 3)
    assert row["version"].tolist() == [2, 3, 3, 3, 3, 4, 4, 5]
    assert set(row.columns) == {"rollout_logprobs", "version", "turn"}


def test_likeliest_tokens_and_routes_stay_with_their_tokens():
    def arrays(*ids, count, first):
        routes = as_stored(np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1))
        return {"top_ids": ids, "top_logprobs": -np.asarray(ids), "routes": routes}

    recorder = TokenRecorder(ints(7, 8))
    # Two tokens of prompt and two of response have three routes. The second turn's reply has six routes, from its own
    # pass.
    recorder.add_turn(turn([1, 2], [0, 0], 0, prompt=[7, 8], **arrays([1, 3], [2, 4], count=3, first=10)))
    recorder.add_text(ints(50, 51))
    recorder.add_turn(turn([5], [0], 0, prompt=recorder.tokens(), **arrays([5, 6], count=6, first=20)))
    row = recorder.response(0, 0, truncated=False)
    # The last token of the first turn went through the layers in the second turn's pass.
    assert row.columns["routes"].ravel().tolist() == [11, 12, 13, 24, 25, 26, 0]
    assert row["top_ids"].tolist() == [[1, 3], [2, 4], [-1, -1], [-1, -1], [5, 6]]
    assert row["top_logprobs"].tolist() == [[-1, -3], [-2, -4], [-np.inf] * 2, [-np.inf] * 2, [-5, -6]]
