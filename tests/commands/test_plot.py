"""``rljax plot``: where the picture goes, the panels of chosen metrics, and a caller's mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import record_row, write_record
from toy_runs import printed, refused

from rljax.commands.plot import main

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def runs(tmp_path):
    return [write_record(tmp_path / name, [record_row(step) for step in range(1, 41)]) for name in ("one", "two")]


def test_one_run_is_plotted_into_itself_and_several_here(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, out in (([runs[0]], runs[0] / "report.png"), ([*runs, "--smooth", "0.5"], Path("report.png"))):
        assert printed(main, arguments) == f"{out}\n"
        assert out.exists()


def test_chosen_metrics_have_a_panel_each(runs, tmp_path):
    keys = "optimizer/grad_norm,policy/entropy,mismatch/log_ppl_abs_diff"
    out = tmp_path / "chosen.svg"
    assert printed(main, [*runs, "--metrics", keys, "--out", out]) == f"{out}\n"
    text = out.read_text()
    assert all(f"<!-- {key} -->" in text for key in keys.split(","))
    assert "<!-- Reward -->" not in text


def test_the_programs_mistakes_take_one_line(runs, tmp_path, monkeypatch):
    write_record(tmp_path / "empty", [])
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["empty"], "empty/metrics.jsonl: no rows to plot"),
        ([], "expected RUNS; rljax plot --help"),
        (["one", "--smooth", "2"], "smooth must be in the range [0, 1), got 2.0"),
        (["one", "--out", "one/metrics.jsonl/x.png"], "one/metrics.jsonl"),
        (["one", "--metrics", "reward/mean,reward/man"], "no run has numbers under reward/man; the keys are those of"),
    ):
        assert refused(main, arguments).startswith(f"error: {message}")
