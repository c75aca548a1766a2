"""Whole runs keep a copy of themselves in a real S3 server on this machine (tools/test_store.sh)."""

import shutil
import subprocess

import pytest
from toy_runs import ROOT, comparable, completed, tiny

STEPS = 6
COPY = ROOT / "launch/copy_run.sh"
pytestmark = [pytest.mark.store, pytest.mark.timeout(900)]
pytest_plugins = ["s3_server"]


def words(base, run_dir, steps, url):
    return tiny(base, run_dir, steps, "--checkpoint.after-save", f"bash {COPY} save {url}", "--run.grace-s", "120")


def load(url, run_dir):
    subprocess.run(["bash", COPY, "load", url, run_dir], check=True, timeout=300)


def test_a_run_whose_directory_is_gone_goes_on_from_its_copy(s3, toy_base, tmp_path):
    run_dir, url = tmp_path / "run", "s3://runs/team/first"
    assert "after_save" not in completed(words(toy_base, run_dir, 4, url))
    shutil.rmtree(run_dir)

    load(url, run_dir)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4"]
    assert not (run_dir / "owner.json").exists()
    completed(words(toy_base, run_dir, STEPS, url))
    alone = comparable(run_dir)
    assert [row["step"] for row in alone] == list(range(1, STEPS + 1))
    (run_dir / "metrics.jsonl").unlink()
    load(url, run_dir)  # does nothing, since the directory has checkpoints
    assert not (run_dir / "metrics.jsonl").exists()
    load(url, tmp_path / "later")
    assert sorted(path.name for path in (tmp_path / "later/checkpoints").iterdir()) == ["4", "6"]
    # A server that is gone costs a warning a save.
    s3.stop()
    said = completed(words(toy_base, tmp_path / "gone", STEPS, "s3://runs/gone"))
    assert 1 <= said.count("warning: checkpoint.after_save failed for checkpoint ") <= 3
    assert "Could not connect to the endpoint URL" in said
    assert "Traceback" not in said
    assert comparable(tmp_path / "gone") == alone
