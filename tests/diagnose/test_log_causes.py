"""Tests of the course of a log, and of the causes that it shows, each by a log of numbers written by hand."""

import re
from pathlib import Path

import numpy as np
import pytest

from rljax.diagnose import log_causes
from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import effect, find_decline, read_course, smooth
from rljax.diagnose.evidence import CAUSES, TABLES, Facts, Finding, cross
from rljax.diagnose.log_causes import find_log_causes
from rljax.diagnose.signals import Log, read_signals
from rljax.mismatch.names import PUBLISHED_BARS

STEPS = np.arange(1, 41)
WAVE = 1 + 0.1 * np.sin(STEPS)  # what a mean varies by from step to step
GAP = 0.012 * WAVE
LATE = STEPS > 20
REWARD = 0.5 * WAVE
CERTAIN = np.where(LATE, 0.02, 0.9)
RETYPED = {"steps": np.array([1, 117, 530, 649]), "reward": [0.4, 0.39, 0.2, 0.07]}  # a table


def facts_of(steps=STEPS, lost=None, **signals):
    """Returns the facts of a log. Signals that are not given are those of a healthy run."""
    plain = {"logprob_abs_diff_mean": GAP, "reward": REWARD, "grad_norm": 0.2 * WAVE, "learning_rate": 1e-6} | signals
    given = {
        name: np.broadcast_to(np.asarray(values)[: len(steps)] if np.ndim(values) else values, len(steps)).astype(float)
        for name, values in plain.items()
        if values is not None
    }
    log = Log("verl", steps, given, {name: name for name in given}, {}, lost or {})
    return Facts(read_course(log), None, cross(given, steps))


