"""The kill harness: what it does to a run, and that it sees what it is there to see."""

import json
import shutil

import kill_run
import pytest
from toy_runs import outcome


@pytest.mark.slow
def test_two_kills_leave_the_rows_as_they_were_and_a_changed_row_is_seen(tmp_path):
    words = ["--kills", "2", "--seeds", "3", "--steps", "6", "--directory", tmp_path, "--json", tmp_path / "found.json"]
    status, out, err = outcome(kill_run.main, words)
    assert status == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["kills"] == sum(found["by_phase"].values()) == 2
    assert found["differences"] == []
    assert out.startswith(f"2 kills in {found['runs']} runs of 6 steps, ")
    whole, killed = tmp_path / "runs" / "whole3", tmp_path / "runs" / "killed3-0"
    assert kill_run.differences(killed, whole) == []
    rows = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(rows[3]) | {"reward/mean": 0.123}
    (killed / "metrics.jsonl").write_text("".join([*rows[:3], json.dumps(row) + "\n", *rows[4:]]))
    assert kill_run.differences(killed, whole) == [f"{killed}: step 4 differs in reward/mean"]
    (killed / "metrics.jsonl").write_text("".join(rows[:5]))
    assert kill_run.differences(killed, whole)[0] == f"{killed}: steps [1, 2, 3, 4, 5]"
    shutil.rmtree(killed / "rollouts")
    assert f"{killed}: dumps []" in kill_run.differences(killed, whole)
