"""The step on adapters has the same gradients on meshes of several shapes, and adapters lie like their weights."""

import gc

import jax
import numpy as np
import pytest
from sharded_step import CONFIG, batch, check_equal, make_step
from tiny_adapters import random_adapters

from rljax.policy.lora import LoraConfig, MergedPolicy, TrainedParams
from rljax.policy.model import cast_params, init_params, param_shardings
from rljax.sharding import HOST_MEMORY, MeshConfig, make_mesh, on_devices, on_host

pytestmark = pytest.mark.mesh

LORA = LoraConfig(rank=4, targets=("q_proj", "o_proj", "up_proj", "down_proj"))


def base_of(mesh, dtype):
    place = jax.jit(lambda: cast_params(init_params(CONFIG, 0), dtype), out_shardings=param_shardings(CONFIG, mesh))
    return place()


def run(sizes, **options):
    merged = MergedPolicy(CONFIG, LORA, make_mesh(sizes), base_of(make_mesh(sizes), "float32"), "float32")
    given = {"params": random_adapters(CONFIG, LORA, 0.2), "lora": LORA, "merged": merged, "diagnosis": None}
    step, state = make_step(sizes, **given, **options)
    weights = merged(state.params)
    state, metrics, values = step(state, batch(), 0.1, True)
    return (state, metrics, values.logprobs), weights, merged


@pytest.fixture(scope="module")
def single():
    (state, *others), weights, _ = run(MeshConfig(1))
    return jax.device_get(((state.opt_state.inner_state.trace, *others), weights))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (MeshConfig(2, 2, replica=2), {"keep_gathered": True}),
        pytest.param(MeshConfig(8, 1), {}, marks=pytest.mark.harness),
        pytest.param(MeshConfig(2, 2, context=2), {}, marks=pytest.mark.harness),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(sizes, options, single):
    (state, *others), weights, merged = run(sizes, **options)
    up, down = (state.params["layers"]["mlp"][name] for name in ("up", "down"))
    width = sizes.fsdp * sizes.context
    rank = 4 // width if 4 % width == 0 else 4
    assert up["a"].addressable_shards[0].data.shape == (2, 32 // width, 4)
    assert up["b"].addressable_shards[0].data.shape == (2, rank, 64 // sizes.tp)
    assert down["a"].addressable_shards[0].data.shape == (2, 64 // sizes.tp, rank)
    assert down["b"].addressable_shards[0].data.shape == (2, 4, 32 // width)
    assert weights["layers"]["mlp"]["up"].sharding == merged.base["layers"]["mlp"]["up"].sharding
    expected, expected_weights = single
    for found, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(expected_weights), strict=True):
        np.testing.assert_allclose(jax.device_get(found), wanted, atol=1e-6)
    check_equal(jax.device_get((state.opt_state.inner_state.trace, *others)), expected, 2e-5)


def test_a_policy_in_host_memory_is_merged_to_the_same_bits():
    mesh = make_mesh(MeshConfig(2, 2, replica=2))
    adapters = jax.device_put(random_adapters(CONFIG, LORA, 0.2), TrainedParams(CONFIG, LORA).declared.shardings(mesh))
    expected = jax.device_get(MergedPolicy(CONFIG, LORA, mesh, base_of(mesh, "bfloat16"), "bfloat16")(adapters))
    merged = MergedPolicy(CONFIG, LORA, mesh, on_host(base_of(mesh, "bfloat16")), "bfloat16")
    waiting = on_host(adapters)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    for given, memory in ((waiting, HOST_MEMORY), (on_devices(waiting), "device"), (waiting, HOST_MEMORY)):
        weights = merged(given)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(weights)} == {memory}
        for found, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            assert np.asarray(found).tobytes() == wanted.tobytes()
        for leaf, where in zip(jax.tree.leaves(weights), jax.tree.leaves(param_shardings(CONFIG, mesh)), strict=True):
            assert leaf.sharding.is_equivalent_to(where.with_memory_kind(memory), leaf.ndim)
    del given, weights
    gc.collect()
    left = [array for array in jax.live_arrays() if id(array) not in before]
    assert {array.sharding.memory_kind for array in left} == {HOST_MEMORY}
