"""Tests of a run's outcomes (peak, collapse, surge and metrics beside them) and of exact tests on them."""

import numpy as np
import pytest
from exact_tests import fisher_p, share_interval, shift_interval, sign_flip_p
from records import study_row
from study_outcome import collapse_step, outcome_of, trailing_mean


def test_signs_are_flipped_in_every_way():
    assert sign_flip_p([0.1, 0.2, 0.3]) == 2 / 8  # all three up, or all three down
    assert sign_flip_p([-0.1, 0.2, 0.4]) == 4 / 8  # the sums 0.7 and 0.5, and their opposites, reach 0.5
    assert sign_flip_p([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]) == 2 / 64
    assert sign_flip_p([0.1, 0.2, -0.3]) == sign_flip_p([0.0, 0.0]) == 1.0


def test_an_interval_of_three_pairs_by_hand():
    """The means of subsets of 1, 2 and 6 are 1, 1.5, 2, 3, 3.5, 4 and 6. With 75% each end loses one part of eight."""
    assert shift_interval([1.0, 2.0, 6.0], 0.75) == (1.0, 6.0)
    assert shift_interval([1.0, 2.0, 6.0], 0.5) == (1.5, 4.0)
    assert shift_interval([1.0, 2.0, 6.0], 0.95) is None
    with pytest.raises(ValueError, match="got 21 pairs, expected at most 20"):
        shift_interval([0.0] * 21, 0.95)
    # 5 of 8 stand against 2 of 8. The first row of a table has 0 to 7 of the 7, and there are C(16, 7) = 11440 tables.
    # Their ways are 8, 224, 1568, 3920, 3920, 1568, 224 and 8. Those of at most 1568 ways are 3600 together.
    assert fisher_p(5, 8, 2, 8) == pytest.approx(3600 / 11440)
    assert share_interval(8, 8, 0.95) == (pytest.approx(0.025**0.125), 1.0)
    # An interval has the shifts that the test keeps.
    differences = np.random.default_rng(0).normal(0.3, 0.4, 8)
    low, high = shift_interval(list(differences), 0.95)
    for shift, is_kept in ((low - 1e-6, False), (low + 1e-6, True), (high - 1e-6, True), (high + 1e-6, False)):
        assert (sign_flip_p(list(differences - shift)) > 0.05) == is_kept


def rows(rewards, surge=None):
    found = []
    for i, reward in enumerate(rewards, 1):
        row = {"response_length/mean": 10.0 * i, "mismatch/log_ppl_abs_diff": 0.001 * i, "optimizer/skipped_updates": 1}
        row |= {"schedule/learning_rate": 1e-3 / i, "is/token_fraction_above": 0.01 if i == 3 else 0.0}
        evaluated = {"eval/toy/accuracy": reward} if i % 20 == 0 else {}
        found.append(study_row(i, reward, surge) | row | evaluated)
    return found


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
    found = outcome_of(rows([0.25] * 40 + [0.0] * 40, surge=12))
    assert (found.fall_step, found.collapse_step, found.lead) == (46, None, 34)
    found = outcome_of(rows([0.125] * 10 + [0.875] * 30))
    assert (found.collapse_step, found.surge_step, found.lead, found.peak_step) == (None, None, None, 20)
    assert found.at_end["response_length"] == pytest.approx(10 * (40 - 4.5))
    values = [1.0, 3.0, None, 4.0, float("inf"), *[2.0] * 6]
    assert trailing_mean(values).tolist()[:5] == [1.0, 2.0, 4 / 3, 2.0, 1.6]
    assert trailing_mean(values)[-2:].tolist() == [1.8, 1.9]


def test_a_collapse_is_under_half_the_peak_and_stays_there():
    """The second course comes back above half the peak in between. Half itself is not below half."""
    courses = {4: [0.1, 0.8, 0.7, 0.3, 0.2], 5: [0.1, 0.8, 0.3, 0.5, 0.2], 2: [0.4, 0.0, 0.0]}
    assert {step: collapse_step(np.array(accuracy)) for step, accuracy in courses.items()} == {4: 4, 5: 5, 2: 2}
    assert collapse_step(np.array([0.1, 0.8, 0.3, 0.3, 0.4])) is collapse_step(np.array([0.1, 0.2, 0.3])) is None
