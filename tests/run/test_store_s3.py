"""Whole runs keep their checkpoints in a real S3 server on this machine (tools/test_store.sh)."""

import shutil

import pytest
from toy_runs import comparable, complete, start, tiny, wait_for_rows

STEPS = 6
pytestmark = [pytest.mark.store, pytest.mark.timeout(900)]
pytest_plugins = ["s3_server"]


def words(base, run_dir, steps, url):
    return tiny(base, run_dir, steps, "--checkpoint.upload", url)


def steps_in(url):
    from rljax.run.store import Store

    return Store(url).steps()


def test_a_run_whose_directory_is_gone_goes_on_from_the_store(s3, toy_base, tmp_path):
    status, said = complete(tiny(toy_base, tmp_path / "alone", STEPS))
    assert status == 0, said
    run_dir, url = tmp_path / "run", "s3://runs/team/first"
    status, said = complete(words(toy_base, run_dir, 4, url))
    assert status == 0, said
    assert f"checkpoint 4 is in {url}" in said
    assert "warning" not in said.replace("warning: nothing is evaluated", "")
    assert steps_in(url)[-1] == 4
    shutil.rmtree(run_dir)

    status, said = complete(words(toy_base, run_dir, STEPS, url))
    assert status == 0, said
    assert f"going on from checkpoint 4 of {url}" in said
    assert comparable(run_dir) == comparable(tmp_path / "alone")
    assert steps_in(url) == [4, 6]
    assert not list(run_dir.glob("checkpoints.*"))


def test_a_copy_that_is_damaged_in_the_store_is_passed_over(s3, toy_base, tmp_path):
    import fsspec

    status, said = complete(tiny(toy_base, tmp_path / "alone", STEPS))
    assert status == 0, said
    run_dir, url = tmp_path / "run", "s3://runs/damaged"
    for steps in (2, 4):
        status, said = complete(words(toy_base, run_dir, steps, url))
        assert status == 0, said
    assert steps_in(url) == [2, 4]
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    largest = max(store.find("runs/damaged/4", detail=True).values(), key=lambda info: info["size"])
    content = bytearray(store.cat_file(largest["name"]))
    content[len(content) // 2] ^= 1
    store.pipe_file(largest["name"], bytes(content))
    shutil.rmtree(run_dir)

    status, said = complete(words(toy_base, run_dir, STEPS, url))
    assert status == 0, said
    assert f"warning: checkpoint 4 in {url} is damaged: other content than was written in checkpoint/" in said
    assert f"going on from checkpoint 2 of {url}" in said
    assert comparable(run_dir) == comparable(tmp_path / "alone")


def test_a_server_that_is_gone_costs_one_warning(s3, toy_base, tmp_path):
    run_dir, url = tmp_path / "run", "s3://runs/gone"
    process = start(words(toy_base, run_dir, 60, url))
    try:
        wait_for_rows(process, run_dir, 3)
        s3.stop()
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert len(comparable(run_dir)) == 60
    assert said.count(f"warning: {url}: checkpoint ") == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("url", "settings", "why"),
    [
        ("s3://no-such-bucket/x", {}, "The specified bucket does not exist"),
        ("s3://runs/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect to the endpoint URL"),
        ("s3://runs/x", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
)
def test_a_store_that_cannot_be_used_ends_the_start(s3, toy_base, tmp_path, monkeypatch, url, settings, why):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    status, said = complete(words(toy_base, tmp_path / "run", 2, url))
    assert status == 2
    assert said.startswith(f"error: {url}: cannot be written: {why}"), said
    assert len(said.splitlines()) == 1
