"""In a step on adapters, the gradient is that of the merged policy's loss, however the batch is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_step
from tiny_adapters import random_adapters
from tiny_step import CONFIG, MESH, check_close, fresh_state, keep_gradient, make_step, packed, sequences

from rljax.policy.lora import LoraConfig, MergedPolicy, TrainedParams, adapter_gradients
from rljax.policy.model import cast_params, init_params
from rljax.sharding import replicated
from rljax.trainer.micro_batches import place_batch
from rljax.trainer.state import OptimizerConfig, make_optimizer
from rljax.trainer.totals import place_controls

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"))


def adapters():
    return random_adapters(CONFIG, LORA, 0.2)


def run(tx, *, row=20, rows=2, dtype="float32", noise=False, rate=1.0, updates=1):
    base = cast_params(init_params(CONFIG, 0), dtype)
    merged = MergedPolicy(CONFIG, LORA, MESH, base, dtype)
    step = make_step(tx, row=row, rows=rows, dtype=dtype, lora=LORA, merged=merged)
    state = fresh_state(tx, params=adapters(), dtype=dtype, lora=LORA)
    for _ in range(updates):
        state, metrics, _ = step(state, packed(sequences(), row, rows), rate, True, noise)
    return step, base, state, jax.device_get(metrics)


@pytest.fixture(scope="module")
def reference():
    """Returns the adapters' gradients, made from those of the merged float32 policy, one sequence at a time."""
    merged = MergedPolicy(CONFIG, LORA, MESH, init_params(CONFIG, 0), "float32")(adapters())
    targets = TrainedParams(CONFIG, LORA).targets(tiny_step.expected_gradient(sequences(), merged))
    return jax.jit(lambda a, g: adapter_gradients(a, g, CONFIG, LORA))(adapters(), targets)


@pytest.mark.parametrize(
    ("row", "rows"), [(20, 2), *(pytest.param(*form, marks=pytest.mark.harness) for form in ((64, 1), (100, 3)))]
)
def test_gradient_is_that_of_the_loss_however_it_is_cut(row, rows, reference):
    _, _, state, metrics = run(keep_gradient(), row=row, rows=rows, noise=rows == 2)
    check_close(state.opt_state.inner_state.trace, reference)
    assert metrics["optimizer/grad_norm"] == pytest.approx(float(optax.tree.norm(reference)), rel=1e-5)
    assert rows != 2 or 0 < metrics["optimizer/grad_noise"] < 1e3 * metrics["optimizer/grad_norm"] ** 2


@pytest.mark.harness
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_gradient_in_16_bits_is_near_that_of_float32(dtype, most, reference):
    trace = run(keep_gradient(), dtype=dtype)[2].opt_state.inner_state.trace
    gap = optax.tree.norm(jax.tree.map(lambda a, b: a - b, trace, reference))
    assert float(gap) < most * float(optax.tree.norm(reference))
    assert {leaf.dtype for leaf in jax.tree.leaves(trace)} == {jnp.dtype("float32")}


def test_updates_change_only_adapters_and_compile_once():
    before, tx = jax.device_get(adapters()), make_optimizer(OptimizerConfig(learning_rate=1e-2))
    step, base, state, _ = run(tx, dtype="bfloat16", rate=1e-2, updates=3)
    assert step.compilations == 1
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert new.dtype == jnp.float32
        assert np.abs(old - np.asarray(new)).max() > 1e-3
    fresh = cast_params(init_params(CONFIG, 0), jnp.bfloat16)
    for old, new in zip(jax.tree.leaves(fresh), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new), strict=True)


@pytest.mark.harness
def test_the_lowered_step_is_the_one_that_is_called():
    tx, everywhere = keep_gradient(), replicated(MESH)
    step, base, *expected = run(tx, dtype="bfloat16")
    weights = MergedPolicy(CONFIG, LORA, MESH, base, jnp.bfloat16)(adapters())
    given = place_batch(packed(sequences()), everywhere, everywhere), place_controls(1.0, True, False, everywhere)
    found = step.lower().compile()(fresh_state(tx, params=adapters(), lora=LORA), *given, weights)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found[:2]), tuple(jax.device_get(expected)))
