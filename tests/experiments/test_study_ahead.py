"""Tests of the table of a study with real servers: the numbers of a run, and a line of the table, by hand."""

import pytest
from study_ahead import counted, line


def row(step, **more):
    return {
        "step": step,
        "reward/mean": 0.5,
        "response_length/mean": 10.0,
        "optimizer/grad_norm": 1.0,
        "optimizer/skipped_updates": 0,
        "schedule/learning_rate": 1e-3,
        "schedule/surge_step": None,
        "mismatch/log_ppl_abs_diff": 0.1,
        "mismatch/k3_kl": 0.1,
        "rollout/staleness": 2.0 if step > 5 else 0.0,
        "time/step_s": 100.0 if step == 1 else 2.0,
        "time/rollout_s": 1.0,
        "time/ahead_s": 1.0,
        "time/wait_s": 0.5,
        "perf/response_tokens_per_s": 30.0,
        **more,
    }


def test_what_is_counted_of_a_run():
    """The first five steps are left out of times. The drift is the mean of the named steps."""
    drift = "mismatch_drift/log_ppl_abs_diff"
    rows = [row(step, **({drift: 0.4 if step <= 15 else 0.1} if step > 5 else {})) for step in range(1, 31)]
    found = counted(rows)
    assert (found["seconds_per_step"], found["response_tokens_per_second"]) == (2.0, 15.0)
    assert (found["trainer_waits"], found["staleness"]) == (0.25, 2.0)
    assert (found["drift_early"], found["drift_late"]) == (pytest.approx(0.4), pytest.approx(0.1))
    assert found["numerics_early"] is None
    assert (found["final"], found["fall_step"], found["surge_step"]) == (0.5, None, None)


def test_a_line_has_medians_and_the_accuracy_of_each_seed():
    run = counted([row(step) for step in range(1, 31)])
    ends = {"final": 0, "fall_step": 21, "collapse_step": 21}
    runs = [run | {"seconds_per_step": 1}, run | {"seconds_per_step": 3} | ends]
    cells = line("ahead_2", runs).split(" | ")
    assert cells[:3] == ["| ahead_2", "2", "2.00"]
    assert cells[-3:] == ["0.50 0.00", "1", "1 (step 21) |"]
