"""A mixture of experts on meshes of several shapes has the same gradients, metrics and log-probabilities."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from sharded_step import COUNT, check_equal, make_step, outcome, shape
from sharded_step import batch as batch_of_all
from tiny_step import UNCORRECTED

from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.sharding import MeshConfig
from rljax.trainer.measure import DiagnosisConfig

pytestmark = [pytest.mark.mesh, pytest.mark.slow]

CONFIG = PolicyConfig(
    32, 32, 64, 2, 4, 2, 8,
    tie_word_embeddings=True, initializer_range=0.2, family="qwen3_moe",
    num_experts=8, experts_per_token=3, expert_size=16, normalize_gates=True,
)  # fmt: skip
SHAPE = shape()


def batch(routed):
    packed, rng = batch_of_all(), np.random.default_rng(0)
    if not routed:
        return packed
    if routed == "to the same":  # one device computes nearly all, in several rounds
        same = np.tile(np.uint8([1, 2, 3]), CONFIG.num_layers)
        return packed._replace(routes=np.broadcast_to(same, (*SHAPE, len(same))))
    # Each token's experts are distinct, and every third token is free.
    routes = 1 + np.argsort(rng.random((*SHAPE, CONFIG.num_layers, CONFIG.num_experts)), axis=-1)[..., :3]
    routes[rng.random(SHAPE) < 1 / 3] = 0
    return packed._replace(routes=routes.reshape(*SHAPE, -1).astype(np.uint8))


def asked(config=CONFIG, balance=0.1, **options):
    how = {"config": config, "loss": LossConfig(router_balance=balance), "correction": UNCORRECTED}
    return how | {"diagnosis": None} | options


@functools.cache
def alone(routed, balance):
    return outcome(MeshConfig(1), batch(routed), **asked(balance=balance))


@pytest.mark.parametrize(
    ("mesh", "routed", "options"),
    [
        (MeshConfig(1, 2, expert=2, context=2), True, {"remat": "blocks"}),
        *(
            pytest.param(*case, marks=pytest.mark.harness)
            for case in [
                (MeshConfig(2, 1, expert=4), "to the same", {}),
                # A micro-batch's balance covers its own tokens, and each copy of the weights has a part of them.
                (MeshConfig(1, 2, replica=2, expert=2), False, {"balance": 0.0, "remat": "dots"}),
                (MeshConfig(4, 1, expert=2), True, {}),
                (MeshConfig(1, 1, expert=8), False, {"remat": "dots"}),
                (MeshConfig(8, 1), False, {"remat": "blocks"}),
                (MeshConfig(2, 1, context=4), True, {}),
                (MeshConfig(2, 1, expert=4, keep_gathered=True), False, {"remat": "blocks"}),
            ]
        ),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(mesh, routed, options):
    found = outcome(mesh, batch(routed), **asked(**options))
    assert found[1]["router/dropped_fraction"] == 0
    assert ("router/disagreement" in found[1]) == bool(routed)
    check_equal(found, alone(routed, options.get("balance", 0.1)))


@pytest.mark.harness
def test_routes_of_shared_rows_are_those_of_whole_rows():
    def routes(mesh):
        step, state = make_step(mesh, **asked())
        options = {"num_sequences": COUNT, "diagnosis": DiagnosisConfig(), "with_routes": True}
        return jax.device_get(step.forward(state.params, batch(False), **options)[1].routes)

    found, expected = routes(MeshConfig(2, 1, context=4)), routes(MeshConfig(1, 1))
    assert found.shape == (*SHAPE, CONFIG.num_layers * CONFIG.experts_per_token)
    inside = batch(False).segment_ids > 0
    np.testing.assert_array_equal(found[inside], expected[inside])


def test_each_device_holds_its_part_of_the_experts():
    """A mesh that does not divide the experts is named."""
    params = make_step(MeshConfig(2, 2, expert=2), **asked())[1].params
    mlp = params["layers"]["mlp"]
    assert mlp["gate"].sharding.shard_shape(mlp["gate"].shape) == (2, 4, 16, 8)
    assert mlp["down"].sharding.shard_shape(mlp["down"].shape) == (2, 4, 8, 16)
    assert params["embed"].sharding.shard_shape(params["embed"].shape) == (16, 8)
    with pytest.raises(ValueError, match=r"mesh.expert = 4 must divide num_experts = 6"):
        make_step(MeshConfig(2, 1, expert=4), **asked(dataclasses.replace(CONFIG, num_experts=6)))
