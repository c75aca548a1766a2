"""The step's gradient is that of the declared loss, however it is cut up. A skipped step changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from hybrids import tiny_hybrid
from tiny_step import CONFIG, check_close, expected_gradient, fresh_state, keep_gradient, make_step, packed, sequences

from rljax.mismatch import mismatch_metrics
from rljax.policy.model import init_params
from rljax.record.token_arrays import to_rows
from rljax.schedule import inject_learning_rate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.packing import unpack
from rljax.trainer.state import GROWTH_INTERVAL, OptimizerConfig, adjust_loss_scale, initial_loss_scale, make_optimizer
from rljax.trainer.step import make_programs

pytestmark = pytest.mark.slow


def run(tx, batch_sequences, *, apply=True, params=None, rate=1e-2, diagnosis=None, row=20, rows=2, **kind):
    step = make_step(tx, diagnosis=diagnosis, row=row, rows=rows, **kind)
    state = fresh_state(tx, params=params, dtype=kind.get("dtype", "float32"))
    batch = packed(batch_sequences, row, rows)
    before = jax.device_get(state)
    state, metrics, values = jax.device_get(step(state, batch, rate, apply))
    return before, state, metrics, (batch, values.logprobs)


# All tests of a whole update have one optimizer, so that they share a program. Each gives the rate of its own step.
ADAMW = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5, clip_norm=0.05)


@pytest.fixture(scope="module")
def reference():
    return jax.device_get(expected_gradient(sequences()))


FURTHER = [pytest.param(*form, marks=pytest.mark.harness) for form in ((64, 1, True), (20, 12, False), (100, 3, False))]


@pytest.mark.parametrize(("row", "rows", "remat"), [(20, 2, False), *FURTHER])
def test_gradient_is_that_of_the_loss_however_it_is_cut(row, rows, remat, reference):
    form = {"row": row, "rows": rows, "remat": remat, "diagnosis": DiagnosisConfig()}
    _, state, metrics, _ = run(keep_gradient(), sequences(), **form)
    check_close(state.opt_state.inner_state.trace, reference)
    assert metrics["optimizer/grad_norm"] == pytest.approx(float(optax.tree.norm(reference)), rel=1e-5)
    assert metrics["policy/clip_fraction"] == 0.0


def test_mismatch_rows_are_those_of_unpacked_arrays():
    given = sequences()
    _, _, metrics, (batch, logprobs) = run(keep_gradient(), given, diagnosis=DiagnosisConfig())
    of_each = unpack(logprobs, batch, given), [s["rollout_logprobs"] for s in given], [s.sampled for s in given]
    trainer, rollout, mask = (to_rows(x, 0.0) for x in of_each)
    for name, value in mismatch_metrics(trainer.astype(float), rollout.astype(float), mask).items():
        # On the device a quantile is known to one bin of its histogram, 2% wide.
        rel = 2e-2 if name.endswith(("_p99", "_p999")) else 1e-4
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, rel=rel, abs=1e-6), name


def test_equal_steps_share_their_programs():
    make_programs.cache_clear()
    measured = {"diagnosis": DiagnosisConfig()}
    first, second = (make_step(keep_gradient(), **measured) for _ in range(2))
    found = [jax.device_get(step(fresh_state(), packed(sequences()), 1e-2, True)) for step in (first, second)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert first.compilations == second.compilations == 1
    others = ({"row": 24}, {"rows": 1}, {"dtype": "bfloat16"}, {"remat": True})
    assert [make_step(keep_gradient(), **measured, **kind).compilations for kind in others] == [0] * 4
    assert make_step(make_optimizer(OptimizerConfig())).compilations == 0
    assert make_optimizer(OptimizerConfig()) is make_optimizer(OptimizerConfig())


def test_a_forward_without_loss_changes_nothing():
    """The result equals that of the same rows with forward and backward in every micro-batch."""
    step = make_step(keep_gradient(), diagnosis=DiagnosisConfig())
    batch = packed(sequences(lambda i: i % 3 == 0))
    assert 2 <= int(batch.with_loss) < int(batch.used)
    every = (batch, batch._replace(with_loss=batch.used), packed(sequences(lambda i: False)))
    found = [jax.device_get(step(fresh_state(), given, 1e-2, True, True)) for given in every]
    assert step.compilations == 1
    (state, row, values), (all_state, all_row, all_values), (_, silent, _) = found
    check_close(*(s.opt_state.inner_state.trace for s in (state, all_state)), 1e-6)
    np.testing.assert_allclose(values.logprobs, all_values.logprobs, atol=2e-6, rtol=0)
    assert row.keys() == all_row.keys() == silent.keys()
    assert row["optimizer/grad_noise"] > 0
    for key in row:
        np.testing.assert_allclose(row[key], all_row[key], atol=1e-6, rtol=1e-6, err_msg=key)
    assert silent["mismatch/token_count"] == sum(len(s.response) for s in sequences())
    assert (silent["policy/loss"], silent["policy/clip_fraction"], silent["optimizer/grad_norm"]) == (0, 0, 0)
    assert silent["optimizer/skipped_updates"] == 1


@pytest.mark.harness  # test_precision.py compares gradients in float16
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 3e-2), ("float16", 5e-3)])
def test_sixteen_bit_gradients_are_near_the_float32_ones(dtype, most, reference):
    _, state, _, _ = run(keep_gradient(), sequences(), dtype=dtype)
    gap = optax.tree.norm(jax.tree.map(lambda a, b: a - b, state.opt_state.inner_state.trace, reference))
    assert float(gap / optax.tree.norm(reference)) < most


def test_a_skipped_update_sets_only_the_rate():
    """An update is skipped on request, and where gradients are not finite, which is counted."""
    params = init_params(CONFIG, 0)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(jnp.nan)
    asked = ({"apply": False}, 0), ({"params": jax.tree.map(jnp.copy, params)}, 1)
    for how, overflows in asked:
        before, state, metrics, _ = run(make_optimizer(ADAMW), sequences(), rate=5e-3, **how)
        jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
        for moment in ("mu", "nu"):
            assert not any(leaf.any() for leaf in jax.tree.leaves(optax.tree.get(state.opt_state, moment)))
        assert (metrics["optimizer/skipped_updates"], metrics["precision/overflows"]) == (1, overflows)
        assert metrics["schedule/learning_rate"] == np.float32(5e-3)
    _, _, measured, _ = run(keep_gradient(), sequences(), params=params, diagnosis=DiagnosisConfig())
    assert measured["mismatch/nonfinite_count"] > 0


def test_update_is_adamw_with_clipping_by_hand(reference):
    """AdamW's first step is lr * (g / (abs(g) + eps) + wd * p), with g clipped."""
    before, state, metrics, _ = run(make_optimizer(ADAMW), sequences(), rate=3e-3)
    norm = float(optax.tree.norm(reference))
    assert norm > ADAMW.clip_norm
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for p, q, g in zip(*(jax.tree.leaves(t) for t in (before.params, state.params, reference)), strict=True):
        clipped = g * (ADAMW.clip_norm / norm)
        expected = p - 3e-3 * (clipped / (np.abs(clipped) + 1e-8) + ADAMW.weight_decay * p)
        sure = np.abs(clipped) > 1e-5
        np.testing.assert_allclose(q[sure], expected[sure], atol=1e-5, rtol=0)


