"""Tests of another program's rows: the responses made of them, and the line that refuses each wrong row."""

import math

import numpy as np
import pytest

from rljax.rollout.external.rows import RowLimits, read_trajectories, typed_rows
from rljax.rollout.types import SamplingParams

LIMITS = RowLimits(10, 3, SamplingParams(5), max_rows=2)
ROW = {
    "group": 7,
    "prompt_ids": [1, 2],
    "token_ids": [3, 4, 5, 6],
    "mask": [True, True, False, True],
    "logprobs": [-0.5, -1.0, None, -2.0],
    "reward": 0.25,
    "version": 3,
}


def read(*rows, limits=LIMITS):
    return read_trajectories(typed_rows(enumerate(rows, 1), "FILE", limits), "FILE", limits)


def without(name):
    return {key: value for key, value in ROW.items() if key != name}


def refusal(*rows, limits=LIMITS):
    with pytest.raises(ValueError, match="FILE: row") as caught:
        read(*rows, limits=limits)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_row_becomes_a_response_of_turns():
    (one,) = read(ROW | {"truncated": True})
    response = one.response
    assert (one.group, one.reward, one.rows) == ("7", 0.25, (1,))
    np.testing.assert_array_equal(response.prompt, [1, 2])
    np.testing.assert_array_equal(response.response, [3, 4, 5, 6])
    np.testing.assert_array_equal(response.turns, [1, 1, 0, 2])
    np.testing.assert_array_equal(response["rollout_logprobs"], np.float32([-0.5, -1.0, 0.0, -2.0]))
    assert response.response.dtype == response.turns.dtype == np.int32
    assert response.length == 3
    assert response.truncated
    assert response["version"].tolist() == [3] * 4


def test_versions_rewards_turns_and_rounding():
    """The environment's token has the version of the token before it, whatever its own entry says."""
    (one,) = read(ROW | {"version": [2, 3, None, 3], "reward": None})
    assert one.response["version"].tolist() == [2, 3, 3, 3]
    assert math.isnan(one.reward)  # it failed
    (one,) = read(ROW | {"mask": [False, True, False, True], "version": [9, 4, 8, 5], "reward": math.nan})
    assert one.response["version"].tolist() == [4, 4, 4, 5]
    assert (one.oldest_version, one.newest_version) == (4, 5)
    assert math.isnan(one.reward)
    (one,) = read(without("mask") | {"turns": [2, 2, 0, 5], "logprobs": [1e-6, -1.0, 5.0, -2.0]})
    np.testing.assert_array_equal(one.response.turns, [2, 2, 0, 5])
    assert one.response["rollout_logprobs"].tolist() == [0.0, -1.0, 0.0, -2.0]


