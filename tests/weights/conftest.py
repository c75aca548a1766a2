"""Fixtures: a training whose versions are deltas, and a machine's mirror of the versions."""

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
