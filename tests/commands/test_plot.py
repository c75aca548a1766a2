"""``rljax plot``: where the picture goes, the panels of chosen metrics, and a caller's mistakes."""

from pathlib import Path

import pytest
from records import record_row, write_record
from toy_runs import printed, refused

from rljax.commands.plot import main

pytestmark = pytest.mark.filterwarnings("error")


def test_one_run_is_plotted_into_itself_and_several_here(tmp_path, monkeypatch):
    """Chosen metrics have a panel each, and a mistake takes one line."""
    one, two = (write_record(tmp_path / name, [record_row(step) for step in range(1, 41)]) for name in ("one", "two"))
    monkeypatch.chdir(tmp_path)
    for arguments, out in (([one], one / "report.png"), ([one, two, "--smooth", "0.5"], Path("report.png"))):
        assert printed(main, arguments) == f"{out}\n"
        assert out.exists()
    keys, out = "optimizer/grad_norm,policy/entropy,mismatch/log_ppl_abs_diff", tmp_path / "chosen.svg"
    assert printed(main, [one, two, "--metrics", keys, "--out", out]) == f"{out}\n"
    text = out.read_text()
    assert all(f"<!-- {key} -->" in text for key in keys.split(","))
    assert "<!-- Reward -->" not in text
    write_record(tmp_path / "empty", [])
    for arguments, message in (
        (["empty"], "empty/metrics.jsonl: no rows to plot"),
        ([], "expected RUNS; rljax plot --help"),
        (["one", "--smooth", "2"], "smooth must be in the range [0, 1), got 2.0"),
        (["one", "--out", "one/metrics.jsonl/x.png"], "one/metrics.jsonl"),
        (["one", "--metrics", "reward/mean,reward/man"], "no run has numbers under reward/man; the keys are those of"),
    ):
        assert refused(main, arguments).startswith(f"error: {message}")
