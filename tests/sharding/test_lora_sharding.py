"""The step on adapters has the same gradients on meshes of several shapes, and adapters lie like their weights."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_step import CONFIG, CORRECTION, COUNT, LOSS, batch, gradient_keeper, shape

from rljax.policy.lora import LoraConfig, MergedPolicy, TrainedParams, abstract_adapters
from rljax.policy.model import cast_params, init_params, param_shardings
from rljax.sharding import HOST_MEMORY, MeshConfig, make_mesh, on_devices, on_host
from rljax.trainer.objective import Objective
from rljax.trainer.state import PrecisionConfig, create_state
from rljax.trainer.step import TrainStep

pytestmark = pytest.mark.mesh

LORA = LoraConfig(rank=4, targets=("q_proj", "o_proj", "up_proj", "down_proj"))


def run(fsdp, tp, dtype="float32", replica=1, keep_gathered=False, context=1):
    sizes = MeshConfig(fsdp, tp, replica, context=context)
    mesh, tx, rng = make_mesh(sizes), gradient_keeper(), np.random.default_rng(2)
    place = jax.jit(lambda: cast_params(init_params(CONFIG, 0), dtype), out_shardings=param_shardings(CONFIG, mesh))
    merged = MergedPolicy(CONFIG, LORA, mesh, place(), dtype)
    step = TrainStep(
        CONFIG,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype=dtype),
        objective=Objective(LOSS, CORRECTION, COUNT, 16),
        batch_shape=shape(),
        diagnosis=None,
        keep_gathered=keep_gathered,
        lora=LORA,
        merged=merged,
    )
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), abstract_adapters(CONFIG, LORA)
    )
    state = create_state(adapters, CONFIG, tx, mesh, dynamic_scale=False, lora=LORA)
    weights = merged(state.params)
    state, metrics, values = step(state, batch(), 0.1, True)
    return (state, metrics, values.logprobs), weights, merged


@pytest.fixture(scope="module")
def single():
    (state, metrics, logprobs), weights, _ = run(1, 1)
    return jax.device_get((state.opt_state.inner_state.trace, metrics, logprobs, weights))


@pytest.mark.parametrize(
    ("fsdp", "tp", "options"),
    [
        (2, 2, {"replica": 2, "keep_gathered": True}),
        pytest.param(2, 2, {"replica": 2}, marks=pytest.mark.harness),
        pytest.param(4, 2, {"keep_gathered": True}, marks=pytest.mark.harness),
        pytest.param(8, 1, {}, marks=pytest.mark.harness),
        pytest.param(2, 2, {"context": 2}, marks=pytest.mark.harness),
    ],
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(fsdp, tp, options, single):
    (state, metrics, logprobs), weights, merged = run(fsdp, tp, **options)
    expected_grads, expected_metrics, expected_logprobs, expected_weights = single
    up = state.params["layers"]["mlp"]["up"]
    fsdp *= options.get("context", 1)
    rank = 4 // fsdp if 4 % fsdp == 0 else 4
    assert up["a"].addressable_shards[0].data.shape == (2, 32 // fsdp, 4)
    assert up["b"].addressable_shards[0].data.shape == (2, rank, 64 // tp)
    down = state.params["layers"]["mlp"]["down"]
    assert down["a"].addressable_shards[0].data.shape == (2, 64 // tp, rank)
    assert down["b"].addressable_shards[0].data.shape == (2, 4, 32 // fsdp)
    assert weights["layers"]["mlp"]["up"].sharding == merged.base["layers"]["mlp"]["up"].sharding
    for found, expected in zip(jax.tree.leaves(weights), jax.tree.leaves(expected_weights), strict=True):
        np.testing.assert_allclose(jax.device_get(found), expected, atol=1e-6)
    found_grads = jax.device_get(state.opt_state.inner_state.trace)
    for found, expected in zip(jax.tree.leaves(found_grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.abs(found - expected).max() / np.abs(expected).max() <= 2e-5
    for name, value in jax.device_get(metrics).items():
        if name != "optimizer/grad_noise":
            np.testing.assert_allclose(value, expected_metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(jax.device_get(logprobs), expected_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "sizes", [pytest.param(MeshConfig(8, 1), marks=pytest.mark.harness), MeshConfig(2, 2, replica=2)]
)
def test_a_policy_in_host_memory_is_merged_to_the_same_bits(sizes):
    mesh, rng = make_mesh(sizes), np.random.default_rng(2)
    place = jax.jit(
        lambda: cast_params(init_params(CONFIG, 0), "bfloat16"), out_shardings=param_shardings(CONFIG, mesh)
    )
    shardings = TrainedParams(CONFIG, LORA).shardings(mesh)
    adapters = jax.tree.map(
        lambda leaf, where: jax.device_put(0.2 * rng.normal(size=leaf.shape).astype(np.float32), where),
        abstract_adapters(CONFIG, LORA),
        shardings,
    )
    expected = jax.device_get(MergedPolicy(CONFIG, LORA, mesh, place(), "bfloat16")(adapters))
    merged = MergedPolicy(CONFIG, LORA, mesh, on_host(place()), "bfloat16")
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
