"""Versions of the weights are written, and the tests check which deltas and anchors a machine pulls."""

import contextlib
import runpy
import shutil
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from toy_runs import ROOT
from weight_training import SHAPES, Training, assert_holds, held, shards

from rljax.weights.format import Base, TensorRecord, Version, write_version
from rljax.weights.mirror import Mirror
from rljax.weights.publish_config import PublishConfig
from rljax.weights.pull import pull
from rljax.weights.source import open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of
from rljax.weights.writer import PartWriter, merge_written

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_versions_arrive_bit_for_bit_as_deltas(tmp_path, mirror, dtype):
    training = Training(tmp_path, dtype)
    with contextlib.closing(training.files):
        training.write()
        done = training.pull(mirror)
        assert (done.dense, done.deltas) == (True, 0)
        assert 0 < done.check_s < done.seconds - done.fetch_s
        assert_holds(mirror, training)
        for share in (0.05, 0.0, 0.2):
            before = {name: bits_of(array).copy() for name, array in training.tensors.items()}
            version = training.step(share)
            done = training.pull(mirror)
            assert (done.dense, done.deltas, done.bytes, done.repaired) == (False, 1, version.num_bytes, "")
            assert 0 < done.check_s < done.seconds - done.fetch_s
            assert_holds(mirror, training)
            changed = sum(int((bits_of(array) != before[name]).sum()) for name, array in training.tensors.items())
            assert version.changed_fraction == changed / sum(array.size for array in training.tensors.values())
    assert np.isnan(training.versions[0].changed_fraction)


def test_a_delta_of_one_percent_is_a_fiftieth_of_dense(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"w": (rng.normal(size=(1000, 1000)) * 0.02).astype(ml_dtypes.bfloat16)}
    with contextlib.closing(WeightDirectory(PublishConfig("directory"), tmp_path)) as files:
        dense = files.write(tensors.items(), 0, {"w": array_checksum(tensors["w"])})
        new = {"w": tensors["w"].copy()}
        bits_of(new["w"]).reshape(-1)[rng.choice(10**6, 10**4, replace=False)] ^= 1
        delta = files.write(new.items(), 1, {"w": array_checksum(new["w"])})
    assert delta.changed_fraction == 0.01
    assert 2_000_000 <= dense.num_bytes < 2_001_000
    assert delta.num_bytes < dense.num_bytes / 50


def test_a_delta_that_would_be_larger_than_dense_is_dense(training, mirror):
    training.write()
    training.tensors = {
        name: bits_of(training.rng.integers(0, 2**16, array.shape, np.uint16)).view(array.dtype)
        for name, array in training.tensors.items()
    }
    version = training.write()
    assert [path.name for path in version.path.glob("*-delta*")] == []
    assert training.pull(mirror).dense
    assert_holds(mirror, training)
    training.step()
    assert training.pull(mirror).deltas == 1


def test_versions_before_the_newest_anchor_are_removed(training, mirror):
    kinds = []
    for _ in range(10):
        version = training.step()
        names = {path.name.split("-")[-1].split(".")[0] for path in version.path.glob("*.safetensors")}
        kinds.append(sorted(names))
        training.pull(mirror)
        training.files.drop_old()
    assert kinds == [["dense"], *[["delta"]] * 3, ["delta", "dense"], *[["delta"]] * 3, ["delta", "dense"], ["delta"]]
    assert [path.name for path in sorted(training.files.root.glob("v*"))] == ["v00000008-9", "v00000009-10"]


@pytest.mark.parametrize(
    ("seen", "last", "dense", "deltas"),
    [
        (None, 2, True, 2),  # it joins late, and takes the first version and the deltas since
        (None, 5, True, 1),  # it takes the newest anchor
        (1, 3, False, 2),  # it missed one version
        (1, 6, False, 5),  # it missed an anchor, but the version that it holds is still in the chain
        (6, 6, False, 0),  # it has this version
    ],
)
def test_who_is_behind_gets_the_chain_or_an_anchor(training, mirror, seen, last, dense, deltas):
    for number in range(last + 1):
        training.step(0.01)
        if number == seen:
            training.pull(mirror)
    done = training.pull(mirror)
    assert (done.dense, done.deltas) == (dense, deltas)
    assert_holds(mirror, training)


def test_who_missed_more_than_is_kept_gets_the_anchor(training, mirror):
    for number in range(6):
        training.step(0.01)
        if number == 1:
            training.pull(mirror)
    training.files.drop_old()
    done = training.pull(mirror)
    assert (done.dense, done.deltas) == (True, 1)
    assert_holds(mirror, training)


