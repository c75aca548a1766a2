"""Tests of the facts of a log by hand: sizes, growth, the first failure, the limits that are crossed, and turns."""

import numpy as np
import pytest

from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import effect, find_decline, read_course, smooth
from rljax.diagnose.evidence import TABLES, Facts, cross
from rljax.diagnose.signals import Log, read_signals
from rljax.mismatch.names import PUBLISHED_BARS

STEPS = np.arange(1, 41)


def log(**signals):
    arrays = {name: np.broadcast_to(values, 40).astype(float) for name, values in signals.items()}
    return Log("rljax", STEPS, arrays, {name: name for name in signals})


def test_the_error_of_the_logits_is_free_of_entropy():
    """Tokens that are certain do not change the ratio of both means, because both shrink alike."""
    lr = np.array([0.3, -0.2, 0.1, -0.25])
    k3, gap = np.mean(np.expm1(lr) - lr), np.mean(np.abs(lr))
    diluted = np.concatenate([lr, np.zeros(12)])
    assert effect(np.mean(np.expm1(diluted) - diluted), np.mean(np.abs(diluted))) == pytest.approx(effect(k3, gap))
    assert effect(0.0, 0.0) == 0.0


def test_a_collapse_begins_where_the_reward_leaves_its_peak():
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0, 5.0]), 3), [1.0, 2.0, 4.0, 4.0])
    reward = np.concatenate([np.linspace(0.1, 0.8, 20), np.linspace(0.76, 0.0, 10), np.zeros(10)])
    assert find_decline(reward) == 20  # 0.76 is above nine tenths of the peak, and the next number is not
    sparse = np.full(4 * len(reward), np.nan)
    sparse[::4] = reward  # the reward of every fourth step
    assert find_decline(sparse) == 80
    assert find_decline(np.linspace(0.1, 0.8, 40)) is None
    back = np.concatenate([np.full(20, 0.8), np.full(10, 0.1), np.full(10, 0.7)])
    assert find_decline(back) is None


def test_growth_before_and_after_the_decline():
    reward = np.where(STEPS <= 30, 0.8, 0.0)
    leads = np.where(STEPS <= 20, 0.01, 0.1)
    course = read_course(log(reward=reward, logprob_abs_diff_mean=leads, grad_norm=np.where(STEPS <= 32, 1.0, 5.0)))
    assert course.decline == 29  # the mean of steps 29 to 31 is below nine tenths of the peak
    assert (course.onsets["gap"].step, course.onsets["gap"].lead) == (20, 9)  # the mean of steps 19 to 21 is 0.04
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
    buckets = {"mismatch_position": {"lt_4": bucket, "ge_4": few}}
    course = read_course(Log("rljax", STEPS, of_log.signals, of_log.columns, buckets))
    assert course.effects["mismatch_position"] == {"lt_4": pytest.approx(3e-4 / 0.02)}
    assert course.effect_last == pytest.approx(0.015)


def test_limits_are_those_of_the_field():
    k3 = np.where(STEPS > 35, 0.02, 5e-4)
    found = {(one.signal, one.limit): one for one in cross({"k3_kl": k3}, STEPS)}
    assert set(found) == {("k3_kl", 1e-3), ("k3_kl", 0.015)}
    of_prime_rl = found["k3_kl", 0.015]
    assert (of_prime_rl.is_crossed, of_prime_rl.steps, of_prime_rl.measured, of_prime_rl.first) == (True, 5, 40, 36)
    assert of_prime_rl.value == 0.02
    assert not any(one.is_crossed for one in cross({"k3_kl": np.full(40, 5e-4)}, STEPS))
    assert all(source and meaning for _, _, source, meaning in TABLES["limits"])
    names = {"nemo_rl": "token_mult_prob_error", "prime_rl": "k3_kl", "slime": "logprob_abs_diff_mean"}
    bars = {(names[project], bar) for (project, _), bar in PUBLISHED_BARS.items()}
    assert bars < {(signal, limit) for signal, limit, *_ in TABLES["limits"]}


def facts_of(near_rate, far_rate=0.0):
    """Returns the facts of a log whose turns have one gap. In each step 100 tokens follow an environment's closely."""
    turned = {"turn_1": (400, far_rate), "turn_2": (600, (100 * near_rate + 500 * far_rate) / 600)}
    turned |= {"after_1": (40, near_rate), "after_2_to_4": (60, near_rate), "after_5_to_16": (500, far_rate)}
    row = {"mismatch/k3_kl": 1e-4, "mismatch/logprob_abs_diff_mean": 0.01, "reward/mean": 0.5, "turns/mean": 2.0}
    for label, (count, rate) in turned.items():
        numbers = {"token_count": count, "extreme_rate": rate, "k3_kl": 1e-4, "logprob_abs_diff_mean": 0.01}
        row |= {f"turns/{label}/{name}": value for name, value in numbers.items()}
    log = read_signals([row | {"step": step} for step in range(1, 11)])
    return Facts(read_course(log), None, [])


def test_extreme_tokens_after_an_environment_are_the_cause():
    facts = facts_of(0.25)
    assert list(facts.course.counts("turns/after")) == ["1", "2_to_4", "5_to_16"]
    np.testing.assert_allclose([*facts.course.counts("turns/after").values()], [[400, 100], [600, 150], [5000, 0]])
    np.testing.assert_allclose([*facts.course.counts("turns/turn").values()], [[4000, 0], [6000, 250]])
    cause, findings = judge_cause(facts)
    assert (cause, findings[0].confidence) == ("after_environment", "sure")
    assert findings[0].evidence.startswith("100% of the 250 extreme tokens are among the first 4 after what the env")
    assert findings[0].evidence.endswith("10.0% of all tokens are there")
    # One token; as many elsewhere; more there, and most elsewhere; none.
    for near, far in ((0.001, 0.0), (0.25, 0.25), (0.02, 0.01), (0.0, 0.0)):
        _, findings = judge_cause(facts_of(near, far))
        assert "after_environment" not in [finding.cause for finding in findings]


@pytest.mark.parametrize(
    ("fractions", "cause"),
    [([1.0] * 4, "failed_rewards"), ([0.0, 0.5, 0.999], "healthy"), ([0.1, 1.0] + [0.1] * 20, "cannot_tell")],
)
def test_a_log_whose_rewards_fail_is_not_healthy(fractions, cause):
    row = {"mismatch/k3_kl": 1e-4, "mismatch/logprob_abs_diff_mean": 0.01, "reward/mean": 0.0}
    log = read_signals([row | {"step": i, "reward/error_fraction": one} for i, one in enumerate(fractions, 1)])
    assert judge_cause(Facts(read_course(log), None, []))[0] == cause
