"""Tests of copies of checkpoints in an object store: hand-made folders, in stores that need no server."""

import dataclasses
import itertools
import json
import signal
import threading
import time

import fsspec
import pytest

from rljax.errors import ConfigError, OwnedError
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml
from rljax.run.directory import saved_steps
from rljax.run.stop import StopRequest
from rljax.run.store import DamagedCopyError, StoppedUploadError, Store, StoreError, Uploads, start_from_store

UNIQUE = itertools.count()


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    place = tmp_path / "store" if request.param == "file" else f"store{next(UNIQUE)}/{tmp_path.name}"
    store = Store(f"{request.param}://{place}/run")
    store.begin()
    return store


@pytest.fixture
def on_disk(tmp_path):
    store = Store(f"file://{tmp_path}/store")
    store.begin()
    return store


def config_of(run_dir, url, *, resume="auto", seed=0):
    config = Config()
    run = dataclasses.replace(config.run, dir=str(run_dir), resume=resume, seed=seed)
    return dataclasses.replace(config, run=run, checkpoint=dataclasses.replace(config.checkpoint, upload=url))


def make_run(run_dir, steps, url="", rows=None):
    """Makes a run directory with hand-made checkpoints of ``steps``, and returns it."""
    for step in steps:
        folder = run_dir / "checkpoints" / str(step) / "state"
        folder.mkdir(parents=True)
        (folder / "arrays").write_bytes(bytes([step]) * 1000)
        (folder / "empty").write_bytes(b"")
    (run_dir / "config.yaml").write_text(config_to_yaml(config_of(run_dir, url)))
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, (rows or max(steps)) + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


def folder_of(tmp_path, step):
    """Makes a folder with the files that a step uploads, and returns it."""
    folder = tmp_path / f"folder{step}"
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint" / "arrays").write_bytes(bytes([step]) * 1000)
    (folder / "metrics.jsonl").write_text(f"rows to {step}")
    return folder


def upload_all(store, run_dir, **options):
    with Uploads(store, run_dir, **({"keep": 2, "wait_s": 60.0} | options)):
        pass


def stop_at(call):
    """Returns a check of an upload that ends the upload at its ``call``-th call."""
    calls = itertools.count(1)

    def check():
        if next(calls) == call:
            raise StoppedUploadError

    return check


def files_in(store):
    files, root = fsspec.core.url_to_fs(store.url)
    return sorted(path.removeprefix(f"{root}/") for path in files.find(root))


def test_a_copy_comes_back_as_it_was(store, tmp_path):
    assert store.steps() == []
    store.upload(4, folder_of(tmp_path, 4), keep=2)
    assert store.steps() == [4]
    assert files_in(store) == ["4/checkpoint/arrays", "4/manifest.json", "4/metrics.jsonl", "started.json"]
    store.download(4, tmp_path / "back")
    assert (tmp_path / "back/checkpoint/arrays").read_bytes() == b"\x04" * 1000
    assert (tmp_path / "back/metrics.jsonl").read_text() == "rows to 4"


@pytest.mark.parametrize("call", [1, 2, 3])  # before each of the two files, and before the manifest
def test_an_upload_that_ends_early_leaves_the_one_before(store, tmp_path, call):
    store.upload(2, folder_of(tmp_path, 2), keep=2)
    with pytest.raises(StoppedUploadError):
        store.upload(4, folder_of(tmp_path, 4), keep=2, check=stop_at(call))
    assert sum(name.startswith("4/") for name in files_in(store)) == call - 1
    assert store.steps() == [2]
    store.download(2, tmp_path / "back")


def test_a_replaced_copy_loses_its_manifest_first(store, tmp_path):
    store.upload(2, folder_of(tmp_path, 2), keep=2)
    store.upload(4, folder_of(tmp_path, 4), keep=2)
    (tmp_path / "folder4/metrics.jsonl").write_text("other rows")
    with pytest.raises(StoppedUploadError):
        store.upload(4, tmp_path / "folder4", keep=2, check=stop_at(2))
    assert store.steps() == [2]
    store.upload(4, tmp_path / "folder4", keep=2)
    store.download(4, tmp_path / "back")
    assert (tmp_path / "back/metrics.jsonl").read_text() == "other rows"


