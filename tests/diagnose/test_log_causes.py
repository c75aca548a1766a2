"""Tests of the causes that the course of a log shows, each by a log of numbers written by hand, and of healthy logs."""

import re
from pathlib import Path

import numpy as np
import pytest

from rljax.diagnose import log_causes
from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import read_course
from rljax.diagnose.evidence import CAUSES, Facts, Finding, cross
from rljax.diagnose.log_causes import find_log_causes
from rljax.diagnose.signals import Log

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
