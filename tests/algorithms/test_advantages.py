"""Advantages are compared with numbers worked by hand."""

import numpy as np
import pytest

from rljax.algorithms.advantages import AdvantageConfig, compute_advantages, groups_with_loss, groups_with_signal


def advantages(rewards, estimator="rloo", lengths=None, **fields):
    lengths = np.ones(np.shape(rewards), np.int32) if lengths is None else np.asarray(lengths)
    config = AdvantageConfig(estimator=estimator, **fields)
    return compute_advantages(np.asarray(rewards), config, lengths=lengths, max_response_tokens=100)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # The others' mean is 1/3 for a winner and 2/3 for a loser.
        ("rloo", [[2 / 3, -2 / 3, 2 / 3, -2 / 3], [0, 0, 0, 0]]),
        ("grpo", [[0.8660239, -0.8660239, 0.8660239, -0.8660239], [0, 0, 0, 0]]),  # 0.5 / (sqrt(1/3) + 1e-6)
        ("grpo_no_std", [[0.5, -0.5, 0.5, -0.5], [0, 0, 0, 0]]),
        ("reinforce", [[0.25, -0.75, 0.25, -0.75], [0.25, 0.25, 0.25, 0.25]]),  # the batch's mean is 3/4
    ],
)
def test_estimators_by_hand(estimator, expected):
    result = advantages([[1, 0, 1, 0], [1, 1, 1, 1]], estimator)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert result.dtype == np.float32


def test_overlong_by_hand():
    """With limit 100 and buffer 20 there is no penalty up to 80 tokens, half at 90, and all at 100."""
    lengths, fields = np.array([[80, 81, 90, 100, 1]]), {"overlong_buffer_tokens": 20, "overlong_factor": 2.0}
    result = advantages([[1, 1, 1, 1, 1]], "grpo_no_std", lengths, **fields)
    np.testing.assert_allclose(result, [[0.62, 0.52, -0.38, -1.38, 0.62]], rtol=1e-6)  # less 0, 0.1, 1, 2 and 0
    assert groups_with_loss(result).tolist() == [True]
    assert not advantages([[1, 1, 1, 1, 1]], "grpo_no_std", lengths).any()  # off by default
    # In float32, 0.3 less the penalty 0.1 at half of the buffer is not 0.2 to the bit. That gives nothing.
    rewards, fields = np.array([[0.3, 0.2]], np.float32), {"overlong_buffer_tokens": 20, "overlong_factor": 0.2}
    assert np.ptp(rewards.astype(np.float64) - [[0.1, 0.0]]) > 0
    assert not advantages(rewards, lengths=[[90, 9]], **fields).any()
    assert advantages(rewards, lengths=[[91, 9]], **fields).any()


def test_failed_responses_are_left_out_of_their_group():
    rewards = [[1, np.nan, 0, 0], [1, 0, np.nan, np.nan], [np.nan, np.nan, np.nan, 1], [1, 0, 0, 0]]
    expected = [[1, 0, -0.5, -0.5], [1, -1, 0, 0], [0, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]]
    np.testing.assert_allclose(advantages(rewards), expected, rtol=1e-6)
    no_std = advantages(rewards, "grpo_no_std")
    np.testing.assert_allclose(no_std[0], [2 / 3, 0, -1 / 3, -1 / 3], rtol=1e-6)
    assert groups_with_loss(no_std).tolist() == [True, True, False, True]
    assert groups_with_signal(rewards).tolist() == [True, True, False, True]
    # For reinforce, the mean of the ten known rewards is 0.4.
    reinforce = advantages(rewards, "reinforce")
    np.testing.assert_allclose(reinforce[0], [0.6, 0, -0.4, -0.4], rtol=1e-6)
    assert groups_with_loss(reinforce).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards": np.zeros((3, 1))}, r"g at least 2, got shape \(3, 1\)"),
        ({"lengths": np.zeros((2, 3))}, r"both be \[b, g\], got \(2, 2\) and \(2, 3\)"),
        ({"rewards": [[np.nan, np.inf]]}, "for failed ones, got 1 infinite"),
        ({"estimator": "gae"}, r"estimator must be one of .*, got 'gae'"),
        ({"overlong_buffer_tokens": -1}, "overlong_buffer_tokens must not be negative, got -1"),
        ({"overlong_factor": float("nan")}, "overlong_factor must be finite and not negative, got nan"),
    ],
)
def test_mistakes_are_quoted(given, message):
    with pytest.raises(ValueError, match=message):
        advantages(**{"rewards": np.zeros((2, 2))} | given)


SUM = np.float32(0.3)
STEP = np.float32(2.0**-25)  # one unit in the last place of float32 at 0.3
EQUAL = [
    [0.3, 0.1 + 0.2, 0.3, 0.3],
    [SUM, SUM + STEP, SUM + 2 * STEP, SUM],  # 2**-22 of 0.3 is 2.4 units in the last place
    [1.0, 1.0 + 2.0**-22, 1.0, 1.0],
    [-1.0, -1.0 - 2.0**-22, -1.0, np.nan],
    [0.0, 0.1 + 0.2 - 0.3, 0.0, 0.0],
    [0.0, 2.0**-40, 0.0, 0.0],
]
DIFFERENT = [
    [SUM, SUM + 3 * STEP, SUM, SUM],
    [1.0, 1.0 + 3 * 2.0**-23, 1.0, 1.0],
    [0.0, 2.0**-39, 0.0, 0.0],
    [1e-6, 2e-6, 1e-6, 1e-6],
    [-(2.0**-22), 2.0**-22, 0.0, 0.0],
]


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "grpo_no_std", "optimal_token"])
def test_rewards_equal_but_for_rounding_give_exactly_nothing(estimator):
    rewards = np.array(EQUAL + DIFFERENT, np.float64)
    expected = [False] * len(EQUAL) + [True] * len(DIFFERENT)
    assert groups_with_signal(rewards).tolist() == expected
    assert groups_with_loss(advantages(rewards, estimator)).tolist() == expected
    assert not advantages(EQUAL, estimator).any()
    centered = np.array(DIFFERENT) - np.mean(DIFFERENT, axis=1, keepdims=True)
    np.testing.assert_array_equal(advantages(DIFFERENT, "grpo_no_std"), centered.astype(np.float32))


def test_under_reinforce_a_batch_that_only_rounds_gives_nothing():
    assert advantages([[1.0], [0.0]], "reinforce").tolist() == [[0.5], [-0.5]]
    assert not advantages(EQUAL[:2], "reinforce").any()
    result = advantages([EQUAL[0], [1.0, 0.0, 1.0, 1.0]], "reinforce")  # the batch's mean is 0.525
    np.testing.assert_allclose(result, [[-0.225] * 4, [0.475, -0.525, 0.475, 0.475]], rtol=1e-6)
