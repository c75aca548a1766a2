"""Checks of the weights that a server's worker may load, and of the pulls that it starts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_disk import small_disk
from waiting import until

from rljax.weights.format import PROTOCOL, read_version, write_version
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.worker import MIRROR_DIR, Pulls, WorkerWeights


@pytest.fixture
def files(tmp_path):
    with contextlib.closing(WeightDirectory(PublishConfig("directory"), tmp_path / "weights")) as made:
        yield made


@pytest.fixture
def pulling(tmp_path, files, monkeypatch):
    (tmp_path / "mirrors").mkdir()
    monkeypatch.setenv(MIRROR_DIR, str(tmp_path / "mirrors"))
    with contextlib.closing(Pulls(files.source, files.run_tag)) as made:
        yield made


def ended(pulling, name):
    found = []
    until(lambda: found.append(pulling.pulled(name)) or found[-1] is not None)
    return found[-1]


def written(files, number=0):
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4) + number
    return files.write([("w", tensor)], number, {"w": array_checksum(tensor)})


def shown(files):
    weights = WorkerWeights()
    weights.show(*(str(each) for each in files.probe()), PROTOCOL)
    return weights


def test_what_a_pull_did_is_said_until_the_next_one(files, pulling):
    """A finished worker is asked again while another worker of its server is not finished."""
    for number in range(2):
        version = written(files, number)
        first = ended(pulling, version.path.name)
        assert (first["error"], first["tag"]) == ("", version.tag)
        assert pulling.pulled(version.path.name) == first
    pulling.forget()
    assert ended(pulling, version.path.name)["bytes"] == 0
    pulling.forget()
    described = version.path / "version.json"
    described.rename(version.path / "elsewhere.json")
    assert "version.json cannot be read" in ended(pulling, version.path.name)["error"]
    (version.path / "elsewhere.json").rename(described)
    assert ended(pulling, version.path.name)["error"] == ""
    assert pulling.mirror.root.is_dir()
    pulling.close()
    assert not pulling.mirror.root.exists(), "the last user takes the mirror with it"


def test_a_pull_whose_process_dies_is_begun_again(files, pulling):
    """The mirror is locked meanwhile, so that the pull waits and can be killed. Another pull ends the one that runs."""
    name = written(files).path.name
    with pulling.mirror.locked():
        assert pulling.pulled(name) is None
        until(lambda: holders(pulling.mirror))
        for pid in holders(pulling.mirror):
            os.kill(pid, signal.SIGKILL)
        assert ended(pulling, name)["error"] == "the pull failed: LostError: died (exit status -9)"
        assert pulling.pulled(name) is None
        time.sleep(0.5)
        pulling.forget()
        assert pulling.pulled(name) is None
    assert ended(pulling, name)["error"] == ""
    with pulling.mirror.locked():
        for each in (*(f"v0000000{number}-9" for number in range(5)), name):
            pulling.pulled(each)
    assert ended(pulling, name)["error"] == ""


def test_a_pull_ends_with_its_server_and_takes_any_processor(files, pulling):
    """vLLM binds a worker on a CPU, and preloads an OpenMP that binds each process with this variable."""
    version = written(files)
    words = "import os, sys, time; from rljax.weights.worker import Pulls\n"
    words += "last = max(os.sched_getaffinity(0))\n"
    words += "os.environ['GOMP_CPU_AFFINITY'] = str(last)\n"
    words += "os.sched_setaffinity(0, {last})\n"
    words += "pulls = Pulls(*sys.argv[1:3]); pulls.pulled(sys.argv[3]); time.sleep(60)"
    named = [files.source, files.run_tag, version.path.name]
    with pulling.mirror.locked(), subprocess.Popen([sys.executable, "-c", words, *named]) as server:
        until(lambda: holders(pulling.mirror))
        pullers = holders(pulling.mirror)
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pullers}
        found = [os.sched_getaffinity(process) for process in pullers | parents]  # each parent starts its puller
        assert found == [os.sched_getaffinity(0)] * len(found)
        assert not any(b"GOMP_CPU_AFFINITY" in Path(f"/proc/{pid}/environ").read_bytes() for pid in parents)
        server.kill()
        until(lambda: not holders(pulling.mirror))


def holders(mirror):
    """Returns the ids of the other processes that wait for the lock of a mirror."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(mirror.root / "lock"):
                found.add(int(link.parts[2]))
    return found - {os.getpid()}


def test_a_mirror_without_room_is_refused_before_a_pull(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv(MIRROR_DIR, str(disk))
    with contextlib.closing(WeightDirectory(PublishConfig(store="http"), tmp_path)) as files, small_disk(disk, 4):
        shown = *(str(each) for each in files.probe()), PROTOCOL, files.source
        weights = WorkerWeights()
        weights.show(*shown, version_bytes=2**20)
        with pytest.raises(RuntimeError, match=r"4\.0 MiB: set RLJAX_MIRROR_DIR .*--ipc=host") as error:
            weights.show(*shown, version_bytes=2**21)
        assert "\n" not in str(error.value)
        weights.pulls.close()


def test_a_trainer_of_another_protocol_is_refused(files):
    path, text = files.probe()
    path.touch(0o600)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    assert files.probe() == (path, text)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before, "a probe that a server may be reading stays"
    for protocol in (PROTOCOL - 1, PROTOCOL + 1):
        said = f"^rljax protocol: the trainer speaks {protocol}, this server {PROTOCOL};"
        with pytest.raises(ValueError, match=said):
            WorkerWeights().show(str(path), text, protocol)


def refused(weights, version, said, tag=None):
    with pytest.raises(ValueError, match=said):
        weights.version(str(version.path), tag or version.tag).__enter__()


def test_a_worker_loads_a_shared_version_by_its_files(tmp_path):
    """Each tensor is whole, under its own name and in the trainer's order. Another tag or directory is refused."""
    tensors = {"b": np.ones((2, 3), np.float32), "a": np.zeros(4, np.float32)}
    with contextlib.closing(WeightDirectory(PublishConfig(), tmp_path)) as files:
        weights = shown(files)
        version = files.write(tensors.items(), 7, {name: array_checksum(array) for name, array in tensors.items()})
        with weights.version(str(version.path), version.tag) as (directory, names):
            assert [list(load_file(directory / name)) for name in names] == [["b"], ["a"]]
        refused(weights, version, "the update is for another", "another")
        (version.path / "version.json").unlink()
        refused(weights, version, r"version\.json cannot be read")


def test_a_delta_or_a_part_is_not_loaded_from_its_files(files):
    tensor, weights = np.arange(400, dtype=np.float32), shown(files)
    for number in range(2):
        tensor = tensor + (np.arange(400) == number)
        version = files.write([("w", tensor)], number, {"w": array_checksum(tensor)})
    refused(weights, version, "is a delta, and must be pulled")
    described = read_version(version.path)
    pieces = [msgspec.structs.replace(piece, changed=0, gap_type="") for piece in described.delta]
    write_version(version.path, msgspec.structs.replace(described, dense=tuple(pieces)))
    refused(weights, version, "does not have w whole, under its name")
