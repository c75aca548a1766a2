"""Rules on metrics, sums and skipped updates count from row to row, and go on after a resume."""

import itertools
import json
import math

import pytest

from rljax.run.guard import Guard, GuardConfig, parse_rule
from rljax.run.step import Progress


def rows(values, metric="mismatch/k3_kl"):
    return [{"step": i, metric: value} for i, value in enumerate(values, 1)]


def test_a_rule_is_read_and_what_is_none_is_one_line():
    for text, read in (("a/b > 1e-3 for 5", ("a/b", True, 1e-3, 5)), ("a/b<0.1", ("a/b", False, 0.1, 1))):
        rule = parse_rule(text)
        assert (rule.metric, rule.above, rule.bound, rule.steps) == read
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

    # A rule may warn and stop, and counts a row once.
    guard = Guard(GuardConfig(warn=("a > 1 for 3",), stop=("a > 1 for 3",)))
    seen = [guard.check({"step": step, "a": 2.0}) for step in range(1, 5)]
    assert [(len(warnings), len(stops)) for warnings, stops in seen] == [(0, 0), (0, 0), (1, 1), (0, 1)]


def test_a_metric_of_some_rows_keeps_its_streak_between_them():
    rare = ("eval/toy/accuracy", "mismatch_self/k3_kl", "turns/turn_2/k3_kl", "time/eval_s", "perf/save_x_s")
    for metric in (*rare, "mismatch/sum_k3_max", "is_drift/x", "rollout/cached_prompt_fraction"):
        guard = Guard(GuardConfig(stop=(f"{metric} > 1 for 2",)))
        rows_of = [{"step": 1, metric: 2.0}, {"step": 2}, {"step": 3, metric: 2.0}]
        assert [len(guard.check(row)[1]) for row in rows_of] == [0, 0, 1], metric
    # The bound itself is allowed, and what is no number is beyond both.
    guard = Guard(GuardConfig(stop=("a > 1", "a < 1")))
    found = [len(guard.check({"step": step, "a": value})[1]) for step, value in enumerate((1.0, 1.5, 0.5, math.inf))]
    assert found == [0, 1, 1, 1]
    assert all(len(guard.check({"step": 9, "a": value})[1]) == 2 for value in (math.nan, None))


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


FAILING = rows([1.0, 1.0, 0.999, 1.0, 1.0, 1.0, 1.0], "reward/error_fraction")


@pytest.mark.parametrize(("stop", "stopping"), [((), [6, 7]), (("reward/error_fraction > 1",), [])])
def test_three_steps_of_failing_rewards_stop_a_run_by_default(stop, stopping):
    guard = Guard(GuardConfig(stop=stop))
    told = {row["step"]: guard.check(row)[1] for row in FAILING}
    assert [step for step, lines in told.items() if lines] == stopping
    if not stop:
        assert told[6] == ["step 6: reward/error_fraction = 1 (reward/error_fraction = 1 for 3)"]


# ---- sums and skipped updates ----


def step_row(tokens=1, sequences=1, summed=0.0, norm=1.0):
    return {
        "optimizer/grad_norm": norm,
        "mismatch/token_count": tokens,
        "mismatch/sequence_count": sequences,
        "mismatch/log_ppl_abs_diff_sum": summed,
    }


def test_a_rise_is_split_against_the_first_steps():
    """The reference has 50 sequences, 500 tokens and a summed gap of 0.4 a sequence. That is 10 tokens of 0.04 each."""
    progress = Progress()
    for row in 5 * (step_row(60, 4, 0.5), step_row(40, 6, 2.0 / 6)):
        assert progress.observe(row, has_loss=False) == {"optimizer/grad_norm_ema": None}
    assert progress.reference == {"steps": 10, "token_count": 500, "sequence_count": 50, "gap": pytest.approx(20.0)}
    # Thirty tokens of 0.05 each give 1.5. Length alone would give 1.2.
    split = progress.observe(step_row(300, 10, 1.5), has_loss=False)
    assert split == {
        "optimizer/grad_norm_ema": None,
        "mismatch/sum_rise": pytest.approx(1.1),
        "mismatch/sum_length_explained": pytest.approx(0.8),
        "mismatch/sum_per_token": pytest.approx(0.3),
    }


def test_the_mean_gradient_norm_leaves_out_what_is_not_finite():
    progress = Progress()
    for norm in (2.0, math.nan, 4.0, math.inf):
        progress.observe(step_row(norm=norm), has_loss=True)
    progress.observe(step_row(norm=7.0), has_loss=False)
    assert progress.grad_norm_ema == pytest.approx(0.9 * 2.0 + 0.1 * 4.0)


def counted(progress, totals, updates, start=(0, 0)):
    """Returns ``not_finite`` after each row of (updates skipped so far, updates not finite so far)."""
    names = ("optimizer/skipped_updates", "precision/overflows")
    rows = [{"step": step} | dict(zip(names, total, strict=True)) for step, total in enumerate([start, *totals])]
    seen = []
    for last_row, row in itertools.pairwise(rows):
        progress.count_skipped(row, last_row, updates)
        seen.append(progress.not_finite)
    return seen


def test_an_applied_update_ends_a_row_of_skipped_ones():
    """Updates without signal do not count. A step has one update, and then four with three without signal at last."""
    progress = Progress()
    assert counted(progress, [(1, 1), (2, 1), (3, 2), (3, 2), (4, 2), (5, 3)], 1) == [1, 1, 2, 0, 0, 1]
    assert progress.not_finite_since == 6
    progress = Progress()
    assert counted(progress, [(104, 24), (107, 27), (111, 28)], 4, start=(100, 20)) == [4, 0, 1]
    resumed = Progress.from_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert resumed == progress
    assert counted(resumed, [(115, 32), (119, 36)], 4, start=(111, 28)) == [5, 9]
    assert resumed.not_finite_since == 3

    # The first step counts from zero.
    progress = Progress()
    progress.count_skipped({"step": 1, "optimizer/skipped_updates": 2, "precision/overflows": 1}, {}, 2)
    assert (progress.not_finite, progress.not_finite_since) == (1, 1)
