"""Whole runs keep a copy of themselves in a real S3 server on this machine (tools/test_store.sh)."""

import shutil
import subprocess

import pytest
from toy_runs import ROOT, comparable, complete, tiny

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
    status, said = complete(tiny(toy_base, run_dir, STEPS))
    assert status == 0, said
    return comparable(run_dir)


def test_a_run_whose_directory_is_gone_goes_on_from_its_copy(s3, toy_base, tmp_path, alone):
    run_dir, url = tmp_path / "run", "s3://runs/team/first"
    status, said = complete(words(toy_base, run_dir, 4, url))
    assert status == 0, said
    assert "after_save" not in said
    shutil.rmtree(run_dir)

    load(url, run_dir)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4"]
    assert not (run_dir / "owner.json").exists()
    status, said = complete(words(toy_base, run_dir, STEPS, url))
    assert status == 0, said
    assert comparable(run_dir) == alone
    (run_dir / "metrics.jsonl").unlink()
    load(url, run_dir)  # does nothing, since the directory has checkpoints
    assert not (run_dir / "metrics.jsonl").exists()
    load(url, tmp_path / "later")
    assert sorted(path.name for path in (tmp_path / "later/checkpoints").iterdir()) == ["4", "6"]


def test_a_copy_that_broke_off_is_passed_over(s3, toy_base, tmp_path, alone):
    import fsspec

    run_dir, url = tmp_path / "run", "s3://runs/half"
    for steps in (2, 4):
        status, said = complete(words(toy_base, run_dir, steps, url))
        assert status == 0, said
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    files = sorted(store.find("runs/half/checkpoints/4", detail=True).values(), key=lambda info: -info["size"])
    for info in files[: len(files) // 2]:
        store.rm_file(info["name"])
    shutil.rmtree(run_dir)

    load(url, run_dir)
    status, said = complete(words(toy_base, run_dir, STEPS, url))
    assert status == 0, said
    assert "warning: checkpoint 4 in " in said
    assert " is damaged: " in said
    assert comparable(run_dir) == alone


def test_a_server_that_is_gone_costs_a_warning_a_save(s3, toy_base, tmp_path, alone):
    s3.stop()
    status, said = complete(words(toy_base, tmp_path / "run", STEPS, "s3://runs/gone"))
    assert status == 0, said
    assert 1 <= said.count("warning: checkpoint.after_save failed for checkpoint ") <= 3
    assert "Could not connect to the endpoint URL" in said
    assert "Traceback" not in said
    assert comparable(tmp_path / "run") == alone
