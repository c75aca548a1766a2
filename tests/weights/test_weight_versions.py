"""Versions of the weights are written, and the tests check which deltas and anchors a machine pulls."""

import contextlib
import os
import runpy
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from toy_runs import ROOT
from weight_training import SHAPES, Training, assert_holds, held

from rljax.distributed.acts import to_the_end
from rljax.distributed.messages import Announcement
from rljax.distributed.processes import Processes
from rljax.errors import NotWrittenError
from rljax.weights.mirror import Mirror
from rljax.weights.outlets import Outlet
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of
from rljax.weights.writer import PartWriter, whole_parts

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_versions_arrive_bit_for_bit_as_deltas(tmp_path, mirror, dtype):
    """The example's reader, which has no code of this package, reads the same."""
    reader = runpy.run_path(str(ROOT / "examples/read_weights.py"))
    training = Training(tmp_path, dtype, anchor_every=3)
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
            shapes, bits = reader["read"](training.files.root, version.path.name)
            assert shapes == SHAPES
            assert all(array.tobytes() == bits[name].tobytes() for name, array in training.tensors.items())
            changed = sum(int((bits_of(array) != before[name]).sum()) for name, array in training.tensors.items())
            assert version.changed_fraction == changed / sum(array.size for array in training.tensors.values())
    assert np.isnan(training.versions[0].changed_fraction)


def test_a_delta_is_a_small_part_of_dense_or_dense_itself(tmp_path, training, mirror):
    rng = np.random.default_rng(0)
    tensors = {"w": (rng.normal(size=(1000, 1000)) * 0.02).astype(ml_dtypes.bfloat16)}
    with contextlib.closing(WeightDirectory(PublishConfig("directory"), tmp_path)) as files:
        dense = written(files, tensors, 0)
        tensors = {"w": tensors["w"].copy()}
        bits_of(tensors["w"]).reshape(-1)[rng.choice(10**6, 10**4, replace=False)] ^= 1
        delta = written(files, tensors, 1)
    assert delta.changed_fraction == 0.01
    assert 2_000_000 <= dense.num_bytes < 2_001_000
    assert delta.num_bytes < dense.num_bytes / 50
    training.write()
    for array in training.tensors.values():
        bits_of(array)[...] = rng.integers(0, 2**16, array.shape, np.uint16)
    version = training.write()
    assert [path.name for path in version.path.glob("*-delta*")] == []
    assert training.pull(mirror).dense
    assert_holds(mirror, training)
    assert training.publish(mirror).deltas == 1


@pytest.mark.parametrize("share", [0.06, 0.24])
def test_a_disk_holds_less_than_the_room_that_is_checked(tmp_path, share):
    """A store that takes the files gets no more anchors."""
    training, most = Training(tmp_path / "disk"), 0
    kept = Training(tmp_path / "own", publish=PublishConfig(f"file://{tmp_path}/store"), anchor_every=32)
    with contextlib.closing(training.files), contextlib.closing(kept.files):
        for _ in range(20):
            training.step(share)
            most = max(most, sum(path.stat().st_size for path in training.files.root.glob("v*/*.safetensors")))
            training.files.drop_old()
            kept.step(0.15)
        assert len(list((tmp_path / "store").rglob("*dense*.safetensors"))) == 1
    assert most < PublishConfig("directory").versions * training.versions[0].num_bytes


@pytest.mark.parametrize(
    ("seen", "last", "dense", "deltas"),
    [
        (None, 2, True, 2),  # it joins late, and takes the first version and the deltas since
        (None, 5, True, 1),  # it takes the newest anchor
        (1, 3, False, 2),  # it missed one version
        (1, 6, True, 2),  # it missed an anchor, and takes it
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
    # A server that recovers during a publish pulls the older version, which takes no mirror back.
    older, newer = training.versions[-2:]
    with pytest.raises(ValueError, match=f"holds {newer.path.name} already, which is newer than {older.path.name}"):
        training.pull(mirror, older)
    assert_holds(mirror, training)


def test_another_runs_mirror_is_taken_for_nothing(tmp_path, training, mirror):
    other = Training(tmp_path / "other")
    with contextlib.closing(other.files):
        for _ in range(4):
            other.publish(mirror, 0.5)
    training.step()
    assert training.publish(mirror).dense
    assert_holds(mirror, training)


# ---- several at once ----


def test_servers_of_a_machine_pull_once_and_load_later(training, mirror):
    training.step()
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: training.pull(Mirror(mirror.root)), range(4)))
    assert sorted(each.dense for each in done) == [False, False, False, True]
    assert_holds(mirror, training)
    training.step()
    pulling = threading.Thread(target=training.pull, args=[Mirror(mirror.root)])
    with mirror.locked(shared=True), Mirror(mirror.root).locked(shared=True):
        pulling.start()
        pulling.join(0.3)
        assert pulling.is_alive()
        assert mirror.version.tag == training.versions[0].tag
    pulling.join()
    assert mirror.version.tag == training.versions[1].tag


