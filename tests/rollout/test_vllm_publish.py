"""Tests of weight files: the files that are written, kept and removed."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum


@pytest.fixture
def files(tmp_path):
    made = WeightDirectory(PublishConfig(), tmp_path)
    yield made
    made.close()


def written(files, tensors, number):
    return files.write(tensors.items(), number, {name: array_checksum(array) for name, array in tensors.items()})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_bit_for_bit(files, dtype):
    tensors = {"x.weight": np.linspace(-3, 3, 40).reshape(8, 5).astype(dtype), "y": np.ones(3, dtype)}
    version = written(files, tensors, 3)
    described = json.loads((version.path / "version.json").read_text())
    assert described["tag"] == version.tag == files.tag(3)
    assert files.policy_version(version.tag) == 3
    read = {}
    for file in described["files"]:
        read.update(load_file(version.path / file))
    assert list(read) == list(tensors)
    for name, array in tensors.items():
        assert read[name].tobytes() == array.tobytes()
        assert read[name].shape == array.shape
    assert version.dtype == np.dtype(dtype).name
    assert version.num_bytes == 43 * np.dtype(dtype).itemsize


def test_every_version_has_a_new_path_and_one_is_kept(files):
    tensors = {"x": np.zeros(4, np.float32)}
    versions = [written(files, tensors, number) for number in (0, 1, 1)]
    assert len({v.path for v in versions}) == 3
    files.drop_old()
    assert [p for p in files.root.iterdir() if p.is_dir()] == [versions[2].path]


def test_changed_fraction(files):
    large, small = np.zeros(1_000_000, np.float32), np.zeros(10, np.float32)
    assert np.isnan(written(files, {"l": large, "s": small}, 0).changed_fraction)
    assert written(files, {"l": large, "s": small}, 1).changed_fraction == 0.0
    large[:500_000] = 1.0
    assert written(files, {"l": large, "s": small}, 2).changed_fraction == pytest.approx(0.5, abs=1e-3)
    assert written(files, {"s": small + 1}, 3).changed_fraction == 1.0


def test_one_dtype(files):
    with pytest.raises(ValueError, match=r"one dtype, got \['float16', 'float32'\]"):
        files.write([("a", np.ones(1, np.float16)), ("b", np.ones(1, np.float32))], 0, {})
    with pytest.raises(ValueError, match="no tensors"):
        files.write([], 0, {})


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write under"):
        WeightDirectory(PublishConfig(), tmp_path / "file")
