"""Rules on metrics: how they are read, when they warn and when they stop. A resume does not forget them."""

import math

import pytest

from rljax.run.guard import Guard, GuardConfig, parse_rule


def rows(values, metric="mismatch/k3_kl"):
    return [{"step": i, metric: value} for i, value in enumerate(values, 1)]


def test_a_rule_is_read():
    rule = parse_rule("mismatch/k3_kl > 1e-3 for 5")
    assert (rule.metric, rule.above, rule.bound, rule.steps) == ("mismatch/k3_kl", True, 1e-3, 5)
    rule = parse_rule("policy/entropy<0.1")
    assert (rule.metric, rule.above, rule.bound, rule.steps) == ("policy/entropy", False, 0.1, 1)


def test_what_is_no_rule_is_one_line():
    for text in ("", "mismatch/k3_kl", "a > b", "a > 1 for 0", "a > 1 for", "a >= 1", "a > nan", "> 1"):
        for kind in ("warn", "stop"):
            with pytest.raises(ValueError, match="a guard reads 'METRIC > NUMBER'"):
                GuardConfig(**{kind: (text,)})
    with pytest.raises(ValueError, match="max_skipped_updates must not be negative, got -1"):
        GuardConfig(max_skipped_updates=-1)


def test_a_warning_comes_once_when_a_rule_begins_to_hold():
    guard = Guard(GuardConfig(warn=("mismatch/k3_kl > 0.1 for 2",)))
    seen = [guard.check(row) for row in rows([0.2, 0.05, 0.2, 0.3, 0.4, 0.0, 0.2, 0.2])]
    assert [len(warnings) for warnings, _ in seen] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert seen[3][0] == ["step 4: mismatch/k3_kl = 0.3 (mismatch/k3_kl > 0.1 for 2)"]
    assert all(stops == [] for _, stops in seen)


def test_a_rule_may_warn_and_stop_and_counts_a_row_once():
    guard = Guard(GuardConfig(warn=("a > 1 for 3",), stop=("a > 1 for 3",)))
    seen = [guard.check({"step": step, "a": 2.0}) for step in range(1, 5)]
    assert [(len(warnings), len(stops)) for warnings, stops in seen] == [(0, 0), (0, 0), (1, 1), (0, 1)]


def test_a_metric_of_some_rows_keeps_its_streak_between_them():
    for metric in ("eval/toy/accuracy", "mismatch_self/k3_kl", "turns/turn_2/k3_kl", "time/eval_s", "perf/save_x_s"):
        guard = Guard(GuardConfig(stop=(f"{metric} > 1 for 2",)))
        rows_of = [{"step": 1, metric: 2.0}, {"step": 2}, {"step": 3, metric: 2.0}]
        assert [len(guard.check(row)[1]) for row in rows_of] == [0, 0, 1], metric


def test_a_stop_needs_its_rows_in_a_row_and_survives_a_resume():
    config = GuardConfig(stop=("mismatch/k3_kl > 0.1 for 3",))
    first = Guard(config)
    assert [first.check(row)[1] for row in rows([0.2, 0.2])] == [[], []]
    second = Guard(config)
    second.load_state_dict(first.state_dict())
    assert second.check({"step": 3, "mismatch/k3_kl": 0.2})[1] != []
    assert Guard(config).check({"step": 3, "mismatch/k3_kl": 0.2})[1] == []
    between, third = Guard(GuardConfig()), Guard(config)  # the rule was removed for a while
    between.load_state_dict(second.state_dict())
    third.load_state_dict(between.state_dict())
    assert third.check({"step": 9, "mismatch/k3_kl": 0.2})[1] == []


def test_the_bound_itself_is_allowed_and_no_number_is_beyond_both():
    guard = Guard(GuardConfig(stop=("a > 1", "a < 1")))
    found = [len(guard.check({"step": step, "a": value})[1]) for step, value in enumerate((1.0, 1.5, 0.5, math.inf))]
    assert found == [0, 1, 1, 1]
    assert all(len(guard.check({"step": 9, "a": value})[1]) == 2 for value in (math.nan, None))


FAILING = rows([1.0, 1.0, 0.999, 1.0, 1.0, 1.0, 1.0], "reward/error_fraction")


@pytest.mark.parametrize(("stop", "stopping"), [((), [6, 7]), (("reward/error_fraction > 1",), [])])
def test_three_steps_of_failing_rewards_stop_a_run_by_default(stop, stopping):
    guard = Guard(GuardConfig(stop=stop))
    told = {row["step"]: guard.check(row)[1] for row in FAILING}
    assert [step for step, lines in told.items() if lines] == stopping
    if not stop:
        assert told[6] == ["step 6: reward/error_fraction = 1 (reward/error_fraction = 1 for 3)"]