# ---- memory ----

COUNT, SIZE = 128, 2**15


def versions_tensors(step, apart):
    """Yields tensors of which one element in ``apart`` changes with each step."""
    for number in range(COUNT):
        tensor = np.full(SIZE, number, np.float32)
        tensor[::apart] += step
        yield f"{number}", tensor


@pytest.mark.parametrize("apart", [64, 2])
def test_a_writer_of_deltas_holds_one_version_and_few_tensors(tmp_path, apart):
    writer = PartWriter(whole_parts)
    tracemalloc.start()
    try:
        writer.collect(versions_tensors(0, apart), tmp_path)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        summary = writer.collect(versions_tensors(1, apart), tmp_path)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.changed == COUNT * SIZE // apart
    assert held < 1.1 * COUNT * SIZE * 4
    assert after < 1.2 * held
    assert peak < 1.5 * held


# ---- versions that servers read themselves ----


@pytest.fixture
def files(tmp_path):
    made = WeightDirectory(PublishConfig(), tmp_path)
    yield made
    made.close()


def written(files, tensors, number):
    return files.write(tensors.items(), number, {name: array_checksum(array) for name, array in tensors.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_bit_for_bit(files, dtype):
    tensors = {"x.weight": np.linspace(-3, 3, 40).reshape(8, 5).astype(dtype), "y": np.ones(3, dtype)}
    version = written(files, tensors, 3)
    tag, read = held(version.path)
    assert tag == version.tag == files.tag(3)
    assert files.policy_version(tag) == 3
    assert list(read) == list(tensors)
    for name, array in tensors.items():
        assert (read[name].tobytes(), read[name].shape) == (array.tobytes(), array.shape)
    assert (version.dtype, version.num_bytes) == (np.dtype(dtype).name, 43 * np.dtype(dtype).itemsize)
    assert np.isnan(version.changed_fraction)
    large = np.zeros(1_000_000, dtype)  # the fraction that changed is that of a sample
    for number, end, fraction in ((4, 0, 1.0), (5, 0, 0.0), (6, 500_000, 0.5)):
        large[:end] = 1.0
        found = written(files, {"l": large}, number).changed_fraction
        assert found == pytest.approx(fraction, abs=1e-3)


def test_what_is_not_deleted_is_named_or_deleted_later(files, monkeypatch, caplog):
    """Every version has a new path, and one is kept. A network may refuse to remove the others at first."""

    def refuse(*arguments, **options):
        raise PermissionError("Directory not empty")

    versions = [written(files, {"x": np.zeros(4, np.float32)}, number) for number in (0, 1, 1)]
    assert len({version.path for version in versions}) == 3
    with monkeypatch.context() as busy:
        busy.setattr(os, "rmdir", refuse)
        files.drop_old()
    files.drop_old()
    assert [path for path in files.root.iterdir() if path.is_dir()] == [versions[2].path]
    written(files, {"x": np.zeros(4, np.float32)}, 2)
    monkeypatch.setattr(Outlet, "remove", refuse)
    files.drop_old()
    files.close()
    assert not files.root.exists()
    assert caplog.text.count("could not be deleted: Directory not empty") == 2
    assert f"{versions[2].path.name}" in caplog.text


def test_what_cannot_be_written_is_said_and_still_gathered(files, tmp_path):
    """The other processes gather all tensors, even while the error, and with it the stream, is at hand."""
    with pytest.raises(ValueError, match=r"one dtype, got \['float16', 'float32'\]"):
        files.write([("a", np.ones(1, np.float16)), ("b", np.ones(1, np.float32))], 0, {})
    with pytest.raises(ValueError, match="no tensors"):
        files.write([], 0, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write under"):
        WeightDirectory(PublishConfig(), tmp_path / "file")
    taken = []

    def gathered():
        for number in range(3):
            taken.append(number)
            for path in files.root.glob("v00000007-*"):
                (path / f"{number + 1:05d}.safetensors").mkdir()
            yield str(number), np.zeros(4, np.float32)

    with pytest.raises(NotWrittenError, match="Is a directory"):
        files.write(to_the_end(Processes(), Announcement("tensors"), gathered()), 7, {})
    assert taken == [0, 1, 2]
