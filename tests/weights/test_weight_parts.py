"""Several processes serve parts of a version to a mirror; ``tests/processes`` has real ones, and uploads to a store."""

import contextlib
import json
import runpy
import socket
import threading

import httpx
import pytest
from toy_runs import ROOT
from weight_training import Training, assert_holds

from rljax.errors import ConfigError, NotWrittenError
from rljax.weights import writer as writers
from rljax.weights.access import KEY_FILE, find_key_file, own_address
from rljax.weights.format import FileRecord, TensorRegion
from rljax.weights.mirror import Mirror
from rljax.weights.publish_config import PublishConfig
from rljax.weights.pull import pull
from rljax.weights.source import SourceError, open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.writer import Part, PartWriter, WrittenFiles, make_part_writer, merge_summaries, merge_written


def shards(tensors, count):
    """Returns the parts that each of ``count`` processes holds.

    A process holds rows of most tensors and columns of the embedding; the first process holds the norm.
    """
    held = [[] for _ in range(count)]
    for name, array in tensors.items():
        whole = TensorRegion.whole(array.shape)
        matrix = array.reshape(whole.rows, whole.width)
        for process in range(1 if name == "norm" else count):
            region, rows, width = whole, whole.rows // count, whole.width // count
            if name == "embed":
                region = TensorRegion(0, whole.rows, process * width, width, whole.width)
            elif name != "norm":
                region = TensorRegion(process * rows, rows, 0, whole.width, whole.width)
            part = matrix[region.row : region.row + region.rows, region.column : region.column + region.width]
            held[process].append(Part(name, array.shape, region, part.copy()))
    return held


class InTurn:
    """A writer of the parts of several processes in this process; it asks each process in turn."""

    def __init__(self, parts):
        self.parts = parts

    def collect(self, named, directory):
        held = shards(dict(named), len(self.parts))
        return merge_summaries([each.collect(own, directory) for each, own in zip(self.parts, held, strict=True)])

    def write(self, kind, directory):
        written = merge_written([each.write(kind, directory) for each in self.parts])
        self.parts[0].wait(directory, written)
        return written

    def keep_only(self, names):
        for each in self.parts:
            each.keep_only(names)


def own_parts(store, parent, index, *, host="127.0.0.1", port=0, coordinator="127.0.0.1:1"):
    """Returns the parts of one process of several; each process yields what it is given."""
    publish = PublishConfig(store=store, host=host, port=port)
    options = {"api_key_file": find_key_file(None), "index": index, "coordinator": coordinator}
    return make_part_writer(lambda own: own, publish, parent, **options)


class Pod:
    """A group of ``count`` processes of a run, each with its own directory."""

    def __init__(self, root, count, store="http"):
        self.parts = [own_parts(store, root / f"process_{index}", index) for index in range(count)]
        options = {"api_key_file": find_key_file(None), "writer": InTurn(self.parts), "anchor_every": 4}
        self.training = Training(root, files=WeightDirectory(PublishConfig(store), root / "process_0", **options))

    def close(self):
        for each in (self.training.files, *self.parts):
            each.close()