def test_a_copy_that_is_there_is_not_uploaded_again(store, tmp_path):
    store.upload(4, folder_of(tmp_path, 4), keep=2)
    store.upload(4, tmp_path / "folder4", keep=2, check=stop_at(1))


def test_newest_copies_stay_and_those_without_manifest_go(store, tmp_path):
    for step in (2, 4, 6):
        store.upload(step, folder_of(tmp_path, step), keep=2)
    assert store.steps() == [4, 6]
    with pytest.raises(StoppedUploadError):
        store.upload(8, folder_of(tmp_path, 8), keep=2, check=stop_at(3))
    store.upload(10, folder_of(tmp_path, 10), keep=2)
    assert store.steps() == [6, 10]
    assert {name.partition("/")[0] for name in files_in(store)} == {"6", "10", "started.json"}


def test_a_run_that_went_on_from_before_a_copy_deletes_it(store, tmp_path):
    for step in (2, 4, 6, 3):
        store.upload(step, folder_of(tmp_path, step), keep=2)
    assert store.steps() == [3]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("checkpoint/arrays", b"\x04" * 999 + b"\x05", "other content than was written in checkpoint/arrays"),
        ("checkpoint/arrays", b"\x04" * 999, "checkpoint/arrays has 999 bytes, not 1000 bytes"),
        ("checkpoint/arrays", None, "checkpoint/arrays is missing, not 1000 bytes"),
        ("manifest.json", b'{"step": 4, "files"', "its manifest cannot be read"),
        ("manifest.json", b'{"step": 6, "files": {}}', "its manifest is of step 6"),
        ("manifest.json", b'{"step": 4, "files": {"../x": [1, ""]}}', "its manifest names files of another place"),
    ],
)
def test_a_damaged_copy_is_named(on_disk, tmp_path, name, content, what):
    on_disk.upload(4, folder_of(tmp_path, 4), keep=2)
    path = tmp_path / "store/4" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DamagedCopyError, match=what):
        on_disk.download(4, tmp_path / "back")


def test_a_store_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"^nope://x/y: cannot be opened .*Protocol not known: nope$"):
        Store("nope://x/y")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^file://.*/file/x: cannot be written: "):
        Store(f"file://{tmp_path}/file/x").begin()
    with pytest.raises(ValueError, match="upload must be a URL"):
        config_of(tmp_path, "bucket/prefix")


