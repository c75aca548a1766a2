"""Whole runs replace groups without signal. One is killed meanwhile, and one uses the exact engine."""

import json
import signal
import time

import numpy as np
import pytest
from process_runs import FLOAT32
from toy_runs import ROOT, comparable, completed, start, tiny, wait_for_rows

pytestmark = pytest.mark.slow

STEPS, PROMPTS, GROUP = 5, 4, 2
# Half of the responses earn this reward, so half of the groups have no signal.
REFILL = [
    *("--rollout.refill", "true", "--data.batch-size", str(PROMPTS), "--rollout.group-size", str(GROUP)),
    *("--data.reward", "parity_reward:reward", "--rollout.transcript-every", "1"),
]


def trained_rewards(run_dir):
    """Returns the rewards of each step's trained batch, [b, g]."""
    steps = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    lines = [[json.loads(line)["reward"] for line in path.read_text().splitlines()] for path in steps]
    return [np.reshape(rewards, (-1, GROUP)) for rewards in lines]


def assert_refilled(run_dir, steps=STEPS):
    """Checks that batches are full and that groups have signal below the limit of rounds. Returns the rows."""
    rows, batches = comparable(run_dir), trained_rewards(run_dir)
    assert len(rows) == len(batches) == steps
    assert sum(row["rollout/refilled_groups"] for row in rows) > steps
    for row, rewards in zip(rows, batches, strict=True):
        assert rewards.shape == (PROMPTS, GROUP)
        with_signal = (rewards != rewards[:, :1]).any(axis=1)
        assert with_signal.all() or row["rollout/refill_rounds"] == 4
        sampled = PROMPTS + row["rollout/refilled_groups"]
        assert row["reward/groups_with_signal"] == pytest.approx(with_signal.sum() / sampled)
        tokens = row["mismatch/token_count"] + row["rollout/refilled_tokens"]
        assert row["response_length/mean"] == pytest.approx(tokens / (GROUP * sampled))
    return rows


@pytest.fixture(scope="module")
def whole(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    completed(tiny(toy_base, run_dir, STEPS, *FLOAT32, *REFILL))
    return run_dir


@pytest.mark.harness  # run/test_refill.py has a scripted engine
def test_killed_while_groups_are_replaced_it_goes_on(whole, toy_base, tmp_path):
    rows = assert_refilled(whole)
    run_dir, counted = tmp_path / "run", tmp_path / "rewards"
    words = tiny(toy_base, run_dir, STEPS, *FLOAT32, *REFILL, "--data.reward-workers", "1")
    process = start(words, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}", RLJAX_TEST_REWARDS=str(counted))
    wait_for_rows(process, run_dir, 2)
    counted.touch()
    deadline = time.monotonic() + 60
    while len(counted.read_text()) <= PROMPTS * GROUP:  # the first round of a step has fewer rewards
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(comparable(run_dir)) < STEPS
    completed(words)
    assert comparable(run_dir) == rows


@pytest.mark.harness
def test_the_exact_engine_stays_at_zero_mismatch(toy_base, tmp_path):
    exact = ("--rollout.engine", "exact", "--rollout.dtype", "float16", "--precision.compute-dtype", "float16")
    completed(tiny(toy_base, tmp_path / "run", 2, *REFILL, *exact))
    assert {row["mismatch/logprob_abs_diff_max"] for row in assert_refilled(tmp_path / "run", 2)} == {0.0}
