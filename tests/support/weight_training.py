"""Tensors of which each step changes a share, their versions, what a mirror holds, and the servers between the two."""

import contextlib
import json
import os
import signal
import socket
import threading

import ml_dtypes
import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from rljax.weights.format import TensorRegion
from rljax.weights.publish_config import PublishConfig
from rljax.weights.pull import pull
from rljax.weights.source import open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of
from rljax.weights.writer import Part

DIRECTORY = PublishConfig("directory")
SHAPES = {"embed": (64, 48), "norm": (48,), "experts": (4, 6, 8), "head": (64, 48)}


class Training:
    """A set of tensors of which each step changes a share, with its versions."""

    def __init__(self, root, dtype=ml_dtypes.bfloat16, files=None, publish=DIRECTORY, **options):
        self.rng = np.random.default_rng(0)
        self.tensors = {name: self.rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
        self.files, self.number, self.versions = files or WeightDirectory(publish, root, **options), 0, []

    def step(self, share=0.05):
        for array in self.tensors.values():
            bits = bits_of(array).reshape(-1)
            bits[self.rng.random(bits.size) < share] ^= 1
        return self.write()

    def write(self):
        tensors = {name: array.copy() for name, array in self.tensors.items()}
        sums = {name: array_checksum(array) for name, array in tensors.items()}
        self.versions.append(self.files.write(tensors.items(), self.number, sums))
        self.number += 1
        return self.versions[-1]

    def publish(self, mirror, share=0.05):
        self.step(share)
        return self.pull(mirror)

    def pull(self, mirror, version=None, **options):
        version = version or self.versions[-1]
        with contextlib.closing(open_source(version.source)) as source:
            return pull(source, version.path.name, mirror, **options)


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


def held(root):
    """Returns what a server would load from a directory: the tag of the version, and the tensors of its files."""
    version = json.loads((root / "version.json").read_text())
    tensors = {}
    for file in version["files"]:
        tensors.update(load_file(root / file))
    return version["tag"], tensors


def assert_holds(mirror, training, version=None):
    tag, tensors = held(mirror.root)
    assert tag == (version or training.versions[-1]).tag
    assert list(tensors) == list(training.tensors)
    for name, array in training.tensors.items():
        found = tensors[name]
        assert (found.tobytes(), found.shape, found.dtype) == (array.tobytes(), array.shape, array.dtype), name
    mirror.check()


def change_after_writing(monkeypatch, change):
    """Makes each file of a version store ``change(name, array)``, or nothing for None, after it is written."""
    sound = WeightDirectory.write

    def write(self, *arguments):
        version = sound(self, *arguments)
        for path in version.path.glob("*.safetensors"):
            changed = {name: change(name, array) for name, array in load_file(path).items()}
            save_file({name: array for name, array in changed.items() if array is not None}, path)
        return version

    monkeypatch.setattr(WeightDirectory, "write", write)


def server_at(url):
    """Returns the id of the process that serves the weights at a URL on this machine, besides those that started it."""
    port = int(url.rpartition(":")[2])
    holders = [one for one in psutil.process_iter() if _listens(one, port)]
    (server,) = {one.pid for one in holders} - {one.ppid() for one in holders}
    return server


def kill_server(url):
    server = server_at(url)
    os.kill(server, signal.SIGKILL)
    return server


def _listens(process, port):
    try:
        return (port, psutil.CONN_LISTEN) in [(one.laddr.port, one.status) for one in process.net_connections("tcp4")]
    except psutil.Error:  # it has ended, or belongs to another user
        return False


class CuttingProxy:
    """A proxy on a free port before a server on 127.0.0.1; it refuses connections unless it is ``open``.

    It cuts a connection after ``cut_after`` bytes of an answer; it counts ``cuts`` and the bytes that it ``passed``.
    """

    def __init__(self, url, cut_after):
        self._server = ("127.0.0.1", int(url.rpartition(":")[2]))
        self.open, self.cut_after, self.passed, self.cuts = True, cut_after, 0, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.open:
                    server = socket.create_connection(self._server)
                    for ends in ((client, server, False), (server, client, True)):
                        threading.Thread(target=self._forward, args=ends, daemon=True).start()
                else:
                    client.close()

    def _forward(self, source, target, limited):
        count = 0
        with contextlib.suppress(OSError):
            while content := source.recv(16_384):
                target.sendall(content)
                count += len(content)
                if limited:
                    self.passed += len(content)
                    if not self.open or count >= self.cut_after:
                        self.cuts += 1
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
