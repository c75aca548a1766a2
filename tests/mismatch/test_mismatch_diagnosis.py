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


def k3(values):
    return [math.expm1(x) - x for x in values]


def by_positions(tokens, edges):
    return mismatch_by(tokens, tokens.sequences.position, edges)


def assert_buckets(buckets, members):
    assert_named(finalize_buckets(buckets, range(len(members))), dict(enumerate(members)))


def assert_named(found, members):
    """Checks the metrics of the log-ratios in each bucket, by its label."""
    for i, values in members.items():
        n = max(len(values), 1)
        assert found[f"{i}/token_count"] == len(values)
        assert found[f"{i}/kl"] == pytest.approx(-sum(values) / n)
        assert found[f"{i}/k3_kl"] == pytest.approx(sum(k3(values)) / n)
        assert found[f"{i}/logprob_abs_diff_mean"] == pytest.approx(sum(map(abs, values)) / n)
        assert found[f"{i}/logprob_abs_diff_max"] == pytest.approx(max(map(abs, values), default=0))
        assert found[f"{i}/extreme_rate"] == pytest.approx(sum(abs(x) > 0.5 for x in values) / n)
    assert len(found) == 6 * len(members)


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


def test_packed_positions_restart_with_each_sequence():
    trainer, rollout = (ROLLOUT + LR).reshape(1, 8), ROLLOUT.reshape(1, 8)
    ids = np.array([[0, -1, 0, 0, 1, 1, 1, 0]])
    packed = read_tokens(trainer, rollout, MASK.reshape(1, 8), sequence_ids=ids, num_sequences=2)
    assert_buckets(by_positions(packed, (2, 3)), [[0.1, 0.0], [0.3, 0.4], [0.6, -0.7]])


def test_buckets_on_the_device():
    def of(*arrays):
        return finalize_buckets(by_positions(read_tokens(*arrays), (2, 3)), "abc")

    found = jax.jit(of)(*map(jnp.asarray, (ROLLOUT + LR, ROLLOUT, MASK)))
    for name, values in of(ROLLOUT + LR, ROLLOUT, MASK).items():
        # ROLLOUT + LR rounded to float32 moves a log-ratio by 5e-7.
        np.testing.assert_allclose(found[name], values, rtol=5e-6, atol=1e-6, err_msg=name)


def test_labels_name_every_bucket():
    assert bucket_labels((64, 256, 1024)) == ("lt_64", "64_to_256", "256_to_1024", "ge_1024")
    assert bucket_labels((0.01,)) == ("lt_0.01", "ge_0.01")
    assert count_labels((2, 3, 5, 9)) == ("1", "2", "3_to_4", "5_to_8", "ge_9")
    assert count_labels((2, 5, 17)) == ("1", "2_to_4", "5_to_16", "ge_17")


def test_labelled_numbers():
    buckets = by_positions(read_tokens(ROLLOUT + LR, ROLLOUT, MASK), (2,))
    found = finalize_buckets(buckets, bucket_labels((2,)))
    assert found["lt_2/kl"] == pytest.approx(-0.05)
    assert found["ge_2/token_count"] == 4.0
    assert all(type(value) is float for value in found.values())
    with pytest.raises(ValueError, match=r"labels must name each of the 2 buckets, got \('lt_2',\)"):
        finalize_buckets(buckets, ("lt_2",))


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

    arrays = (ROLLOUT + LR, ROLLOUT, MASK, advantages)
    assert finalize_sign_skew(of(*arrays)) == pytest.approx(expected)
    rows = [of(*(a[i : i + 1] for a in arrays)) for i in (1, 0)]
    assert finalize_sign_skew(merge(*rows)) == pytest.approx(expected)
    device = jax.jit(lambda *arrays: finalize_sign_skew(of(*arrays)))(
        *map(jnp.asarray, (LR, np.zeros_like(LR), MASK, advantages))
    )
    for name, value in expected.items():
        assert float(device[name]) == pytest.approx(value, rel=1e-6), name


def test_the_rise_of_the_summed_form_is_split_exactly():
    def metrics(length, gap):
        lr = np.full((3, length), gap)
        return mismatch_metrics(lr, np.zeros_like(lr), np.ones_like(lr))

    longer = split_sum_rise(metrics(100, 1e-3), metrics(300, 1e-3))
    assert longer == pytest.approx({"rise": 0.2, "length_explained": 0.2, "per_token": 0.0}, abs=1e-12)
    noisier = split_sum_rise(metrics(100, 1e-3), metrics(100, 4e-3))
    assert noisier == pytest.approx({"rise": 0.3, "length_explained": 0.0, "per_token": 0.3}, abs=1e-12)
    both = split_sum_rise(metrics(100, 1e-3), metrics(200, 3e-3))
    assert both == pytest.approx({"rise": 0.5, "length_explained": 0.1, "per_token": 0.4}, abs=1e-12)
    nothing = mismatch_metrics(*(np.zeros((1, 1)),) * 3)
    assert split_sum_rise(nothing, metrics(100, 1e-3))["per_token"] == pytest.approx(0.1)


def test_mistakes_say_what_was_expected():
    with pytest.raises(ValueError, match=r"edges must hold at least one number and increase, got \[2, 2\]"):
        mismatch_by(read_tokens(LR, LR, MASK), LR, (2, 2))
    with pytest.raises(ValueError, match=r"values must have the shape .*\(2, 4\), got \(2,\)"):
        mismatch_by(read_tokens(LR, LR, MASK), np.ones(2), (2, 3))
    with pytest.raises(ValueError, match=r"advantages must have the shape .*\(2, 4\), got \(2,\)"):
        sign_skew(read_tokens(LR, LR, MASK), np.ones(2))


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
    assert_named(found, members)


def test_late_turns_and_distances_share_the_last_buckets():
    turns = np.concatenate([[0], np.full(20, 9), [0], np.full(3, 12)])
    found = mismatch_by_turn([np.full(25, -1.5)], [np.full(25, -1.0)], [turns])
    counts = {name.removesuffix("/token_count"): n for name, n in found.items() if name.endswith("token_count")}
    assert counts == {"turn_ge_9": 23, "after_1": 2, "after_2_to_4": 3 + 2, "after_5_to_16": 12, "after_ge_17": 4}


def test_tokens_without_a_finite_number_do_not_count():
    found = mismatch_by_turn([np.array([-1.0, np.nan])], [np.array([-1.0, -1.0])], [np.array([1, 1])])
    assert found["turn_1/token_count"] == 1
    assert mismatch_by_turn([], [], []) == {}
