"""A run directory has one trainer, with processes as a person or a scheduler starts them."""

import os
import signal
import threading

import pytest
from toy_runs import TIMEOUT, comparable, complete, completed, start, tiny, wait_for_rows
from waiting import has_rows, until

from rljax.distributed.ownership import read

pytestmark = pytest.mark.slow


@pytest.mark.harness
def test_of_two_started_at_once_one_trains(toy_base, tmp_path):
    run_dir = tmp_path / "run"
    words = tiny(toy_base, run_dir, 40)
    children = [start(words), start(words)]
    try:
        until(lambda: any(child.poll() is not None for child in children), TIMEOUT)
        refused, trains = sorted(children, key=lambda child: child.returncode is None)
        output = refused.communicate()[0]
        assert refused.returncode == 2, output
        (line,) = output.strip().splitlines()
        owner = f"error: {run_dir / 'owner.json'} is held by process {trains.pid} on {os.uname().nodename}, which is"
        assert line.startswith(f"{owner} alive, since 20")
        wait_for_rows(trains, run_dir, 3)
        trains.send_signal(signal.SIGKILL)
        trains.wait()
        assert read(run_dir / "owner.json").pid == trains.pid
    finally:
        for child in children:
            child.kill()
            child.wait()
    output = completed(words)
    assert f"{run_dir}: taken over from process {trains.pid} on {os.uname().nodename}, which is gone" in output
    assert "waiting" not in output
    assert [row["step"] for row in comparable(run_dir)] == list(range(1, 41))
    assert not (run_dir / "owner.json").exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_refused_run_leaves_the_directory_as_it_was(is_new, tmp_path):
    run_dir = tmp_path / "run"
    if not is_new:
        run_dir.mkdir()
    status, output = complete(tiny("nowhere", run_dir, 1))
    assert (status, len(output.splitlines())) == (2, 1)
    assert run_dir.exists() != is_new
    assert is_new or list(run_dir.iterdir()) == []


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
    assert status == 2
    said = f"error: {run_dir} was moved to {moved} while the run went on; run.dir = {moved} goes on from there"
    assert output.strip().splitlines()[-1] == said
    rows = len(comparable(moved))
    completed(tiny(toy_base, moved, rows + 1))
    assert [row["step"] for row in comparable(moved)] == list(range(1, rows + 2))
