"""A run whose disk fills up says so and ends with its last checkpoint whole. It goes on when there is room."""

import os
import re

import pytest
from small_disk import fill, small_disk
from toy_runs import comparable, complete, completed, refused, tiny

from rljax.commands import export
from rljax.record.rows import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.harness]

STEPS = 6
MEGABYTES = 24


def words(base, run_dir, steps):
    return tiny(base, run_dir, steps, "--rollout.dump-every", "1")


@pytest.mark.parametrize("left", [0, 100_000])
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on(left, toy_base, tmp_path):
    """After the first checkpoint ``left`` bytes are free. A row, or a dump and part of a checkpoint, may still fit."""
    with small_disk(tmp_path, MEGABYTES):
        run_dir = tmp_path / "run"
        completed(words(toy_base, run_dir, 2), figure=True)
        kept = {path: path.read_bytes() for path in (run_dir / "checkpoints" / "2").rglob("*") if path.is_file()}
        filler = fill(tmp_path)
        os.truncate(filler, max(0, filler.stat().st_size - left))
        status, output = complete(words(toy_base, run_dir, STEPS), figure=True)
        assert status == 2, output
        last = output.strip().splitlines()[-1]
        assert re.match("error: .*(No space left on device|could not be written, those before it are kept)", last), last
        assert {path: path.read_bytes() for path in kept} == kept
        rows = read_rows(run_dir / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= 2
        assert "No space left on device" in refused(export.main, [run_dir, tmp_path / "exported"])
        filler.unlink()
        completed(words(toy_base, run_dir, STEPS), figure=True)
        found = comparable(run_dir)
    completed(words(toy_base, tmp_path / "unbroken", STEPS))
    assert found == comparable(tmp_path / "unbroken")
