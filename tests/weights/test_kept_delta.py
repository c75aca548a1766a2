"""The last delta of a mirror must say exactly what changed, and is kept only if it is useful."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from weight_training import SHAPES, Training

from rljax.weights import delta as deltas
from rljax.weights.delta import kept
from rljax.weights.format import VERSION_FILE, parse_version
from rljax.weights.sums import bits_of


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path / "weights", anchor_every=100)
    yield made
    made.files.close()


def found(mirror):
    return kept(mirror.root, mirror.version.name)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_its_patches_make_the_new_version_of_the_old_one(tmp_path, mirror, dtype):
    training = Training(tmp_path / "weights", dtype)
    with contextlib.closing(training.files):
        training.step()
        training.pull(mirror, keep_delta=True)
        assert found(mirror) is None  # the version was dense
        before, old = {name: bits_of(array).copy() for name, array in training.tensors.items()}, mirror.version.digest
        training.step(0.05)
        training.pull(mirror, keep_delta=True)
    delta = found(mirror)
    assert delta.base_digest == old
    changed = 0
    for name, shape, places, bits in delta.patches():
        assert shape == SHAPES[name]
        assert (before[name].reshape(-1)[places] != bits).all()
        before[name].reshape(-1)[places] = bits
        changed += len(places)
    assert 0 < changed == sum(piece.changed for piece in delta.version.delta)
    for name, array in training.tensors.items():
        np.testing.assert_array_equal(before[name], bits_of(array))


def test_it_is_kept_when_asked_for_and_when_one_delta_does_it(training, mirror):
    training.step()
    training.pull(mirror, keep_delta=True)
    training.step()
    training.pull(mirror)
    assert found(mirror) is None
    training.step()
    training.step()
    assert training.pull(mirror, keep_delta=True).deltas == 2
    assert found(mirror) is None
    training.step()
    training.pull(mirror, keep_delta=True)
    assert found(mirror).version.tag == mirror.version.tag
    training.step(2 * deltas.MOST_KEPT)
    training.pull(mirror, keep_delta=True)
    assert found(mirror) is None  # the delta is too large


def test_it_is_gone_when_the_mirror_changes(training, mirror):
    training.step()
    training.pull(mirror)
    for change in (training.step, mirror.clear):
        training.step()
        training.pull(mirror, keep_delta=True)
        directory = mirror.root / "last_delta"
        assert directory.is_dir()
        change()
        training.pull(mirror)
        assert not directory.exists()


def test_without_room_for_it_the_version_is_there_all_the_same(training, mirror, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deltas.shutil, "copyfile", full)
    training.step()
    training.pull(mirror)
    training.step()
    assert training.pull(mirror, keep_delta=True).deltas == 1
    assert mirror.holds(written_version(training))
    assert found(mirror) is None
    assert not (mirror.root / "last_delta").exists()


def written_version(training):
    """Returns the last version that was written."""
    path = training.versions[-1].path
    return parse_version((path / VERSION_FILE).read_bytes(), path.name)
