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


def five_step_means(rows):
    lengths = np.array([row["response_length/mean"] for row in rows])
    return np.array([lengths[max(0, i - 4) : i + 1].mean() for i in range(len(lengths))])


def crossing(rows):
    """Returns the 1-based step at which the 5-step mean length is three times the mean of the first ten steps."""
    means = five_step_means(rows)
    return int(np.argmax(means >= 3 * means[9])) + 1


def test_the_checking_tool_agrees(finished):
    status, out, _ = outcome(check_quickstart.main, [finished])
    assert status == 0, out
    assert out.strip().endswith("PASS")


def test_reward_rises_by_far(rows):
    rewards = np.array([row["reward/mean"] for row in rows])
    assert rewards[-10:].mean() - rewards[:10].mean() >= 0.5


def test_length_holds_then_triples_within_forty_steps(rows):
    means = five_step_means(rows)
    assert means[:20].max() < 1.5 * means[9]
    assert crossing(rows) > 20
    assert any((means[4 + k :] >= 3 * means[4 : len(means) - k]).any() for k in range(1, 41))


def test_surge_is_called_at_the_crossing_and_sets_the_rate(rows):
    last = rows[-1]
    surge, period = last["schedule/surge_step"], last["schedule/decay_period"]
    assert abs(surge - crossing(rows)) <= 10
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
