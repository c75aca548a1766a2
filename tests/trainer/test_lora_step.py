"""In a step on adapters, the gradient is that of the merged policy's loss, however the batch is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_adapters import random_adapters
from tiny_step import CONFIG, MESH, expected_gradient, fresh_state, keep_gradient, make_step, packed, sequences

from rljax.policy.lora import LoraConfig, MergedPolicy, TrainedParams, adapter_gradients
from rljax.policy.model import cast_params, init_params
from rljax.sharding import replicated
from rljax.trainer.micro_batches import place_batch
from rljax.trainer.state import OptimizerConfig, make_optimizer
from rljax.trainer.totals import place_controls

pytestmark = pytest.mark.slow

ADAMW = OptimizerConfig(learning_rate=1e-2)
LORA = LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "o_proj", "up_proj", "down_proj"))


def adapters():
    return random_adapters(CONFIG, LORA, 0.2)


def run(tx, batch, *, row=20, rows=2, dtype="float32", noise=False, rate=1.0, updates=1):
    base = cast_params(init_params(CONFIG, 0), dtype)
    merged = MergedPolicy(CONFIG, LORA, MESH, base, dtype)
    # integration/test_lora_run.py measures.
    step = make_step(tx, row=row, rows=rows, dtype=dtype, lora=LORA, merged=merged)
    state = fresh_state(tx, params=adapters(), dtype=dtype, lora=LORA)
    for _ in range(updates):
        state, metrics, values = step(state, packed(batch, row, rows), rate, True, noise)
    return step, base, state, jax.device_get(metrics), values.logprobs


@pytest.fixture(scope="module")
def reference():
    """Returns the adapters' gradients, made from those of the merged float32 policy, one sequence at a time."""
    merged = MergedPolicy(CONFIG, LORA, MESH, init_params(CONFIG, 0), "float32")(adapters())
    of_weights = expected_gradient(sequences(), merged)
    return adapter_gradients(adapters(), TrainedParams(CONFIG, LORA).targets(of_weights), CONFIG, LORA)


FORMS = [pytest.param(*form, marks=pytest.mark.harness) for form in ((64, 1), (100, 3))]


@pytest.mark.parametrize(("row", "rows"), [(20, 2), *FORMS])
def test_gradient_is_that_of_the_loss_however_it_is_cut(row, rows, reference):
    _, _, state, metrics, _ = run(keep_gradient(), sequences(), row=row, rows=rows)
    trace = state.opt_state.inner_state.trace
    for found, expected in zip(jax.tree.leaves(trace), jax.tree.leaves(reference), strict=True):
        assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5
    assert metrics["optimizer/grad_norm"] == pytest.approx(float(optax.tree.norm(reference)), rel=1e-5)


@pytest.mark.harness
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_in_16_bits_is_near_that_of_float32(dtype, reference):
    _, _, state, metrics, _ = run(keep_gradient(), sequences(), dtype=dtype)
    difference = jax.tree.map(lambda a, b: a - b, state.opt_state.inner_state.trace, reference)
    assert float(optax.tree.norm(difference)) < (0.05 if dtype == "bfloat16" else 0.01) * float(
        optax.tree.norm(reference)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state.inner_state.trace)} == {jnp.dtype("float32")}
    assert metrics["precision/overflows"] == 0


def test_the_noise_of_the_gradient_is_that_of_the_adapters():
    _, _, _, metrics, _ = run(keep_gradient(), sequences(), noise=True)
    assert 0 < metrics["optimizer/grad_noise"] < 1e3 * metrics["optimizer/grad_norm"] ** 2


def test_updates_change_only_adapters_and_compile_once():
    before = jax.device_get(adapters())
    step, base, state, _, _ = run(make_optimizer(ADAMW), sequences(), dtype="bfloat16", rate=1e-2, updates=3)
    assert step.compilations == 1
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert new.dtype == jnp.float32
        assert np.abs(old - np.asarray(new)).max() > 1e-3
    fresh = cast_params(init_params(CONFIG, 0), jnp.bfloat16)
    for old, new in zip(jax.tree.leaves(fresh), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new), strict=True)


@pytest.mark.harness
def test_the_lowered_step_is_the_one_that_is_called():
    tx = keep_gradient()
    step, _, state, metrics, _ = run(tx, sequences(), dtype="bfloat16")
    everywhere = replicated(MESH)
    base = cast_params(init_params(CONFIG, 0), jnp.bfloat16)
    weights = MergedPolicy(CONFIG, LORA, MESH, base, jnp.bfloat16)(adapters())
    placed = place_batch(packed(sequences()), everywhere, everywhere)
    fresh = fresh_state(tx, params=adapters(), lora=LORA)
    found = step.lower().compile()(fresh, placed, place_controls(1.0, True, False, everywhere), weights)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found[:2]), jax.device_get((state, metrics)))
