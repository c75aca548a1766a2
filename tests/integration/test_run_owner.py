"""Runs in processes as a person or a scheduler starts them: a directory has one trainer, and a stop is in time."""

import os
import signal
import threading
import time

import pytest
from process_runs import FLOAT32, TINY, Run
from toy_runs import ROOT, TIMEOUT, comparable, complete, completed, start, tiny, wait_for_rows
from waiting import has_rows, until

pytestmark = pytest.mark.slow


@pytest.mark.harness
def test_a_second_run_is_refused_until_the_first_one_is_gone(toy_base, tmp_path):
    """distributed/test_ownership.py has many that claim a path at once."""
    run_dir = tmp_path / "run"
    words = tiny(toy_base, run_dir, 40)
    process = start(words)
    try:
        wait_for_rows(process, run_dir, 3)
        status, output = complete(words)
        assert (status, len(output.strip().splitlines())) == (2, 1), output
        held = f"error: {run_dir / 'owner.json'} is held by process {process.pid} on {os.uname().nodename}, which is"
        assert output.startswith(f"{held} alive, since 20")
    finally:
        process.kill()
        process.wait()
    output = completed(words)
    assert f"{run_dir}: taken over from process {process.pid} on {os.uname().nodename}, which is gone" in output
    assert "waiting" not in output
    assert [row["step"] for row in comparable(run_dir)] == list(range(1, 41))
    assert not (run_dir / "owner.json").exists()


def test_a_run_in_a_moved_directory_goes_on_there(toy_base, tmp_path):
    run_dir, moved = tmp_path / "run", tmp_path / "moved"

    def move():
        until(lambda: has_rows(run_dir, 3), TIMEOUT, every_s=0.005)
        run_dir.rename(moved)

    actor = threading.Thread(target=move)
    actor.start()
    try:
        status, output = complete(tiny(toy_base, run_dir, 400))
    finally:
        actor.join()
    said = f"error: {run_dir} was moved to {moved} while the run went on; run.dir = {moved} goes on from there"
    assert (status, output.strip().splitlines()[-1]) == (2, said)
    rows = len(comparable(moved))
    completed(tiny(toy_base, moved, rows + 1))
    assert [row["step"] for row in comparable(moved)] == list(range(1, rows + 2))


SLOW_REWARD = """
import pathlib, time

def reward(problem, response, truncated):
    if pathlib.Path(__file__).with_name("slow").exists():
        time.sleep(300)
    return float(len(response) % 2)
"""


@pytest.mark.harness
def test_terminated_while_rewards_are_awaited(toy_base, tmp_path, monkeypatch):
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    reward = ("--data.reward", "slow_reward:reward", "--data.reward-timeout-s", "400", "--run.grace-s", "4")
    run_dir, size = tmp_path / "run", (*reward, "--checkpoint.every", "1")
    process = start(tiny(toy_base, run_dir, 100, *size, "--data.reward-workers", "1"), PYTHONPATH=f"{ROOT}:{tmp_path}")
    try:
        wait_for_rows(process, run_dir, 3)
        (tmp_path / "slow").touch()
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert time.monotonic() - began < 30
    done = len(comparable(run_dir))
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"step {done + 1} is given up: asked to stop while responses were sampled" in output
    assert f"stopped after step {done}, saved" in output
    assert max(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()) == done
    (tmp_path / "slow").unlink()
    for name in ("run", "whole"):
        completed(tiny(toy_base, tmp_path / name, done + 2, *size))
    assert comparable(run_dir) == comparable(tmp_path / "whole")


def test_a_wrong_setting_ends_two_processes_with_status_2(toy_base, tmp_path):
    words = tiny(toy_base, tmp_path / "run", 2, *FLOAT32, *TINY, "--mesh.fsdp", "2")
    with Run(words, 2, tmp_path / "printed") as run:
        assert run.wait() == [2, 2], run.printed()
        assert "error: a mesh of replica=1, fsdp=2, tp=1 leaves processes without a part" in run.printed()[0]


def test_a_refused_run_leaves_the_directory_as_it_was(tmp_path):
    for there in (False, True):
        run_dir = tmp_path / "run"
        assert complete(tiny("nowhere", run_dir, 1))[0] == 2
        assert run_dir.exists() == there
        run_dir.mkdir(exist_ok=True)
        assert list(run_dir.iterdir()) == []
