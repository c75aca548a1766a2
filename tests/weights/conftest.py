"""Fixtures: a training whose versions are deltas, a machine's mirror of the versions, and key files."""

import pytest
from weight_training import Training

from rljax.weights.mirror import Mirror


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path / "weights", anchor_every=4)
    yield made
    made.files.close()


@pytest.fixture
def mirror(tmp_path):
    return Mirror(tmp_path / "mirror")


@pytest.fixture
def make_key(tmp_path):
    def make(name, key, mode=0o600):
        path = tmp_path / name
        path.write_text(key)
        path.chmod(mode)
        return path

    return make


@pytest.fixture
def key_file(make_key):
    return make_key("key", "0123456789abcdef-a-key\n")