@pytest.fixture
def pods(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(contextlib.closing(Pod(tmp_path, *arguments)))


@pytest.mark.parametrize("store", ["http", "directory"])
def test_a_late_joiner_and_the_example_reader_take_the_chain(pods, mirror, monkeypatch, store, tmp_path):
    monkeypatch.delenv(KEY_FILE, raising=False)
    reader = runpy.run_path(str(ROOT / "examples/read_weights.py"))
    pod = pods(4, store)
    for _ in range(4):
        version = pod.training.step()
    assert pod.training.pull(mirror).deltas == 3
    assert_holds(mirror, pod.training)
    _, tensors = reader["read"](pod.training.files.root, version.path.name)
    assert all(tensors[name].tobytes() == array.tobytes() for name, array in pod.training.tensors.items())
    files = json.loads((version.path / "version.json").read_text())["files"]
    if store == "http":  # each process serves what it wrote, and removes what is old or left
        places = {(int(name.partition("-")[0]), record.get("at", "")) for name, record in files.items()}
        assert (len(places), len({url for _, url in places}), min(places)) == (4, 4, (0, ""))
        pod.training.step()
        pod.training.files.drop_old()
        for own in tmp_path.glob("process_*"):
            assert sorted(path.name for path in own.glob("rljax-weights-*/v*")) == ["v00000004-5"]
        pod.close()
        assert not list(tmp_path.glob("process_*/*"))
        with pytest.raises(httpx.ConnectError):
            httpx.get(max(places)[1])


def test_processes_upload_to_a_store_that_keeps_the_chain(pods, mirror, tmp_path):
    """The store has the newest anchor and the versions since, which a late joiner takes, and is emptied at the end."""
    pod = pods(2, f"file://{tmp_path}/store")
    path, text = pod.training.files.probe()
    assert open_source(pod.training.files.source).read(path.name).decode() == text
    for _ in range(6):
        version = pod.training.step()
        pod.training.pull(mirror)
        assert_holds(mirror, pod.training)
        pod.training.files.drop_old()
    folder = tmp_path / "store" / pod.training.files.root.name
    assert sorted(path.name for path in folder.iterdir()) == ["probe.txt", "v00000004-5", "v00000005-6"]
    files = json.loads((version.path / "version.json").read_text())["files"]
    assert {path.name for path in (folder / version.path.name).iterdir()} == {"version.json", *files}
    assert {name.partition("-")[0] for name in files} == {"0", "1"}
    assert list(tmp_path.glob("process_*/**/*.safetensors")) == [], "files stay in memory after they were uploaded"
    late = Mirror(tmp_path / "late")
    done = pod.training.pull(late)
    assert (done.dense, done.deltas) == (True, 1)
    assert_holds(late, pod.training)
    pod.close()
    assert not list((tmp_path / "store").iterdir())


def test_files_come_from_all_places_at_the_same_time(pods, mirror):
    """A pull must succeed although the files of one place wait for those of another."""
    pod = pods(4)
    version = pod.training.step()
    source, meeting = open_source(version.source), threading.Barrier(4)

    class Meeting:
        read = source.read

        def fetch(self, name, record, folder):
            meeting.wait(30)
            return source.fetch(name, record, folder)

    pull(Meeting(), version.path.name, mirror)
    assert_holds(mirror, pod.training)


def test_a_part_that_cannot_be_written_leaves_no_version(pods, mirror, tmp_path):
    pod = pods(2)
    pod.training.publish(mirror)
    own = pod.parts[1].directory.root
    (own / "v00000001-2").write_text("in the way")
    with pytest.raises(NotWrittenError, match="File exists"):
        pod.training.step()
    (own / "v00000001-2").unlink()
    for root in tmp_path.glob("process_*"):
        assert [path.name for path in root.glob("rljax-weights-*/v*")] == [pod.training.versions[0].path.name]
    assert pod.training.publish(mirror).dense
    assert_holds(mirror, pod.training)


def test_the_key_goes_to_private_addresses_alone(tmp_path):
    source = open_source("http://127.0.0.1:9")
    for url in ("http://8.8.8.8:80", "http://example.org", "http://10.0.0.1@example.org", "file:///etc"):
        with pytest.raises(SourceError, match=r"are not read: host must be "):
            source.fetch("v1-1/x.safetensors", FileRecord(1, "", url), tmp_path)


def test_files_of_other_processes_are_waited_for(tmp_path, monkeypatch):
    """A shared file system may show files late. A directory that is not shared is named in the error."""
    parts = PartWriter(lambda own: own)
    written = WrittenFiles((), {"0.safetensors": FileRecord(4, ""), "1.safetensors": FileRecord(8, "")})
    (tmp_path / "0.safetensors").write_bytes(b"1234")
    (tmp_path / "1.safetensors").write_bytes(b"1234")
    whole = threading.Timer(0.3, lambda: (tmp_path / "1.safetensors").write_bytes(b"12345678"))
    whole.start()
    parts.wait(tmp_path, written)
    assert (tmp_path / "1.safetensors").stat().st_size == 8
    (tmp_path / "1.safetensors").unlink()
    monkeypatch.setattr(writers, "SEEN_AFTER_S", 0.2)
    with pytest.raises(OSError, match=r"does not see 1\.safetensors, .* wrote: rollout\.transfer_dir"):
        parts.wait(tmp_path, written)


# ---- addresses ----


def interface():
    """Returns an address of this machine that is not loopback and has a route; otherwise the test is skipped."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.254", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        return probe.getsockname()[0]


def test_a_process_has_the_address_of_process_0_or_its_own(tmp_path):
    assert own_address("127.0.0.1", "localhost") == "127.0.0.1"
    own = interface()
    assert own_address("127.0.0.1", own) == "127.0.0.1"
    assert own_address(own, own) == own_address("10.255.255.254", "10.255.255.254") == own
    with pytest.raises(ValueError, match=r"publish\.host = 127\.0\.0\.1 is reached only on the machine of process 0"):
        own_address("127.0.0.1", "10.255.255.254")
    for host, coordinator, message in (
        ("10.1.2.3", "127.0.0.1:1", "so RLJAX_API_KEY_FILE must name a key file"),
        ("127.0.0.1", "no-such-machine.invalid:1", "this machine has no route to no-such-machine.invalid"),
        ("8.8.8.8", "127.0.0.1:1", "host must be a loopback or private address, got 8.8.8.8"),
        ("127.0.0.1", "127.0.0.1:1", r"publish.port \+ 3 must be in 0..65535, got 65538"),
    ):
        port = 65535 if "65535" in message else 0
        with pytest.raises(ConfigError, match=f"process 3 cannot hand over its part of the weights: .*{message}") as it:
            own_parts("http", tmp_path, 3, host=host, port=port, coordinator=coordinator)
        assert "\n" not in str(it.value)
    assert list(tmp_path.iterdir()) == []
