"""Tensors of which each step changes a share, their versions, and what a mirror holds."""

import contextlib
import json

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from rljax.weights.publish_config import PublishConfig
from rljax.weights.pull import pull
from rljax.weights.source import open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of

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