SAW = 0.012 + 0.02 * (STEPS % 10)
LOGS = {
    "healthy": [
        {},
        {"entropy": np.linspace(1.0, 0.3, 40), "logprob_abs_diff_mean": GAP * np.linspace(1, 0.5, 40)},
        # A policy that learns within ten steps becomes sure, and its gap shrinks by degrees.
        {"entropy": 0.05 + 0.5 * np.exp(-STEPS / 4), "logprob_abs_diff_mean": 0.002 + 0.012 * np.exp(-STEPS / 4)},
        {"logprob_abs_diff_mean": np.where(STEPS == 30, 1.0, GAP)},  # a lone spike
        {"logprob_abs_diff_mean": None, "kl": 2e-3 * np.cos(7 * STEPS**2)},
        {"ratio_mean": 0.3 + 0.4 * WAVE, "ratio_min": 0.0, "ratio_max": 2.9},  # of sequences, as TRL masks them
        {"truncated": np.where(LATE, 0.6, 0.1)},  # the reward does not fall
        {"learning_rate": 0.0},
        # Float16 on both sides: chi2 is the noise of a mean of 1,500 tokens. A table has three digits.
        {"logprob_abs_diff_mean": None, "k3_kl": 5e-7, "chi2_token": 7e-5},
        {"logprob_abs_diff_mean": 0.0, "logprob_abs_diff_std": 0.001, "k3_kl": 0.0, "chi2_token": 0.001},
    ],
    "nonfinite_training": [{"lost": {"grad_norm": 30, "entropy": 30}}],
    "missing_numbers": [{"lost": {"k3_kl": 30}}],
    "trainer_side": [
        {"logprob_abs_diff_mean": np.where(LATE, 16.0, GAP)},
        {"logprob_abs_diff_mean": None, "ratio_mean": np.where(LATE, 1e-6, 1.0)},
    ],
    "engine_side": [{"logprob_abs_diff_mean": np.where(LATE, 0.3, GAP), "reward": np.where(LATE, 0.02, REWARD)}],
    "other_weights": [
        {"logprob_abs_diff_mean": np.where(LATE, 0.3, GAP)},
        {"steps": STEPS[:3], "logprob_abs_diff_mean": [0.01, 0.018, 0.2]},
    ],
    "sync_fault": [{"learning_rate": 0.0, "logprob_abs_diff_mean": 0.01 * STEPS}],
    "stale_cache": [{"logprob_abs_diff_mean": SAW}],
    "bad_start": [{"logprob_abs_diff_mean": np.where(STEPS <= 4, 0.3, GAP)}],
    "truncated_sampling": [
        # Tokens with probabilities 0.6, 0.3 and 0.1, cut to the first two: the mean ratio is 0.9, and kl -log(0.9).
        {"ratio_mean": 0.9, "kl": -np.log(0.9), "k3_kl": 0.9 - 1 - np.log(0.9)},
        {"ratio_mean": 0.9, "logprob_abs_diff_mean": -np.log(0.9), "ratio_max": 0.9},
        {"ratio_mean": 0.975, "ratio_max": 1.1, "ratio_min": 0.88, "logprob_abs_diff_mean": None},
    ],
    "temperature": [
        # The engine at temperature 0.5 and the trainer at 1: probabilities 0.9878, 0.0122 against 0.9, 0.1.
        {"ratio_min": 0.9 / 0.9878, "ratio_max": 0.1 / 0.0122, "ratio_mean": 1.0, "logprob_abs_diff_mean": 0.12 * WAVE}
    ],
    "extreme_tokens": [
        # One token of 1,000 is 5 nats off: k3 is (exp(5) - 6) / 1,000, and chi2 (exp(10) - 1) / 1,000.
        {"k3_kl": 0.142, "chi2_token": 22.0},
        {"logprob_abs_diff_mean": np.where(STEPS % 4 == 0, 2.0, GAP)},
        # In every fourth step a token of 200 is 5 nats off: the mean is three times as large, and the largest 50 times.
        {"logprob_abs_diff_mean": GAP + 0.025 * (STEPS % 4 == 0), "logprob_abs_diff_max": 0.1 + 5 * (STEPS % 4 == 0)},
    ],
    "truncation": [
        {"truncated": np.where(LATE, 0.97, 0.01), "reward": np.where(LATE, 0.05, REWARD)},
        {"truncated": 1.0, "reward": 0.0},
        {"length": np.where(LATE, 4096.0, 900 * WAVE), "reward": np.where(LATE, 0.05, REWARD)},
    ],
    "entropy_collapse": [
        {"entropy": CERTAIN, "grad_norm": np.where(LATE, 1e-3, 0.2), "reward": np.where(LATE, 0.1, 0.5)},
        {"entropy": CERTAIN, "reward": np.where(LATE, 0.1, REWARD)},
    ],
    "reward_broken": [
        {"reward": np.where(LATE, 0.0, REWARD), "grad_norm": np.where(LATE, 0.0, 0.2)},
        {"reward": 0.5, "grad_norm": 0.0},
    ],
    "no_signal": [
        {"signal": 0.0, "grad_norm": 0.0, "reward": 3.0},
        {"reward_std": 0.0, "reward": 3.0},
        {"largest_advantage": 0.0},
        {"steps": STEPS[:1], "signal": 0.0, "reward": 3.0, "grad_norm": 0.0},
    ],
    "no_update": [{"grad_norm": 0.0}],
    "policy_drift": [{"logprob_abs_diff_mean": None, "reference_kl": np.where(LATE, 12.0, 0.01)}],
    "high_rate": [{"reward": np.where(LATE, 0.05 * WAVE, REWARD), "grad_norm": np.where(LATE, 2.0, 0.2)}],
    "mismatch_growth": [
        RETYPED | {"logprob_abs_diff_mean": [0.01, 0.05, 0.5, 8.8]},
        {"logprob_abs_diff_mean": 0.012 * WAVE * np.exp(0.2 * np.maximum(STEPS - 20, 0))},
        {  # k3 grows before the reward falls, and the other signal only then
            "logprob_abs_diff_mean": None,
            "log_ppl_abs_diff": np.where(STEPS > 28, 0.015, 0.004 * WAVE),
            "k3_kl": 2e-4 * WAVE * np.exp(0.2 * np.maximum(STEPS - 15, 0)),
            "reward": np.where(STEPS > 28, 0.05, REWARD),
        },
    ],
    "cannot_tell": [
        {"reward": np.where((STEPS % 6 == 0) | (abs(STEPS - 31.5) < 2), 0.02, 0.0)},  # three steps of four earn nothing
        {"logprob_abs_diff_mean": None, "log_ppl_abs_diff": GAP, "prob_abs_diff_mean": 0.02 * WAVE},  # one is too large
        {"logprob_abs_diff_mean": 0.1 * WAVE},  # 8 bits, a temperature, a cut or other weights
        {"reward": np.where(LATE, 0.05 * WAVE, REWARD)},  # the reward falls, and nothing else changes
        {"logprob_abs_diff_mean": None},
        {"logprob_abs_diff_mean": None, "entropy": 300.0, "reference_kl": np.where(LATE, 12.0, 0.01)},  # sums
        {"logprob_abs_diff_mean": None, "ratio_mean": 1.0},  # a signed mean of 1 hides any gap
        {"steps": STEPS[:4], "logprob_abs_diff_mean": [0.01, 0.08, 0.012, 0.011]},
    ],
}


