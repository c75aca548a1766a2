"""Tests of a log with turns: the places of its extreme tokens, and the findings that are or are not named."""

import numpy as np
import pytest

from rljax.diagnose.causes import judge_cause
from rljax.diagnose.course import read_course
from rljax.diagnose.evidence import Facts
from rljax.diagnose.page import answers
from rljax.diagnose.signals import read_signals


def facts_of(near_rate, far_rate=0.0, steps=10, tokens=1000):
    """Returns the facts of a log whose turns have the same gap.

    In each step 100 tokens follow an environment's tokens closely.
    """
    turned = {
        "turn_1": (400, far_rate),
        "turn_2": (tokens - 400, (100 * near_rate + (tokens - 500) * far_rate) / (tokens - 400)),
        "after_1": (40, near_rate),
        "after_2_to_4": (60, near_rate),
        "after_5_to_16": (tokens - 500, far_rate),
    }
    row = {"mismatch/k3_kl": 1e-4, "mismatch/logprob_abs_diff_mean": 0.01, "reward/mean": 0.5, "turns/mean": 2.0}
    for label, (count, rate) in turned.items():
        numbers = {"token_count": count, "extreme_rate": rate, "k3_kl": 1e-4, "logprob_abs_diff_mean": 0.01}
        row |= {f"turns/{label}/{name}": value for name, value in numbers.items()}
    log = read_signals([row | {"step": step} for step in range(1, steps + 1)])
    return Facts(read_course(log), None, [])


def test_turns_and_distances_are_groups_of_their_own():
    course = facts_of(0.25).course
    assert list(course.counts("turns/after")) == ["1", "2_to_4", "5_to_16"]
    np.testing.assert_allclose([*course.counts("turns/after").values()], [[400, 100], [600, 150], [5000, 0]])
    np.testing.assert_allclose([*course.counts("turns/turn").values()], [[4000, 0], [6000, 250]])


def test_extreme_tokens_after_an_environment_are_the_cause():
    facts = facts_of(0.25)
    cause, findings = judge_cause(facts)
    assert (cause, findings[0].confidence) == ("after_environment", "sure")
    assert findings[0].evidence == (
        "100% of the 250 extreme tokens are among the first 4 after what the environment wrote, and 10.0% of all "
        "tokens are there"
    )
    assert answers(facts)["after the environment's tokens"] == "1 0.01, 2_to_4 0.01, 5_to_16 0.01 (the gap, nats)"


@pytest.mark.parametrize(
    ("fractions", "cause"),
    [([1.0] * 4, "failed_rewards"), ([0.0, 0.5, 0.999], "healthy"), ([0.1, 1.0] + [0.1] * 20, "cannot_tell")],
)
def test_a_log_whose_rewards_fail_is_not_healthy(fractions, cause):
    row = {"mismatch/k3_kl": 1e-4, "mismatch/logprob_abs_diff_mean": 0.01, "reward/mean": 0.0}
    log = read_signals([row | {"step": i, "reward/error_fraction": one} for i, one in enumerate(fractions, 1)])
    facts = Facts(read_course(log), None, [])
    assert judge_cause(facts)[0] == cause
    assert not any("turn" in question for question in answers(facts))  # the log has no turns


@pytest.mark.parametrize(
    ("near", "far", "steps"),
    [
        (0.001, 0.0, 10),  # one token
        (0.25, 0.25, 10),  # as many elsewhere
        (0.02, 0.01, 10),  # more there, and most elsewhere
        (0.0, 0.0, 10),
    ],
)
def test_extreme_tokens_elsewhere_have_another_cause(near, far, steps):
    _, findings = judge_cause(facts_of(near, far, steps))
    assert "after_environment" not in [finding.cause for finding in findings]
