"""Tests of the outcomes that a study compares: peak, collapse, surge, and the metrics beside them."""

import numpy as np
import pytest
from records import study_row
from study_outcome import collapse_step, outcome_of, trailing_mean


def rows(rewards, surge=None):
    return [
        study_row(i, reward, surge)
        | {
            "response_length/mean": 10.0 * i,
            "mismatch/log_ppl_abs_diff": 0.001 * i,
            "optimizer/skipped_updates": 1,
            "schedule/learning_rate": 1e-3 / i,
            "is/token_fraction_above": 0.01 if i == 3 else 0.0,
            **({"eval/toy/accuracy": reward} if i % 20 == 0 else {}),
        }
        for i, reward in enumerate(rewards, 1)
    ]


def test_an_outcome_by_hand():
    """Forty steps have 0.75 and forty have 0, where a mean of ten is under half of 0.75 from the sixth on."""
    found = outcome_of(rows([0.75] * 40 + [0.0] * 40, surge=12))
    assert (found.steps, found.peak, found.final) == (80, 0.75, 0.0)
    assert (found.fall_step, found.collapse_step, found.surge_step, found.lead) == (46, 46, 12, 34)
    assert (found.evaluation_peak, found.evaluation_final) == (0.75, 0.0)
    assert found.at_end["log_ppl_abs_diff"] == pytest.approx(0.001 * (46 - 4.5))
    assert found.at_end["k3_kl"] == 0.0
    assert found.above_share == pytest.approx(0.01 / 80)
    assert found.above_share_largest == 0.01
    assert found.final_rate == pytest.approx(1e-3 / 80)
    assert found.skipped_updates == 1


def test_a_run_that_holds_or_never_learned_has_no_collapse():
    for peak, expected in ((0.3125, 46), (0.25, None)):
        found = outcome_of(rows([peak] * 40 + [0.0] * 40, surge=12))
        assert (found.fall_step, found.collapse_step, found.lead) == (46, expected, 34)
    found = outcome_of(rows([0.125] * 10 + [0.875] * 30))
    assert (found.collapse_step, found.surge_step, found.lead) == (None, None, None)
    assert found.peak_step == 20
    assert found.at_end["response_length"] == pytest.approx(10 * (40 - 4.5))


def test_trailing_mean_by_hand():
    values = [1.0, 3.0, None, 4.0, float("inf"), *[2.0] * 6]
    assert trailing_mean(values).tolist()[:5] == [1.0, 2.0, 4 / 3, 2.0, 1.6]
    assert trailing_mean(values)[-2:].tolist() == [1.8, 1.9]


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ([0.1, 0.8, 0.7, 0.3, 0.2], 4),
        ([0.1, 0.8, 0.3, 0.5, 0.2], 5),  # it came back above half the peak in between
        ([0.1, 0.8, 0.3, 0.3, 0.4], None),  # half itself is not below half
        ([0.1, 0.2, 0.3], None),
        ([0.4, 0.0, 0.0], 2),
    ],
)
def test_a_collapse_is_under_half_the_peak_and_stays_there(accuracy, expected):
    assert collapse_step(np.array(accuracy)) == expected
