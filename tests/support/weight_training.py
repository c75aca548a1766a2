"""Tensors of which each step changes a share, their versions, and the content of a machine's mirror."""

import contextlib
import json

import ml_dtypes
import numpy as np
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
        """Changes a share of the elements and writes a version."""
        for array in self.tensors.values():
            bits = bits_of(array).reshape(-1)
            chosen = self.rng.random(bits.size) < share
            bits[chosen] ^= 1
        return self.write()

    def write(self):
        tensors = {name: array.copy() for name, array in self.tensors.items()}
        sums = {name: array_checksum(array) for name, array in tensors.items()}
        self.versions.append(self.files.write(tensors.items(), self.number, sums))
        self.number += 1
        return self.versions[-1]

    def publish(self, mirror, share=0.05):
        """Writes the next version and pulls it."""
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
        for process in range(count):
            if name == "norm":
                region = whole if process == 0 else None
            elif name == "embed":
                width = whole.width // count
                region = TensorRegion(0, whole.rows, process * width, width, whole.width)
            else:
                rows = whole.rows // count
                region = TensorRegion(process * rows, rows, 0, whole.width, whole.width)
            if region is not None:
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
        assert tensors[name].tobytes() == array.tobytes(), name
        assert tensors[name].shape == array.shape
        assert tensors[name].dtype == array.dtype
    mirror.check()


def change_after_writing(monkeypatch, change):
    """Changes the files of each version after it is written.

    A file then stores ``change(name, array)``, or nothing for None.
    """
    sound = WeightDirectory.write

    def write(self, *arguments):
        version = sound(self, *arguments)
        for path in version.path.glob("*.safetensors"):
            changed = {name: change(name, array) for name, array in load_file(path).items()}
            save_file({name: array for name, array in changed.items() if array is not None}, path)
        return version

    monkeypatch.setattr(WeightDirectory, "write", write)