def test_the_newest_checkpoint_is_uploaded_with_its_rows(store, tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", [2, 4], rows=5)
    (run_dir / "checkpoints/6.orbax-checkpoint-tmp").mkdir()
    upload_all(store, run_dir)
    assert store.steps() == [4]
    store.download(4, tmp_path / "back")
    assert (tmp_path / "back/checkpoint/state/arrays").read_bytes() == b"\x04" * 1000
    assert (tmp_path / "back/metrics.jsonl").read_text().splitlines() == [f'{{"step": {n}}}' for n in (1, 2, 3, 4)]
    assert (tmp_path / "back/config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    assert not (run_dir / "checkpoints.upload").exists()
    assert capsys.readouterr().err == f"checkpoint 4 is in {store.url}\n"


def test_checkpoints_are_uploaded_while_the_run_goes_on(store, tmp_path):
    run_dir = make_run(tmp_path / "run", [2])
    with Uploads(store, run_dir, keep=2, wait_s=60.0):
        deadline = time.monotonic() + 30
        while store.steps() != [2] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.steps() == [2]
        make_run(run_dir, [4])
    assert store.steps() == [2, 4]


def test_a_store_that_fails_costs_one_line_and_is_tried_again(on_disk, tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", [2])
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("no folder")
    with Uploads(on_disk, run_dir, keep=2, wait_s=60.0):
        time.sleep(2.5)
    said = capsys.readouterr().err
    assert said.count("\n") == 2  # the warning begins on a line of its own
    assert f"warning: {on_disk.url}: checkpoint 2 could not be uploaded: " in said

    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    upload_all(on_disk, run_dir)
    assert on_disk.steps() == [2]


def test_the_end_of_a_run_waits_no_longer_than_it_may(on_disk, tmp_path, capsys):
    run_dir, hold, stop = make_run(tmp_path / "run", [2]), threading.Event(), StopRequest(1.0)
    stop.request(signal.SIGTERM)
    began = time.monotonic()
    # The time left is less than a run needs to end. The upload cannot be done by chance before that.
    upload_all(on_disk, run_dir, stop=stop, check_owner=lambda: hold.wait(20))
    hold.set()
    assert time.monotonic() - began < 1.0
    assert "warning: no time was left to upload checkpoint 2 to file://" in capsys.readouterr().err


def test_a_run_that_another_process_took_over_uploads_nothing(on_disk, tmp_path):
    def taken_over():
        raise OwnedError("taken over")

    upload_all(on_disk, make_run(tmp_path / "run", [2]), check_owner=taken_over)
    assert on_disk.steps() == []


def kept_run(on_disk, tmp_path, steps=(2, 4)):
    """Puts copies of ``steps`` of a run into the store, and returns an empty run directory."""
    for step in steps:
        upload_all(on_disk, make_run(tmp_path / f"old{step}", [step], on_disk.url), keep=len(steps))
    assert on_disk.steps() == list(steps)
    new = tmp_path / "new"
    new.mkdir()
    return new


def test_an_empty_run_directory_is_filled_from_the_store(on_disk, tmp_path, capsys):
    new = kept_run(on_disk, tmp_path)
    assert start_from_store(config_of(new, on_disk.url), new).url == on_disk.url
    assert sorted(path.name for path in new.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert saved_steps(new) == [4]
    assert (new / "checkpoints/4/state/arrays").read_bytes() == b"\x04" * 1000
    assert len((new / "metrics.jsonl").read_text().splitlines()) == 4
    assert f"going on from checkpoint 4 of {on_disk.url}\n" in capsys.readouterr().out


def test_the_copy_before_a_damaged_one_is_used(on_disk, tmp_path, capsys):
    new = kept_run(on_disk, tmp_path)
    arrays = tmp_path / "store/4/checkpoint/state/arrays"
    arrays.write_bytes(b"\x05" + arrays.read_bytes()[1:])
    start_from_store(config_of(new, on_disk.url), new)
    assert saved_steps(new) == [2]
    assert "warning: checkpoint 4 in file://" in capsys.readouterr().err

    (tmp_path / "store/2/config.yaml").unlink()
    another = tmp_path / "another"
    another.mkdir()
    with pytest.raises(ConfigError, match=r"^no checkpoint in file://.* is whole"):
        start_from_store(config_of(another, on_disk.url), another)
    assert not list(another.iterdir())


def test_the_later_of_directory_and_store_is_continued(on_disk, tmp_path):
    new = make_run(kept_run(on_disk, tmp_path), [3], on_disk.url)
    start_from_store(config_of(new, on_disk.url), new)
    assert saved_steps(new) == [3, 4]
    make_run(new, [5], on_disk.url)
    start_from_store(config_of(new, on_disk.url), new)
    assert saved_steps(new) == [3, 4, 5]


def test_what_was_put_aside_as_damaged_is_not_taken_back(on_disk, tmp_path):
    new = make_run(kept_run(on_disk, tmp_path), [3], on_disk.url)
    (new / "damaged/4").mkdir(parents=True)
    start_from_store(config_of(new, on_disk.url), new)
    assert saved_steps(new) == [3]


@pytest.mark.parametrize(
    ("options", "what"),
    [({"resume": "never"}, "already holds a run, to step 4"), ({"seed": 7}, r"other settings: run.seed \(0 there")],
)
def test_the_store_of_another_run_is_refused(on_disk, tmp_path, options, what):
    new = kept_run(on_disk, tmp_path)
    with pytest.raises(ConfigError, match=what):
        start_from_store(config_of(new, on_disk.url, **options), new)
    assert not list(new.iterdir())
