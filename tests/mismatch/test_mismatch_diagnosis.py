"""Tests of buckets, sign skew, the length split and turns, on numbers by hand and planted causes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.mismatch import merge, mismatch_metrics, read_tokens
from rljax.mismatch.diagnosis import (
    after_environment,
    bucket_labels,
    count_labels,
    finalize_buckets,
    finalize_sign_skew,
    mismatch_by,
    mismatch_by_turn,
    sign_skew,
    split_sum_rise,
    turns_of_mask,
)

LR = np.array([[0.1, -0.2, 0.3, 0.6], [0.0, 0.4, -0.7, 9.0]])
ROLLOUT = np.full((2, 4), -12.0)
MASK = np.array([[1, 0, 1, 1], [1, 1, 1, 0]])
NAMES = ("token_count", "kl", "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max", "extreme_rate")


def by_positions(tokens, edges):
    return mismatch_by(tokens, tokens.sequences.position, edges)


def assert_buckets(buckets, members):
    assert_named(finalize_buckets(buckets, range(len(members))), dict(enumerate(members)))


def assert_named(found, members):
    """Checks the metrics of the log-ratios in each bucket, by its label."""
    expected = {}
    for label, values in members.items():
        lr, size = np.array(values), np.abs(values)
        numbers = lr.size, -lr.mean(), np.mean(np.expm1(lr) - lr), size.mean(), size.max(), np.mean(size > 0.5)
        expected |= {f"{label}/{name}": number for name, number in zip(NAMES, numbers, strict=True)}
    assert found == pytest.approx(expected)


def test_buckets_by_hand():
    trainer = ROLLOUT + LR
    tokens = read_tokens(trainer, ROLLOUT, MASK)
    by_position = by_positions(tokens, (2, 3))  # the token outside the mask takes no position
    assert_buckets(by_position, [[0.1, 0.0], [0.3, 0.4], [0.6, -0.7]])
    entropy = np.array([[0.05, 9.0, 0.5, np.nan], [3.0, 0.5, 0.0, 0.0]])
    assert_buckets(mismatch_by(tokens, entropy, (0.1, 1.0)), [[0.1, -0.7], [0.3, 0.4], [0.0]])
    staleness = np.array([[0, 0, 1, 5], [2, 0, 1, 0]])
    counts = np.array([[1, 5, 0, 2], [0, 3, 2, 1]])
    assert_buckets(mismatch_by(tokens, counts, (2, 3), least=1), [[0.1], [0.6, -0.7], [0.4]])
    assert_buckets(mismatch_by(tokens, staleness, (1, 2, 3)), [[0.1, 0.4], [0.3, -0.7], [0.0], [0.6]])
    rows = [[a[i : i + 1] for a in (trainer, ROLLOUT, MASK, staleness)] for i in (1, 0)]
    halves = [mismatch_by(read_tokens(*row), stale, (1, 2, 3)) for *row, stale in rows]
    assert_buckets(merge(*halves), [[0.1, 0.4], [0.3, -0.7], [0.0], [0.6]])
    # In a packed row, positions restart with each sequence.
    arrays = [each.reshape(1, 8) for each in (trainer, ROLLOUT, MASK)]
    packed = read_tokens(*arrays, sequence_ids=np.array([[0, -1, 0, 0, 1, 1, 1, 0]]), num_sequences=2)
    assert_buckets(by_positions(packed, (2, 3)), [[0.1, 0.0], [0.3, 0.4], [0.6, -0.7]])


def test_buckets_on_the_device():
    """Each has a name. ROLLOUT + LR rounded to float32 moves a log-ratio by 5e-7."""

    def of(*arrays):
        return finalize_buckets(by_positions(read_tokens(*arrays), (2, 3)), bucket_labels((2, 3)))

    found = jax.jit(of)(*map(jnp.asarray, (ROLLOUT + LR, ROLLOUT, MASK)))
    for name, value in of(ROLLOUT + LR, ROLLOUT, MASK).items():
        np.testing.assert_allclose(found[name], value, rtol=5e-6, atol=1e-6, err_msg=name)
        assert type(value) is float
    assert bucket_labels((64, 256, 1024)) == ("lt_64", "64_to_256", "256_to_1024", "ge_1024")
    assert bucket_labels((0.01,)) == ("lt_0.01", "ge_0.01")
    assert count_labels((2, 3, 5, 9)) == ("1", "2", "3_to_4", "5_to_8", "ge_9")


def test_sign_skew_by_hand():
    advantages = np.array([[2.0, 5.0, -1.0, 0.0], [1.0, -2.0, np.nan, 7.0]])
    # The valid pairs (A, lr) are (2, .1) (-1, .3) (0, .6) (1, 0) (-2, .4). abs(A) sums to 6.
    expected = {
        "log_ratio_skew": (0.2 - 0.3 - 0.8) / 6,
        "ratio_skew": (2 * math.expm1(0.1) - math.expm1(0.3) - 2 * math.expm1(0.4)) / 6,
        "sign_skew": (2 - 1 - 2) / 6,
        "positive_log_ratio": 0.1 / 2,
        "negative_log_ratio": 0.7 / 2,
    }

    def of(*arrays):
        return sign_skew(read_tokens(*arrays[:3]), arrays[3])

    arrays = (LR, np.zeros_like(LR), MASK, advantages)
    rows = [of(*(a[i : i + 1] for a in arrays)) for i in (1, 0)]
    for found in (of(*arrays), merge(*rows), jax.device_get(jax.jit(of)(*map(jnp.asarray, arrays)))):
        assert finalize_sign_skew(found) == pytest.approx(expected)


def test_the_rise_of_the_summed_form_is_split_exactly():
    def metrics(length, gap):
        lr = np.full((3, length), gap)
        return mismatch_metrics(lr, np.zeros_like(lr), np.ones_like(lr))

    for length, gap, rise, explained in ((300, 1e-3, 0.2, 0.2), (100, 4e-3, 0.3, 0.0), (200, 3e-3, 0.5, 0.1)):
        found = split_sum_rise(metrics(100, 1e-3), metrics(length, gap))
        expected = {"rise": rise, "length_explained": explained, "per_token": rise - explained}
        assert found == pytest.approx(expected, abs=1e-12)
    nothing = mismatch_metrics(*(np.zeros((1, 1)),) * 3)
    assert split_sum_rise(nothing, metrics(100, 1e-3))["per_token"] == pytest.approx(0.1)


def test_mistakes_say_what_was_expected():
    tokens = read_tokens(LR, LR, MASK)
    with pytest.raises(ValueError, match=r"edges must hold at least one number and increase, got \[2, 2\]"):
        mismatch_by(tokens, LR, (2, 2))
    with pytest.raises(ValueError, match=r"values must have the shape .*\(2, 4\), got \(2,\)"):
        mismatch_by(tokens, np.ones(2), (2, 3))
    with pytest.raises(ValueError, match=r"advantages must have the shape .*\(2, 4\), got \(2,\)"):
        sign_skew(tokens, np.ones(2))
    with pytest.raises(ValueError, match=r"labels must name each of the 2 buckets, got \('lt_2',\)"):
        finalize_buckets(by_positions(tokens, (2,)), ("lt_2",))


def test_distances_from_the_environment_by_hand():
    for turns, expected in (
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
    ):
        assert after_environment(np.array(turns, np.int32)).tolist() == expected
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 0, 1], bool)
    assert turns_of_mask(mask).tolist() == [0, 0, 1, 1, 0, 2, 0, 0, 3]
    assert turns_of_mask(np.ones(2, bool)).tolist() == [1, 1]


@pytest.mark.parametrize("chunk", [2**20, 4])
def test_buckets_of_turns_by_hand(chunk):
    """The environment's tokens have numbers that must not count, and one sampled token has none."""
    turns = [np.array([1, 1, 0, 0, 2, 2, 0, 3]), np.array([1, 0, 2, 2])]
    log_ratios = [np.array([0.1, -0.2, 9.0, 9.0, 0.7, 0.3, 9.0, -0.6]), np.array([0.0, np.nan, -0.9, np.nan])]
    rollout = [np.full(8, -2.0), np.full(4, -1.0)]
    trainer = [r + lr for r, lr in zip(rollout, log_ratios, strict=True)]
    members = {"turn_1": [0.1, -0.2, 0.0], "turn_2": [0.7, 0.3, -0.9], "turn_3_to_4": [-0.6]}
    members |= {"after_1": [0.7, -0.6, -0.9], "after_2_to_4": [0.3]}
    assert_named(mismatch_by_turn(trainer, rollout, turns, chunk=chunk), members)


def test_late_turns_and_distances_share_the_last_buckets():
    turns = np.concatenate([[0], np.full(20, 9), [0], np.full(3, 12)])
    found = mismatch_by_turn([np.full(25, -1.5)], [np.full(25, -1.0)], [turns])
    counts = {name.removesuffix("/token_count"): n for name, n in found.items() if name.endswith("token_count")}
    assert counts == {"turn_ge_9": 23, "after_1": 2, "after_2_to_4": 3 + 2, "after_5_to_16": 12, "after_ge_17": 4}
    assert mismatch_by_turn([], [], []) == {}
