"""Rows of trees on a mesh have the numbers of one device, and one compilation."""

import dataclasses

import numpy as np
import pytest
from sharded_step import CONFIG, outcome
from tiny_step import check_close
from tree_batches import groups, in_trees

from rljax.algorithms.losses import LossConfig
from rljax.sharding import MeshConfig
from rljax.trainer.packing import unpack

pytestmark = pytest.mark.mesh

MIXTURE = dataclasses.replace(CONFIG, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)


def run(mesh, config, sequences):
    made = in_trees(sequences, row=56, rows=8)
    options = {"config": config, "loss": LossConfig(), "count": len(sequences), "limit": 24, "remat": "blocks"}
    gradient, _, logprobs = outcome(mesh, made, steps=2, **options)
    return gradient, np.concatenate(unpack(logprobs, made, sequences))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        (MeshConfig(4, 2), CONFIG),
        pytest.param(MeshConfig(2, 2, replica=2), CONFIG, marks=pytest.mark.harness),
        pytest.param(MeshConfig(2, 2, expert=2), MIXTURE, marks=pytest.mark.harness),
    ],
    ids=["4x2", "replicas", "experts"],
)
def test_trees_on_a_mesh_have_the_numbers_of_one_device(mesh, config):
    sequences = groups(8, layers=2 if config.num_experts else 0)
    found, expected = run(mesh, config, sequences), run(MeshConfig(1), config, sequences)
    check_close(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=2e-5, rtol=0)
