"""The quickstart up to its first decay: reward rises as responses lengthen, a surge is called, the rate halves."""

import math

import check_quickstart
import numpy as np
import pytest
from toy_runs import TOY_BASE, command, outcome, start

from rljax.record.rows import read_rows
from rljax.schedule import decay_period_from_surge

pytestmark = [pytest.mark.slow, pytest.mark.harness, pytest.mark.timeout(1200)]
RATE = 1.5e-4
STEPS = 130  # of 240; the surge is called near step 65, and the rate halves at 1.8 times that step
# The run takes a minute and a half on two cores of its own. The limit leaves room for shared machines.
TIMEOUT_S = 900


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs the quickstart as a person starts it, with the usual compiler flags, and returns its folder."""
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    process = start(command(TOY_BASE, run_dir, "--run.steps", str(STEPS)), XLA_FLAGS="")
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return run_dir


@pytest.fixture(scope="module")
def rows(finished):
    return read_rows(finished / "metrics.jsonl")


def test_the_checking_tool_agrees(finished):
    """The tool says whether lengths hold and then triple, and whether the surge is called within ten steps of it."""
    status, out, _ = outcome(check_quickstart.main, [finished])
    assert status == 0, out
    assert out.strip().endswith("PASS")


def test_reward_rises_by_far(rows):
    rewards = np.array([row["reward/mean"] for row in rows])
    assert rewards[-10:].mean() - rewards[:10].mean() >= 0.5


def test_the_surge_sets_the_rate(rows):
    last = rows[-1]
    surge, period = last["schedule/surge_step"], last["schedule/decay_period"]
    assert period == decay_period_from_surge(surge) == math.floor(1.8 * surge + 0.5)
    for row in rows:
        step, known = row["step"], row["step"] >= surge
        assert row["schedule/surge_step"] == (surge if known else None)
        expected = max(RATE * 0.5 ** (step // period), RATE * 0.1) if known else RATE
        assert row["schedule/learning_rate"] == np.float32(expected)
    assert rows[-1]["schedule/learning_rate"] < RATE


def test_mismatch_is_there_in_every_row_and_finite(rows):
    assert len(rows) == STEPS
    for row in rows:
        assert "nonfinite_keys" not in row
        assert 1e-6 < row["mismatch/log_ppl_abs_diff"] < 1e-2
        assert row["mismatch/nonfinite_count"] == 0
