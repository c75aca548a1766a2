"""The quickstart up to its first decay: reward rises as responses lengthen, a surge is called, the rate halves."""

import math

import check_quickstart
import numpy as np
import pytest
from toy_runs import TOY_BASE, command, printed, start

from rljax.record.rows import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.harness, pytest.mark.timeout(1200)]
RATE = 1.5e-4
STEPS = 130  # of 240; the surge is called near step 65, and the rate halves at 1.8 times that step
# The run takes a minute and a half on two cores of its own. The limit leaves room for shared machines.
TIMEOUT_S = 900


def test_the_quickstart_learns(tmp_path):
    """The checking tool says whether lengths hold and then triple, and whether the surge is called in time."""
    run_dir = tmp_path / "run"
    process = start(command(TOY_BASE, run_dir, "--run.steps", str(STEPS)), XLA_FLAGS="")
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    rows = read_rows(run_dir / "metrics.jsonl")
    assert len(rows) == STEPS
    assert printed(check_quickstart.main, [run_dir]).strip().endswith("PASS")
    found = check_quickstart.figures(rows)
    assert found["reward_last_10"] - found["reward_first_10"] >= 0.5
    surge, period = found["surge_step"], found["decay_period"]
    assert period == math.floor(1.8 * surge + 0.5) <= STEPS
    for row in rows:
        assert row["schedule/surge_step"] == (surge if row["step"] >= surge else None)
        assert row["schedule/learning_rate"] == np.float32(max(RATE * 0.5 ** (row["step"] // period), RATE * 0.1))
        assert "nonfinite_keys" not in row
        assert 1e-6 < row["mismatch/log_ppl_abs_diff"] < 1e-2
        assert row["mismatch/nonfinite_count"] == 0