@pytest.mark.parametrize(("cause", "signals"), [(cause, signals) for cause, logs in LOGS.items() for signals in logs])
def test_the_cause_of_a_log(cause, signals):
    said, findings = judge_cause(facts_of(**signals))
    assert said == cause, findings


def test_every_cause_is_tested_and_the_evidence_has_the_numbers():
    named = set(re.findall(r'Finding\(\s*"(\w+)"', Path(log_causes.__file__).read_text(encoding="utf-8")))
    assert named <= set(LOGS) <= set(CAUSES)
    (cut,) = find_log_causes(facts_of(**LOGS["truncated_sampling"][0]).course)
    assert cut.evidence.startswith("the mean ratio of trainer to engine is 0.900 at nearly every step")
    assert cut.evidence.endswith("removed have a mass of 0.100")
    (saw,) = find_log_causes(facts_of(logprob_abs_diff_mean=SAW).course)
    assert "falls back to 0.012, 4 times (after 9, 10, 10, 10 steps)" in saw.evidence
    (lost,) = find_log_causes(facts_of(lost={"grad_norm": 32, "entropy": 33, "kl": 32}).course)
    assert lost.evidence.startswith("grad_norm, entropy and 1 other signals are not finite from step 32 on")


def test_several_runs_and_a_summary_are_said():
    several = Facts(None, None, [], runs=("a", "b"))
    assert judge_cause(several) == ("several_runs", [Finding("several_runs", "sure", "the file has 2 runs: a, b")])
    assert judge_cause(facts_of(steps=STEPS[:1])._replace(is_summary=True))[0] == "one_row"


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


def facts_of_turns(near_rate, far_rate=0.0):
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
    facts = facts_of_turns(0.25)
    assert list(facts.course.counts("turns/after")) == ["1", "2_to_4", "5_to_16"]
    np.testing.assert_allclose([*facts.course.counts("turns/after").values()], [[400, 100], [600, 150], [5000, 0]])
    np.testing.assert_allclose([*facts.course.counts("turns/turn").values()], [[4000, 0], [6000, 250]])
    cause, findings = judge_cause(facts)
    assert (cause, findings[0].confidence) == ("after_environment", "sure")
    assert findings[0].evidence.startswith("100% of the 250 extreme tokens are among the first 4 after what the env")
    assert findings[0].evidence.endswith("10.0% of all tokens are there")
    # One token; as many elsewhere; more there, and most elsewhere; none.
    for near, far in ((0.001, 0.0), (0.25, 0.25), (0.02, 0.01), (0.0, 0.0)):
        _, findings = judge_cause(facts_of_turns(near, far))
        assert "after_environment" not in [finding.cause for finding in findings]


@pytest.mark.parametrize(
    ("fractions", "cause"),
    [([1.0] * 4, "failed_rewards"), ([0.0, 0.5, 0.999], "healthy"), ([0.1, 1.0] + [0.1] * 20, "cannot_tell")],
)
def test_a_log_whose_rewards_fail_is_not_healthy(fractions, cause):
    row = {"mismatch/k3_kl": 1e-4, "mismatch/logprob_abs_diff_mean": 0.01, "reward/mean": 0.0}
    log = read_signals([row | {"step": i, "reward/error_fraction": one} for i, one in enumerate(fractions, 1)])
    assert judge_cause(Facts(read_course(log), None, []))[0] == cause