def test_many_large_deltas_are_not_taken_instead_of_an_anchor(training, mirror):
    training.step()
    training.pull(mirror)
    for _ in range(4):
        training.step(0.6)
    done = training.pull(mirror)
    assert (done.dense, done.deltas) == (True, 0)
    assert_holds(mirror, training)


def test_no_pull_takes_a_mirror_back_to_an_older_version(training, mirror):
    """A server that recovers during a publish pulls the older version into a mirror from which others load."""
    older = training.step()
    newer = training.step()
    training.pull(mirror, newer)
    with pytest.raises(ValueError, match=f"holds {newer.path.name} already, which is newer than {older.path.name}"):
        training.pull(mirror, older)
    assert_holds(mirror, training)


def test_another_runs_mirror_is_taken_for_nothing(tmp_path, training, mirror):
    other = Training(tmp_path / "other")
    with contextlib.closing(other.files):
        for _ in range(4):
            other.step(0.5)
        other.pull(mirror)
    training.step()
    training.step()
    assert training.pull(mirror).dense
    assert_holds(mirror, training)


# ---- shards ----


@pytest.mark.parametrize("count", [2, 4])
def test_shards_written_by_several_processes_are_one_version(tmp_path, training, mirror, count):
    writers = [PartWriter(lambda parts: parts, str(process)) for process in range(count)]
    base = None
    for number in range(3):
        if number:
            bits_of(training.tensors["embed"]).reshape(-1)[number::17] ^= 1
            bits_of(training.tensors["head"]).reshape(-1)[number::7] ^= 1
        directory = tmp_path / f"v{number:08d}-1"
        directory.mkdir()
        held_by = shards(training.tensors, count)
        taken = [writer.collect(parts) for writer, parts in zip(writers, held_by, strict=True)]
        assert sum(each.elements for each in taken) == sum(array.size for array in training.tensors.values())
        written = merge_written([writer.write("delta" if number else "dense", directory) for writer in writers])
        records = {name: TensorRecord(array.shape, array_checksum(array)) for name, array in training.tensors.items()}
        pieces = {"delta": written.pieces, "base": base} if number else {"dense": written.pieces}
        version = Version(directory.name, f"tag{number}", "bfloat16", records, written.files, **pieces)
        write_version(directory, version)
        base = Base(version.name, version.digest)
        done = pull(open_source(str(tmp_path)), directory.name, mirror)
        assert (done.dense, done.deltas) == (number == 0, int(number > 0))
        assert held(mirror)[0] == f"tag{number}"
        for name, array in held(mirror)[1].items():
            assert array.tobytes() == training.tensors[name].tobytes()


# ---- a reader without any code of this package ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reader_of_the_documentation_reads_a_chain(tmp_path, dtype):
    reader = runpy.run_path(str(ROOT / "examples/read_weights.py"))
    training = Training(tmp_path, dtype, anchor_every=3)
    with contextlib.closing(training.files):
        for _ in range(5):
            version = training.step()
            shapes, bits = reader["read"](training.files.root, version.path.name)
            assert shapes == SHAPES
            for name, array in training.tensors.items():
                assert bits[name].tobytes() == array.tobytes()


# ---- several at once, and other places ----


def test_servers_of_one_machine_pull_once(training, mirror):
    training.step()
    done = []
    threads = [threading.Thread(target=lambda: done.append(training.pull(Mirror(mirror.root)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.dense for each in done) == [False, False, False, True]
    assert_holds(mirror, training)


def test_nobody_loads_while_the_mirror_changes(training, mirror):
    training.step()
    training.pull(mirror)
    training.step()
    pulling = threading.Thread(target=training.pull, args=[Mirror(mirror.root)])
    with mirror.locked(shared=True), Mirror(mirror.root).locked(shared=True):
        pulling.start()
        pulling.join(0.3)
        assert pulling.is_alive()
        assert mirror.version.tag == training.versions[0].tag
    pulling.join()
    assert mirror.version.tag == training.versions[1].tag


def test_an_object_store_loses_the_versions_with_the_run(tmp_path, mirror):
    url = f"file://{tmp_path}/bucket"
    training = Training(tmp_path / "local", anchor_every=2, publish=PublishConfig(url))
    with contextlib.closing(training.files):
        path, text = training.files.probe()
        assert open_source(training.files.source).read(path.name).decode() == text
        for number in range(4):
            version = training.step()
            shutil.rmtree(version.path)  # only the store has it
            done = training.pull(mirror)
            assert (done.dense, done.deltas) == (number == 0, int(number > 0))
            assert_holds(mirror, training)
            version.path.mkdir()
            training.files.drop_old()
        (run,) = Path(tmp_path / "bucket").iterdir()
        assert sorted(path.name for path in run.iterdir()) == ["probe.txt", "v00000002-3", "v00000003-4"]
    assert list(Path(tmp_path / "bucket").iterdir()) == []