def test_the_decay_of_a_delta_net_is_not_decayed():
    """Without a gradient, a step multiplies parameters by 1 - rate * decay. The state is that of optax's AdamW."""
    tx, params = make_optimizer(ADAMW), jax.tree.map(np.asarray, init_params(tiny_hybrid(), 0))
    state = jax.jit(tx.init)(params)
    updates, _ = jax.device_get(jax.jit(tx.update)(jax.tree.map(np.zeros_like, params), state, params))
    before, updates = (flatten_dict(tree, sep="/") for tree in (params, updates))
    still = {f"layers/{i}/attention/{name}" for i in range(3) for name in ("log_decay_scale", "step_bias")}
    assert {name for name in updates if not updates[name].any()} >= still
    for name in updates.keys() - still:
        np.testing.assert_allclose(updates[name], -1e-2 * 0.5 * before[name], atol=1e-9, rtol=0)
    theirs = inject_learning_rate(lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), 1e-2)
    assert jax.tree.structure(jax.eval_shape(theirs.init, params)) == jax.tree.structure(state)


def test_the_loss_scale_halves_at_once_and_doubles_later():
    state = initial_loss_scale(dynamic=True)
    assert float(state.scale) == 2.0**15
    state = adjust_loss_scale(state, jnp.bool_(False), dynamic=True)
    assert (float(state.scale), int(state.good_steps), int(state.overflows)) == (2.0**14, 0, 1)
    state = state._replace(good_steps=state.good_steps + GROWTH_INTERVAL - 2)
    state = adjust_loss_scale(state, jnp.bool_(True), dynamic=True)
    assert float(state.scale) == 2.0**14
    state = adjust_loss_scale(state, jnp.bool_(True), dynamic=True)
    assert (float(state.scale), int(state.good_steps), int(state.overflows)) == (2.0**15, 0, 1)
    fixed = adjust_loss_scale(initial_loss_scale(dynamic=False), jnp.bool_(False), dynamic=False)
    assert (float(fixed.scale), int(fixed.overflows)) == (1.0, 1)
