"""Tests of a run's summary."""

import json

import pytest

from rljax.record.rows import format_summary, summarize


def run_rows(total=60):
    """Returns rows with length 10 and reward 0.1. From step 31 on the length is 35 and the reward 0.6."""
    rows = []
    for step in range(1, total + 1):
        late = step > 30
        rows.append(
            {
                "step": step,
                "reward/mean": 0.6 if late else 0.1,
                "response_length/mean": 35.0 if late else 10.0,
                "schedule/learning_rate": 1e-4 if late else 2e-4,
                "schedule/surge_step": 34 if step >= 34 else None,
                "schedule/decay_period": 61 if step >= 34 else None,
                "mismatch/log_ppl_abs_diff": 0.004 if step == 7 else 0.001,
                "mismatch/logprob_abs_diff_mean": 2.0 if step == 9 else 0.002,
                "optimizer/skipped_updates": 2 if late else 0,
                "time/step_s": 0.5,
                "time/rollout_s": 0.4,
            }
        )
    for step, accuracy in ((20, 0.2), (40, 0.7), (60, 0.6)):
        rows[step - 1]["eval/toy/accuracy"] = accuracy
    return rows


def test_summary():
    got = summarize(run_rows())
    assert got["reward_first"] == pytest.approx(0.1)
    assert got["reward_last"] == pytest.approx(0.6)
    assert got["reward_gain"] == pytest.approx(0.5)
    assert (got["response_length_first"], got["response_length_last"]) == (10, 35)
    assert (got["surge_step"], got["decay_period"], got["learning_rate_final"]) == (34, 61, 1e-4)
    assert got["evaluations"] == {"toy": {"last": 0.6, "best": 0.7, "best_step": 40}}
    assert got["mismatch_mean"] == pytest.approx((59 * 0.001 + 0.004) / 60)
    assert (got["mismatch_max"], got["skipped_updates"], got["steps"]) == (0.004, 2, 60)
    assert got["wall_seconds"] == pytest.approx(30)
    assert got["rows_with_nonfinite"] == 0


def test_summary_of_bare_rows_is_json_and_printed():
    summary = summarize([{"step": 1}, {"step": 2, "reward/mean": None, "nonfinite_keys": ["reward/mean"]}])
    assert summary["rows_with_nonfinite"] == 1
    assert summary["reward_gain"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert "reward" in format_summary(summary)
    with pytest.raises(ValueError, match="no rows"):
        summarize([])


def test_the_printed_summary_is_a_table():
    shown = format_summary(summarize(run_rows()))
    for part in (
        "reward                0.100 -> 0.600 (gain +0.500)",
        "surge called          at step 34; decay period 61",
        "accuracy on toy       0.600 (best 0.700 at step 40)",
        "mismatch              mean 1.05e-03, max 4.00e-03 (log_ppl_abs_diff)",
        "mean abs              mean 3.53e-02, max 2.00e+00 (logprob_abs_diff_mean)",
        "wall time             30.0 s",
    ):
        assert part in shown.splitlines()
