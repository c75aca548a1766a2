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


@pytest.fixture(scope="module")
def alone(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    completed(tiny(toy_base, run_dir, STEPS))
    return comparable(run_dir)


def test_a_run_whose_directory_is_gone_goes_on_from_its_copy(s3, toy_base, tmp_path, alone):
    run_dir, url = tmp_path / "run", "s3://runs/team/first"
    assert "after_save" not in completed(words(toy_base, run_dir, 4, url))
    shutil.rmtree(run_dir)

    load(url, run_dir)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4"]
    assert not (run_dir / "owner.json").exists()
    completed(words(toy_base, run_dir, STEPS, url))
    assert comparable(run_dir) == alone
    (run_dir / "metrics.jsonl").unlink()
    load(url, run_dir)  # does nothing, since the directory has checkpoints
    assert not (run_dir / "metrics.jsonl").exists()
    load(url, tmp_path / "later")
    assert sorted(path.name for path in (tmp_path / "later/checkpoints").iterdir()) == ["4", "6"]


def test_a_server_that_is_gone_costs_a_warning_a_save(s3, toy_base, tmp_path, alone):
    s3.stop()
    said = completed(words(toy_base, tmp_path / "run", STEPS, "s3://runs/gone"))
    assert 1 <= said.count("warning: checkpoint.after_save failed for checkpoint ") <= 3
    assert "Could not connect to the endpoint URL" in said
    assert "Traceback" not in said
    assert comparable(tmp_path / "run") == alone
