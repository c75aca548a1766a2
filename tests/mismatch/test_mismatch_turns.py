"""Tests of the mismatch by turn and after an environment's tokens, on numbers by hand."""

import math

import numpy as np
import pytest

from rljax.mismatch.diagnosis import after_environment, count_labels, mismatch_by_turn, turns_of_mask

NAMES = {"token_count", "kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max", "extreme_rate"}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([1, 1, 1], [0, 0, 0]),  # no environment's token is before them
        ([1, 1, 0, 0, 2, 2, 2], [0, 0, 0, 0, 1, 2, 3]),
        ([1, 0, 2, 0, 0, 3, 3], [0, 0, 1, 0, 0, 1, 2]),
        ([1, 2, 2], [0, 0, 0]),  # the environment wrote nothing between two turns
        ([1, 0, 2, 3], [0, 0, 1, 2]),
        ([3, 3, 0, 4], [1, 2, 0, 1]),  # a further row, whose prompt ends with the environment's tokens
        ([0, 0, 1, 0, 2], [0, 0, 0, 0, 1]),  # a row with a prompt
        ([0, 0, 3, 3], [0, 0, 1, 2]),
        ([0, 0], [0, 0]),
        ([], []),
    ],
)
def test_distances_from_the_environment_by_hand(turns, expected):
    assert after_environment(np.array(turns, np.int32)).tolist() == expected


def test_runs_of_a_mask_are_numbered():
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 0, 1], bool)
    assert turns_of_mask(mask).tolist() == [0, 0, 1, 1, 0, 2, 0, 0, 3]
    assert turns_of_mask(np.ones(2, bool)).tolist() == [1, 1]


def test_labels_of_whole_numbers():
    assert count_labels((2, 3, 5, 9)) == ("1", "2", "3_to_4", "5_to_8", "ge_9")
    assert count_labels((2, 5, 17)) == ("1", "2_to_4", "5_to_16", "ge_17")


def trajectories():
    """Returns two trajectories. The environment's tokens have numbers that must not count."""
    turns = [np.array([1, 1, 0, 0, 2, 2, 0, 3]), np.array([1, 0, 2])]
    log_ratios = [np.array([0.1, -0.2, 9.0, 9.0, 0.7, 0.3, 9.0, -0.6]), np.array([0.0, np.nan, -0.9])]
    rollout = [np.full(8, -2.0), np.full(3, -1.0)]
    return [r + lr for r, lr in zip(rollout, log_ratios, strict=True)], rollout, turns


@pytest.mark.parametrize("chunk", [2**20, 4])
def test_buckets_of_turns_by_hand(chunk):
    found = mismatch_by_turn(*trajectories(), chunk=chunk)
    members = {
        "turn_1": [0.1, -0.2, 0.0],
        "turn_2": [0.7, 0.3, -0.9],
        "turn_3_to_4": [-0.6],
        "after_1": [0.7, -0.6, -0.9],
        "after_2_to_4": [0.3],
    }
    assert set(found) == {f"{label}/{name}" for label in members for name in NAMES}
    for label, values in members.items():
        n = len(values)
        assert found[f"{label}/token_count"] == n
        assert found[f"{label}/kl"] == pytest.approx(-sum(values) / n)
        assert found[f"{label}/k3_kl"] == pytest.approx(sum(math.expm1(x) - x for x in values) / n)
        assert found[f"{label}/logprob_abs_diff_mean"] == pytest.approx(sum(map(abs, values)) / n)
        assert found[f"{label}/logprob_abs_diff_max"] == pytest.approx(max(map(abs, values)))
        assert found[f"{label}/extreme_rate"] == pytest.approx(sum(abs(x) > 0.5 for x in values) / n)


def test_late_turns_and_distances_share_the_last_buckets():
    turns = np.concatenate([[0], np.full(20, 9), [0], np.full(3, 12)])
    found = mismatch_by_turn([np.full(25, -1.5)], [np.full(25, -1.0)], [turns])
    counts = {name.removesuffix("/token_count"): n for name, n in found.items() if name.endswith("token_count")}
    assert counts == {"turn_ge_9": 23, "after_1": 2, "after_2_to_4": 3 + 2, "after_5_to_16": 12, "after_ge_17": 4}


def test_tokens_without_a_finite_number_do_not_count():
    found = mismatch_by_turn([np.array([-1.0, np.nan])], [np.array([-1.0, -1.0])], [np.array([1, 1])])
    assert found["turn_1/token_count"] == 1
    assert mismatch_by_turn([], [], []) == {}
