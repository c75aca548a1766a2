"""Tests of the facts of a log by hand: sizes, growth, the first failure, and the limits that are crossed."""

import numpy as np
import pytest

from rljax.diagnose.course import effect, find_decline, read_course, smooth, window
from rljax.diagnose.signals import Log
from rljax.diagnose.tables import THRESHOLDS, cross
from rljax.mismatch.names import PUBLISHED_BARS

STEPS = np.arange(1, 41)


def log(**signals):
    columns = {name: name for name in signals}
    return Log(
        "rljax", STEPS, {name: np.broadcast_to(values, 40).astype(float) for name, values in signals.items()}, columns
    )


def test_the_error_of_the_logits_is_free_of_entropy():
    """Tokens that are certain do not change the ratio of both means, because both shrink alike."""
    lr = np.array([0.3, -0.2, 0.1, -0.25])
    k3, gap = np.mean(np.expm1(lr) - lr), np.mean(np.abs(lr))
    diluted = np.concatenate([lr, np.zeros(12)])
    assert effect(np.mean(np.expm1(diluted) - diluted), np.mean(np.abs(diluted))) == pytest.approx(effect(k3, gap))
    assert effect(0.0, 0.0) == 0.0


def test_windows_leave_missing_numbers_out():
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0, 5.0]), 3), [1.0, 2.0, 4.0, 4.0])
    assert [window(10), window(100), window(400)] == [3, 5, 21]


def test_a_collapse_begins_where_the_reward_leaves_its_peak():
    reward = np.concatenate([np.linspace(0.1, 0.8, 20), np.linspace(0.76, 0.0, 10), np.zeros(10)])
    assert find_decline(reward) == 20  # 0.76 is above nine tenths of the peak, and the next number is not
    assert find_decline(np.linspace(0.1, 0.8, 40)) is None
    back = np.concatenate([np.full(20, 0.8), np.full(10, 0.1), np.full(10, 0.7)])
    assert find_decline(back) is None


def test_growth_before_and_after_the_decline():
    reward = np.where(STEPS <= 30, 0.8, 0.0)
    leads = np.where(STEPS <= 20, 0.01, 0.1)
    course = read_course(log(reward=reward, logprob_abs_diff_mean=leads, grad_norm=np.where(STEPS <= 32, 1.0, 5.0)))
    assert course.decline == 29  # the mean of steps 29 to 31 is below nine tenths of the peak
    assert course.onsets["gap"].step == 20  # the mean of steps 19 to 21 is 0.04
    assert course.onsets["gap"].lead == 9
    assert course.onsets["grad_norm"].lead < 0
    assert course.onsets["length"].step is None


def test_buckets_are_weighted_by_their_tokens():
    bucket = {
        "token_count": np.where(STEPS <= 20, 30.0, 10.0),
        "k3_kl": np.where(STEPS <= 20, 2e-4, 6e-4),
        "logprob_abs_diff_mean": np.full(40, 0.02),
    }
    few = {name: values / 1000 if name == "token_count" else values for name, values in bucket.items()}
    of_log = log(logprob_abs_diff_mean=0.02, k3_kl=3e-4)
    course = read_course(
        Log("rljax", STEPS, of_log.signals, of_log.columns, {"mismatch_position": {"lt_4": bucket, "ge_4": few}})
    )
    assert course.effects["mismatch_position"] == {"lt_4": pytest.approx(3e-4 / 0.02)}
    assert course.effect_last == pytest.approx(0.015)


def test_limits_are_those_of_the_field():
    k3 = np.where(STEPS > 35, 0.02, 5e-4)
    found = {(one.threshold.signal, one.threshold.limit): one for one in cross({"k3_kl": k3}, STEPS)}
    assert set(found) == {("k3_kl", 1e-3), ("k3_kl", 0.015)}
    of_prime_rl = found["k3_kl", 0.015]
    assert (of_prime_rl.is_crossed, of_prime_rl.steps, of_prime_rl.measured, of_prime_rl.first) == (True, 5, 40, 36)
    assert of_prime_rl.value == 0.02
    kept = cross({"k3_kl": np.full(40, 5e-4)}, STEPS)
    assert not any(one.is_crossed for one in kept)
    assert all(one.source and one.meaning for one in THRESHOLDS)
    names = {"nemo_rl": "token_mult_prob_error", "prime_rl": "k3_kl", "slime": "logprob_abs_diff_mean"}
    bars = {(names[project], bar) for (project, _), bar in PUBLISHED_BARS.items()}
    assert bars < {(one.signal, one.limit) for one in THRESHOLDS}
