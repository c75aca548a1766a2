"""One run by two real processes has the rows of one process. Either process is asked to stop, or one is killed."""

import signal
import time

import pytest
from process_runs import FLOAT32, TINY, Run, complete_together, largest_differences
from toy_runs import comparable, tiny

from rljax.errors import START_AGAIN_STATUS
from rljax.record.rows import read_rows

pytestmark = pytest.mark.slow
STEPS = 8


def words(base, run_dir, *options):
    return tiny(base, run_dir, STEPS, *FLOAT32, *TINY, "--rollout.dump-every", "4", *options)


@pytest.fixture(scope="module")
def alone(toy_base, tmp_path_factory):
    """Returns the rows of one process on four devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    complete_together(words(toy_base, run_dir), 1, run_dir.with_name("printed"))
    rows = comparable(run_dir)
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) > STEPS // 2
    return rows


def assert_same(run_dir, rows):
    differences = largest_differences(rows, comparable(run_dir))
    assert max(differences.values(), default=0.0) < 1e-5, differences


@pytest.mark.processes
def test_ended_and_started_again_the_rows_are_those_of_one(alone, toy_base, tmp_path):
    run_dir = tmp_path / "run"
    with Run(words(toy_base, run_dir), 2, tmp_path / "first") as run:
        run.wait_for_rows(run_dir, 2)
        run.send(1, signal.SIGTERM)
        assert run.wait() == [128 + signal.SIGTERM] * 2, run.printed()
        assert f"stopped after step {len(comparable(run_dir))}, saved" in run.printed()[0]
    with Run(words(toy_base, run_dir, "--checkpoint.every", "1"), 2, tmp_path / "second", heartbeat_s=4) as run:
        run.wait_for_rows(run_dir, 6)
        run.send(1)
        killed = time.monotonic()
        assert run.wait(but=[1]) == [START_AGAIN_STATUS], run.printed()
        assert time.monotonic() - killed < 30
        assert "error: process 1 on " in run.printed()[0]
    complete_together(words(toy_base, run_dir), 2, tmp_path / "third")
    assert_same(run_dir, alone)
    newest = read_rows(run_dir / "metrics.jsonl")[-1]
    assert {newest[f"perf/{act}_slowest_process"] for act in ("pack", "update")} <= {0, 1}
    assert newest["perf/update_slowest_s"] >= 0
    printed = (tmp_path / "third.1").read_text()
    assert printed == "", "the second process printed outside its log"
    assert (run_dir / "logs" / "process_1.log").exists()


@pytest.mark.processes
def test_two_processes_train_the_adapters_of_one(toy_base, tmp_path):
    lora = ("--lora.rank", "4", "--optimizer.learning-rate", "2e-3")
    for count in (1, 2):
        complete_together(words(toy_base, tmp_path / f"of{count}", *lora), count, tmp_path / f"printed{count}")
    rows = comparable(tmp_path / "of1")
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) > STEPS // 2
    assert_same(tmp_path / "of2", rows)


def test_a_wrong_setting_ends_both_with_status_2(toy_base, tmp_path):
    with Run(words(toy_base, tmp_path / "run", "--mesh.fsdp", "2"), 2, tmp_path / "printed") as run:
        assert run.wait() == [2, 2], run.printed()
        assert "error: a mesh of replica=1, fsdp=2, tp=1 leaves processes without a part" in run.printed()[0]