def test_rows_of_one_trajectory_are_one_response():
    """The second row of a trajectory may have a longer prompt, and its turns continue the first row's turns."""
    one = ROW | {"trajectory": "a"}
    second = one | {"prompt_ids": [1, 2, 3, 4, 5], "token_ids": [6, 7], "mask": [True, True], "logprobs": [-1, -1]}
    first, other = read(one, second, ROW | {"trajectory": "b"})
    assert (first.rows, other.rows) == ((1, 2), (3,))
    (further,) = first.response.further
    np.testing.assert_array_equal(further.prompt, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(further.turns, [3, 3])
    assert first.response.length == 5
    assert len(read(ROW, ROW)) == 2  # without a name each row is a trajectory
    assert "have one reward, got [0.25, 1.0]" in refusal(one, one | {"reward": 1.0, "turns": None})
    assert "rollout.episode.max_rows = 2" in refusal(one, one, one)
    assert "must follow one another" in refusal(one, ROW, one)
    assert "expected at most 8" in refusal(one, one | {"prompt_ids": [1] * 5})


def test_likeliest_tokens_come_in_order():
    """An environment's token has none, whatever the row says."""
    limits = RowLimits(10, 3, SamplingParams(5, reported=2))
    half, quarter, rest = (math.log(share) for share in (0.5, 0.25, 0.125))
    ids, values = [[4, 3], [8, 4], [1, 2], [1, 2]], [[quarter, half], [half, quarter], [None, None], [half, quarter]]
    row = ROW | {"logprobs": [half, quarter, None, rest], "top_ids": ids, "top_logprobs": values}
    for none in ({}, {name: [*row[name][:2], None, row[name][3]] for name in ("top_ids", "top_logprobs")}):
        (one,) = read(row | none, limits=limits)
        np.testing.assert_array_equal(one.response["top_ids"], [[3, 4], [8, 4], [-1, -1], [1, 2]])
        np.testing.assert_allclose(one.response["top_logprobs"][0], [half, quarter], rtol=1e-6)
        assert np.isneginf(one.response["top_logprobs"][2]).all()
    wrong = [({"top_logprobs": [[None, half], *values[1:]]}, "must be numbers of at most 0")]
    wrong += [({"top_ids": None}, "lacks top_ids"), ({"top_logprobs": [[0.0]]}, "top_logprobs has 1 entries")]
    wrong += [({"logprobs": [-5.0, quarter, None, rest]}, "nats from their likeliest")]
    for change, said in [*wrong, ({"top_ids": [[4], *ids[1:]]}, "equal lengths")]:
        assert said in refusal(row | change, limits=limits)


def test_routes_are_the_experts_of_each_token_but_the_last():
    limits = RowLimits(10, 3, SamplingParams(5), routes=(2, 2, 8))
    routes = [[0, 1, 2, 3], [7, 6, 5, 4], [0, 2, 4, 6], [1, 3, 5, 7], [0, 1, 0, 1]]
    (one,) = read(ROW | {"routes": routes}, limits=limits)
    stored = one.response.columns["routes"]  # 1 + the expert, and 0 for the last token
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(stored, [*(np.reshape(routes, (5, 2, 2)) + 1), np.zeros((2, 2))])
    assert "routes" not in read(ROW | {"routes": routes})[0].response.columns
    wrong = [(None, "lacks routes, which rollout.router_replay = r3 needs"), (routes[1:], "has 4 entries, expected 5")]
    wrong += [([*routes[1:], [0, 1, 2]], "a list of 2 x 2 experts, layer by layer, got [0, 1, 2] at token 4")]
    wrong += [([*routes[1:], None], "got `null` - at `$.routes[4]`")]
    for value, said in [*wrong, ([*routes[1:], [0, 8, 0, 0]], "must be in 0 .. 7, got 0 .. 8")]:
        assert said in refusal(ROW | {"routes": value}, limits=limits)


def test_a_row_without_a_column_is_refused():
    for name in ("prompt_ids", "token_ids", "logprobs", "reward", "version", "group"):
        assert f"Object missing required field `{name}`" in refusal(without(name))
    assert "lacks mask (or turns)" in refusal(without("mask"))


LONG = RowLimits(10, 3, SamplingParams(12, stop_token_ids=(9,)))


def test_what_is_odd_is_doubted():
    """Equal log-probabilities of many tokens are odd, and so are tokens after the stop token of a turn."""
    eight = {"token_ids": [3] * 9, "mask": [True] * 8 + [False]}
    for logprobs, is_odd in (([0.0] * 9, 1), ([0] * 8 + [-1], 1), ([-2.5] * 9, 1), ([-2.5] * 7 + [-2.0, 0], 0)):
        (one,) = read(ROW | eight | {"logprobs": logprobs}, limits=LONG)
        assert list(one.doubts) == ["rollout/constant_logprobs"] * is_odd
    (few,) = read(ROW | {"logprobs": [0.0] * 4})
    assert few.doubts == {}
    for turns, token in (([1, 1, 1, 1], 2), ([1, 1, 0, 1], 3), ([1, 1, 2, 2], 0), ([1, 1, 0, 2], 0)):
        row = without("mask") | {"token_ids": [3, 9, 5, 6], "turns": turns, "logprobs": [-1, -2, -3, -4]}
        (one,) = read(row, limits=LONG)
        said = f"FILE: row 1: token_ids goes on at token {token} after the stop token 9 of the same turn"
        found = {name: line[: len(said)] for name, line in one.doubts.items()}
        assert found == ({"rollout/after_stop": said} if token else {})


REFUSED = {
    "group": [("", "Expected `str` of length >= 1 - at `$.group`"), (True, "got `bool`"), (None, "got `null`")],
    "prompt_ids": [
        *(([1, 2, 3, 4], "data.max_prompt_tokens = 3"), ([], "at least one token"), ([10], "in 0 .. 9, got 10")),
        *(("12", "Expected `array`, got `str` - at `$.prompt_ids`"), ([[1]], "got `array` - at `$.prompt_ids[0]`")),
    ],
    "token_ids": [
        ([3, 4, 5], "mask has 4 entries, expected 3, one for each of token_ids"),
        *(([3, 4, 5, 6, 7, 8], "rollout.max_response_tokens = 5"), ([3, 4, 5, -1], "in 0 .. 9, got -1")),
        *(([3, 4, 5, 6.0], "got `float` - at `$.token_ids[3]`"), ([3, 4, 5, 2**70], f"in 0 .. 9, got 3 .. {2**70}")),
        ([3, 4, True, 6], "Expected `int`, got `bool` - at `$.token_ids[2]`"),
    ],
    "mask": [
        *(([True] * 3, "mask has 3 entries, expected 4"), ([1, 1, 2, 0], "true or false only, got 2")),
        *(([False] * 4, "sampled none"), (None, "lacks mask (or turns)")),
    ],
    "logprobs": [
        ([-1, -1, 0], "logprobs has 3 entries, expected 4"),
        ([-1, None, 0, -1], "finite where the policy sampled, got nan at token 1"),
        *(([-1, -1, 0, -math.inf], "got -inf at token 3"), ([-1, -1, 0, -1e300], "got -inf at token 3")),
        (["-1", -1, 0, -1], "Expected `float | null`, got `str` - at `$.logprobs[0]`"),
        ([-1, 0.0011, 0, -1], "at most 0 (nats), got 0.0011 at token 1"),
        ([-1, -10001, 0, -1], "at least -10000 (nats), got -10001 at token 1"),
    ],
    "reward": [("1", "got `str` - at `$.reward`"), (math.inf, "finite number"), (10**400, "Number out of range")],
    "version": [
        *((-1, "version must be in 0"), ([1, 1], "version has 2 entries"), (1.5, "Expected `int | array`, got")),
        ([None, 3, 3, 3], "whole number where the policy sampled, got null"),
    ],
    "turns": [([1, 1, 1, 2], "mask is False at token 2"), ([2, 2, 0, 1], "must not fall")],
    "truncated": [("no", "Expected `bool | null`, got `str` - at `$.truncated`")],
}


@pytest.mark.parametrize(("name", "value", "said"), [(n, v, s) for n, cases in REFUSED.items() for v, s in cases])
def test_a_wrong_value_is_refused_in_one_line(name, value, said):
    assert said in refusal(ROW | {name: value})
