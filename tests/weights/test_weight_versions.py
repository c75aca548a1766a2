"""Versions as they are written, and as machines pull them: which way is taken, and what no damage gets past."""

import contextlib
import json
import runpy
import shutil
import threading
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from toy_runs import ROOT
from weight_training import SHAPES, Training, assert_holds, held, shards

from rljax.errors import NotWrittenError
from rljax.weights import pull as pulls
from rljax.weights.format import Base, TensorRecord, Version, parse_version, write_version, xxh3_of
from rljax.weights.mirror import DamagedError, Mirror
from rljax.weights.outlets import StoreOutlet
from rljax.weights.pull import pull
from rljax.weights.source import SourceError, open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of
from rljax.weights.writer import PartWriter, merge_written

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path / "weights", anchor_every=4)
    yield made
    made.files.close()


@pytest.fixture
def mirror(tmp_path):
    return Mirror(tmp_path / "mirror")


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
    with contextlib.closing(WeightDirectory(tmp_path)) as files:
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
        training.files.keep_only(version)
    assert kinds == [["dense"], *[["delta"]] * 3, ["delta", "dense"], *[["delta"]] * 3, ["delta", "dense"], ["delta"]]
    assert [path.name for path in sorted(training.files.root.glob("v*"))] == ["v00000008-9", "v00000009-10"]


@pytest.mark.parametrize(
    ("seen", "last", "dense", "deltas"),
    [
        (None, 2, True, 2),  # joins late: the first version and the deltas since
        (None, 5, True, 1),  # the newest anchor
        (1, 3, False, 2),  # missed one
        (1, 6, False, 5),  # missed an anchor; what it holds is still in the chain
        (6, 6, False, 0),  # has it
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
        version = training.step(0.01)
        if number == 1:
            training.pull(mirror)
    training.files.keep_only(version)
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
    """A server that is recovered during a publish pulls the older version, into a mirror that others load from."""
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


# ---- damage ----


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def damage_a_bit(mirror):
    flip(next(mirror.root.glob("*.safetensors")))


def damage_a_bit_and_its_record(mirror):
    """A damage that the mirror's own checksums cannot show: the trainer's must."""
    version = mirror.version
    file, record = next(iter(version.files.items()))
    flip(mirror.root / file)
    record = msgspec.structs.replace(record, xxh3=xxh3_of(mirror.root / file))
    write_version(mirror.root, msgspec.structs.replace(version, files=version.files | {file: record}))


def lose_a_file(mirror):
    next(mirror.root.glob("*.safetensors")).unlink()


def break_off(mirror):
    """As though killed while a delta was applied."""
    (mirror.root / "version.json").unlink()


def garble_the_record(mirror):
    (mirror.root / "version.json").write_text('{"tag": 3')


@pytest.mark.parametrize("damage", [damage_a_bit, lose_a_file, break_off, garble_the_record])
def test_a_damaged_mirror_is_made_anew(training, mirror, damage):
    training.step()
    training.pull(mirror)
    damage(mirror)
    training.step()
    done = training.pull(mirror)
    assert done.dense
    assert bool(done.repaired) == (damage in (damage_a_bit, lose_a_file))
    assert_holds(mirror, training)


def test_damage_unknown_to_the_mirror_is_in_what_servers_load(training, mirror):
    """The workers' checksums are of what they hold, so that they differ from the trainer's."""
    training.step()
    training.pull(mirror)
    damage_a_bit_and_its_record(mirror)
    training.step(0.0)
    training.pull(mirror)
    _, tensors = held(mirror)
    differing = [name for name in tensors if array_checksum(tensors[name]) != array_checksum(training.tensors[name])]
    assert differing == ["embed"]


def test_a_delta_against_another_base_is_refused(training, mirror):
    """Of a mirror whose record says that it holds what it does not."""
    training.step()
    training.pull(mirror)
    first = mirror.version
    training.step()
    training.pull(mirror)
    lie = msgspec.structs.replace(mirror.version, name=first.name, tag=first.tag, tensors=first.tensors)
    write_version(mirror.root, lie)
    training.files.keep_only(training.versions[0])
    bits_of(training.tensors["embed"]).reshape(-1)[::3] ^= 1
    training.step()
    done = training.pull(mirror, training.versions[-1])
    assert "other than in" in done.repaired
    assert done.dense
    assert_holds(mirror, training)


@pytest.mark.parametrize("what", ["a bit", "the end", "all"])
def test_a_damaged_file_is_not_taken(training, mirror, what):
    training.step()
    training.pull(mirror)
    version = training.step()
    (delta,) = version.path.glob("*-delta.safetensors")
    if what == "a bit":
        flip(delta)
    elif what == "the end":
        delta.write_bytes(delta.read_bytes()[:-1])
    else:
        delta.unlink()
    said = "has not the checksum that its version says" if what == "a bit" else "cannot be read"
    with pytest.raises((DamagedError, SourceError), match=said):
        training.pull(mirror)
    training.files.keep_only(version)


def test_a_tensor_that_is_not_what_the_trainer_says_is_named(tmp_path, mirror):
    """As when the files are sound, and were made of other weights."""
    tensors = {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)}
    sums = {"a": array_checksum(tensors["a"]), "b": array_checksum(np.zeros(3, np.float32))}
    with contextlib.closing(WeightDirectory(tmp_path)) as files:
        version = files.write(tensors.items(), 0, sums)
        with pytest.raises(DamagedError, match=r"1 tensor is other than in \S+: b"):
            pull(open_source(version.source), version.path.name, mirror)
    assert mirror.version is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 3}, "format 3; this program reads 1 and 2"),
        ({"format": 2}, "format 2, but the files are those of 1"),
        ({"files": {"../x": {"bytes": 1, "xxh3": ""}}}, r"a file outside its directory: '\.\./x'"),
        ({"dense": []}, "neither a dense version nor a delta"),
        ({"tag": 3}, "Expected `str`, got `int`"),
        ({"name": "v00000009-9"}, "is of the version 'v00000009-9'"),
    ],
)
def test_a_version_file_that_cannot_be_used_is_refused(training, change, said):
    version = training.step()
    content = json.loads((version.path / "version.json").read_text()) | change
    with pytest.raises(ValueError, match=said):
        parse_version(json.dumps(content).encode(), version.path.name)


