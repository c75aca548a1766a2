"""The row of a trajectory is recounted by hand from its turns and from its environment's texts."""

import numpy as np

from rljax.rollout.episodes.recorder import Recorder
from rljax.rollout.types import Response, Tops, VersionSpan


def turn(tokens, logprobs, spans, *, routes=None, tops=None):
    versions = tuple(VersionSpan(*span) for span in spans)
    ids = np.asarray(tokens, np.int32)
    return Response(0, 0, ids, np.asarray(logprobs, np.float32), False, versions, routes, tops)


def ints(*values):
    return np.asarray(values, np.int32)


def test_turns_and_texts_stand_in_their_order():
    recorder = Recorder(ints(7, 8))
    assert recorder.tokens().tolist() == [7, 8]
    recorder.add_turn(turn([1, 2], [-0.1, -0.2], [(3, 0, 2)]))
    recorder.add_text(ints(50, 51, 52))
    assert recorder.tokens().tolist() == [7, 8, 1, 2, 50, 51, 52]
    recorder.add_turn(turn([4], [-0.4], [(3, 0, 1)]))
    recorder.add_turn(turn([5, 6], [-0.5, -0.6], [(3, 0, 1), (4, 1, 2)]))  # an environment may write nothing
    row = recorder.response(2, 1, truncated=True, own_prompt=False)
    assert (row.prompt_index, row.sample_index, row.truncated, row.prompt) == (2, 1, True, None)
    assert row.token_ids.tolist() == [1, 2, 50, 51, 52, 4, 5, 6]
    np.testing.assert_array_equal(row.logprobs, np.float32([-0.1, -0.2, 0, 0, 0, -0.4, -0.5, -0.6]))
    assert row.turns.tolist() == [1, 1, 0, 0, 0, 2, 3, 3]
    assert (row.length, recorder.count, recorder.turn) == (5, 8, 3)
    assert row.versions == (VersionSpan(3, 0, 7), VersionSpan(4, 7, 8))
    assert row.tops is None
    assert row.routes is None


def test_versions_have_no_gap_where_an_environment_wrote():
    recorder = Recorder(ints(7))
    recorder.add_turn(turn([1, 2], [0, 0], [(0, 0, 1), (1, 1, 2)]))
    recorder.add_text(ints(9, 9))
    recorder.add_turn(turn([3, 4], [0, 0], [(2, 0, 2)]))
    row = recorder.response(0, 0, truncated=False, own_prompt=True)
    assert row.versions == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 4), VersionSpan(2, 4, 6))
    assert row.prompt.tolist() == [7]


def test_likeliest_tokens_and_routes_stay_with_their_tokens():
    def tops(*ids):
        return Tops(np.asarray(ids, np.int32), -np.asarray(ids, np.float32))

    def routes(count, first):
        return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)

    recorder = Recorder(ints(7, 8))
    # Two tokens of prompt and two of response have three routes. The second turn's reply has six routes, from its own
    # pass.
    recorder.add_turn(turn([1, 2], [0, 0], [(0, 0, 2)], routes=routes(3, 10), tops=tops([1, 3], [2, 4])))
    recorder.add_text(ints(50, 51))
    recorder.add_turn(turn([5], [0], [(0, 0, 1)], routes=routes(6, 20), tops=tops([5, 6])))
    row = recorder.response(0, 0, truncated=False, own_prompt=False)
    # The last token of the first turn went through the layers in the second turn's pass.
    assert row.routes.ravel().tolist() == [10, 11, 12, 23, 24, 25]
    assert row.tops.ids.tolist() == [[1, 3], [2, 4], [-1, -1], [-1, -1], [5, 6]]
    assert row.tops.logprobs.tolist() == [[-1, -3], [-2, -4], [-np.inf] * 2, [-np.inf] * 2, [-5, -6]]


def test_a_trajectory_without_a_turn_has_no_tokens():
    row = Recorder(ints(7)).response(0, 0, truncated=False, own_prompt=False)
    assert (row.length, row.token_ids.dtype, row.versions, row.trained_rows) == (0, np.int32, (), ())
