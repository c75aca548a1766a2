"""The watch of a long run reads the right numbers, and summarizes them correctly."""

import mmap
import os

import numpy as np
import pytest
import watch_long_run
from records import record_row, write_record


def test_what_a_process_holds(tmp_path):
    run_dir = write_record(tmp_path / "run", [record_row(1)])
    (run_dir / "tb").mkdir()
    (run_dir / "tb" / "events").write_bytes(bytes(7))
    before = watch_long_run.reading(os.getpid(), run_dir)
    assert before["metrics_bytes"] == (run_dir / "metrics.jsonl").stat().st_size
    assert before["tensorboard_bytes"] == 7
    # These pages are new to the process; malloc may return pages that are resident already.
    block, files = mmap.mmap(-1, 2**26), [open(os.devnull) for _ in range(5)]  # noqa: SIM115
    np.frombuffer(block, np.uint8)[:] = 1
    after = watch_long_run.reading(os.getpid(), run_dir)
    assert after["open_files"] == before["open_files"] + 5
    assert after["resident_mib"] - before["resident_mib"] == pytest.approx(64, abs=8)
    for file in files:
        file.close()


def test_slopes_leave_out_the_first_tenth():
    steps = np.arange(20, 2001, 20)
    readings = {"step": steps.tolist(), "threads": [50 if step <= 200 else 10 + step / 100 for step in steps]}
    rows = [record_row(step) | {"time/step_s": 0.01 + 1e-5 * step} for step in range(1, 201)]
    figures = watch_long_run.summarize(readings, rows)
    assert figures["threads"] == {"first": 50, "last": 30, "slope_per_1000_steps": pytest.approx(10.0)}
    # Early rows are 11 to 30, late rows are 181 to 200.
    assert figures["step_ms"] == {"early": pytest.approx(10.205), "late": pytest.approx(11.905)}
    assert 0 < figures["row_us"]["late"] < 10 * figures["row_us"]["early"]