def test_a_piece_that_is_missing_or_lies_outside_is_refused(training):
    version = training.step()
    content = json.loads((version.path / "version.json").read_text())
    for change in ({"width": 47}, {"row": 1}, {"stride": 47}):
        pieces = [dict(piece) for piece in content["dense"]]
        pieces[0]["region"] = pieces[0]["region"] | change
        with pytest.raises(ValueError, match=r"does not fit|are not the whole tensor"):
            parse_version(json.dumps(content | {"dense": pieces}).encode(), version.path.name)


def test_no_room_leaves_the_version_before(training, mirror, monkeypatch):
    training.step()
    training.pull(mirror)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("rljax.weights.writer.write_file", full)
        with pytest.raises(NotWrittenError, match="No space left on device"):
            training.step()
    assert [path.name for path in training.files.root.glob("v*")] == [training.versions[0].path.name]
    assert training.step().num_bytes > 2 * sum(array.size for array in training.tensors.values())
    assert training.pull(mirror).dense
    assert_holds(mirror, training)


def test_a_write_that_breaks_off_is_not_the_base_of_the_next(training, mirror):
    """The tensors were taken, yet no version has them."""
    training.step()
    training.pull(mirror)

    def broken():
        for name, array in training.tensors.items():
            yield name, bits_of(bits_of(array) ^ 1).view(array.dtype)
        raise RuntimeError("a process was lost")

    with pytest.raises(RuntimeError, match="a process was lost"):
        training.files.write(broken(), 9, {})
    training.step()
    training.pull(mirror)
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
    training = Training(tmp_path / "local", anchor_every=2, make_outlet=lambda root: StoreOutlet(root, url=url))
    with contextlib.closing(training.files):
        path, text = training.files.probe()
        assert open_source(training.files.source).read(path.name).decode() == text
        for number in range(4):
            version = training.step()
            shutil.rmtree(version.path)  # the store alone has it
            done = training.pull(mirror)
            assert (done.dense, done.deltas) == (number == 0, int(number > 0))
            assert_holds(mirror, training)
            version.path.mkdir()
            training.files.keep_only(version)
        (run,) = Path(tmp_path / "bucket").iterdir()
        assert sorted(path.name for path in run.iterdir()) == ["probe.txt", "v00000002-3", "v00000003-4"]
    assert list(Path(tmp_path / "bucket").iterdir()) == []


def test_the_program_says_what_it_did_and_what_it_could_not(training, mirror, capsys):
    version = training.step()
    assert pulls.main([version.source, version.path.name, str(mirror.root)]) == 0
    assert json.loads(capsys.readouterr().out)["tag"] == version.tag
    assert pulls.main([version.source, "v00000077-1", str(mirror.root)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "v00000077-1/version.json cannot be read" in error
    assert len(error.splitlines()) == 1
