"""The same step runs on meshes of several shapes: gradients, metrics, placement, collectives, one compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sharded_step import CONFIG, alone, batch, check_equal, make_step, outcome, shape
from tiny_step import check_close
from tree_batches import groups, in_trees, with_supports

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.model import param_shardings
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.packing import unpack
from rljax.trainer.state import OptimizerConfig, make_optimizer

pytestmark = [pytest.mark.mesh, pytest.mark.slow]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(2, 2, replica=2), {"remat": "blocks"}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.harness)
            for mesh, options in [
                (MeshConfig(4, context=2), {"keep_gathered": True, "remat": True}),
                (MeshConfig(2, 4), {"remat": "dots"}),
                (MeshConfig(8), {}),
                (MeshConfig(1, context=8), {"remat": "blocks"}),
                (MeshConfig(1, replica=2, context=4), {"keep_gathered": True}),
                (MeshConfig(2, 2, context=2), {"remat": "dots"}),
                (MeshConfig(1, 2, context=2, replica=2), {}),
            ]
        ),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(mesh, options):
    check_equal(outcome(mesh, **options), alone())


CENTERED = CorrectionConfig(level="token", threshold=1.2, score_centering=True)
REGION = CorrectionConfig(region="tv", region_over="tops", region_threshold=0.3)


@pytest.mark.parametrize(
    ("correction", "cut", "mesh"),
    [
        (CENTERED, True, MeshConfig(1, 2, context=2)),
        *(
            pytest.param(*case, marks=pytest.mark.harness)
            for case in [
                (REGION, True, MeshConfig(2, 4)),
                (CENTERED, False, MeshConfig(2, 2, replica=2)),
                (CorrectionConfig(preset="m2po_areal"), False, MeshConfig(2, 2, replica=2)),
            ]
        ),
    ],
    ids=["shared rows", "region", "whole", "second moment"],
)
def test_a_step_with_tops_does_not_depend_on_the_mesh(correction, cut, mesh):
    made = with_supports(batch(), CONFIG.vocab_size, 6)
    options = {"made": made, "correction": correction, "cut": cut, "diagnosis": None}
    check_equal(outcome(mesh, remat="dots", **options), outcome(MeshConfig(1), **options))


def test_a_state_stays_where_it_lies_in_one_compilation():
    """Rates, batches and skips change, and parameters and moments are sharded alike."""
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    step, state = make_step(MeshConfig(4, 2), tx=tx, dtype="float16", diagnosis=None)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    for i in range(5):
        state, metrics, _ = step(state, batch(i), 1e-3 / (i + 1), i != 2)
    assert step.compilations == 1
    assert int(metrics["optimizer/skipped_updates"]) == 1
    assert float(metrics["schedule/learning_rate"]) == np.float32(1e-3 / 5)
    assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, state)) == jax.tree.leaves(before)
    expected = param_shardings(CONFIG, make_mesh(MeshConfig(4, 2)))
    adam = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    for tree in (state.params, *adam):
        assert jax.tree.all(jax.tree.map(lambda leaf, s: leaf.sharding == s, tree, expected))
        assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, tree))
    for each in (state, make_step(MeshConfig(2, context=4))[1]):
        query = each.params["layers"]["attention"]["query"].addressable_shards[0].data
        assert query.shape == ((2, 8, 2, 8) if each is state else (2, 4, 4, 8))


def test_noise_is_that_of_each_replicas_micro_batches():
    """On one device the two replicas' parts of a micro-batch are micro-batches of their own."""
    step, state = make_step(MeshConfig(2, 2, replica=2), remat="blocks")  # this program exists already
    found = step(state, batch(), 0.1, True, True)[1]["optimizer/grad_noise"]
    m, b, t = shape()
    parted = jax.tree.map(lambda x: x.reshape(2 * m, b // 2, t) if x.ndim else 2 * x, batch())
    step, state = make_step(MeshConfig(1), shape=(2 * m, b // 2, t), diagnosis=None)
    expected = step(state, parted, 0.1, True, True)[1]["optimizer/grad_noise"]
    assert float(expected) > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4)


MIXTURE = dataclasses.replace(CONFIG, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)


def of_trees(mesh, config, sequences):
    made = in_trees(sequences, row=56, rows=8)
    options = {"config": config, "loss": LossConfig(), "count": len(sequences), "limit": 24, "remat": "blocks"}
    gradient, _, logprobs = outcome(mesh, made, diagnosis=None, **options)
    return gradient, np.concatenate(unpack(logprobs, made, sequences))


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        (MeshConfig(2, replica=2), CONFIG),
        pytest.param(MeshConfig(2, 2, replica=2), CONFIG, marks=pytest.mark.harness),
        pytest.param(MeshConfig(2, 2, expert=2), MIXTURE, marks=pytest.mark.harness),
    ],
    ids=["replicas", "parts of products", "experts"],
)
def test_trees_on_a_mesh_have_the_numbers_of_one_device(mesh, config):
    sequences = groups(8, layers=2 if config.num_experts else 0)
    found, expected = of_trees(mesh, config, sequences), of_trees(MeshConfig(1), config, sequences)
    check_close(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=2e-5, rtol=0)
