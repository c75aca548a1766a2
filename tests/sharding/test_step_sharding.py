"""The same step runs on meshes of several shapes: gradients, metrics, placement, collectives, one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compile.count import count_program
from compile.hlo import parse_module
from sharded_step import CONFIG, CORRECTION, COUNT, LOSS, batch, gradient_keeper, shape

from rljax.policy.model import abstract_params, init_params, param_shardings
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.precision import PrecisionConfig
from rljax.trainer.state import OptimizerConfig, create_state, make_optimizer
from rljax.trainer.step import TrainStep

pytestmark = [pytest.mark.mesh, pytest.mark.slow]


MEASURED = DiagnosisConfig()


def build(fsdp, tp, tx, dtype="float32", replica=1, *, batch_shape=None, diagnosis=MEASURED, remat="none", **options):
    mesh = make_mesh(MeshConfig(fsdp, tp, replica))
    step = TrainStep(
        CONFIG,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype=dtype, remat=remat),
        objective=Objective(LOSS, CORRECTION, COUNT, 16),
        batch_shape=batch_shape or shape(),
        diagnosis=diagnosis,
        **options,
    )
    state = create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=dtype == "float16")
    return mesh, step, state


@pytest.fixture(scope="module")
def single():
    _, step, state = build(1, 1, gradient_keeper())
    state, metrics, values = step(state, batch(), 0.1, True)
    return jax.device_get((state.opt_state.inner_state.trace, metrics, values.logprobs))


@pytest.mark.parametrize(
    ("fsdp", "tp", "options"),
    [
        pytest.param(2, 4, {"remat": "dots"}, marks=pytest.mark.harness),
        (8, 1, {"keep_gathered": True, "remat": True}),
        (2, 2, {"replica": 2, "remat": "blocks"}),
        pytest.param(8, 1, {}, marks=pytest.mark.harness),
        pytest.param(4, 2, {}, marks=pytest.mark.harness),
        pytest.param(4, 1, {"replica": 2}, marks=pytest.mark.harness),
    ],
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(fsdp, tp, options, single):
    _, step, state = build(fsdp, tp, gradient_keeper(), **options)
    state, metrics, values = jax.device_get(step(state, batch(), 0.1, True))
    expected_grads, expected_metrics, expected_logprobs = single
    for g, expected in zip(
        jax.tree.leaves(state.opt_state.inner_state.trace), jax.tree.leaves(expected_grads), strict=True
    ):
        assert np.abs(expected).max() > 0
        assert np.abs(g - expected).max() / np.abs(expected).max() <= 1e-5
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(values.logprobs, expected_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(dtype, marks=pytest.mark.harness) for dtype in ("bfloat16", "float32"))]
)
def test_a_state_stays_where_it_lies_in_one_compilation(dtype):
    """Rates, batches and skips change, and parameters and moments are sharded alike."""
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    mesh, step, state = build(4, 2, tx, dtype, diagnosis=None)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    for i in range(5):
        state, metrics, _ = step(state, batch(i), 1e-3 / (i + 1), i != 2)
    assert step.compilations == 1
    assert int(metrics["optimizer/skipped_updates"]) == 1
    assert float(metrics["schedule/learning_rate"]) == np.float32(1e-3 / 5)
    assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, state)) == jax.tree.leaves(before)
    expected = param_shardings(CONFIG, mesh)
    adam = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    for tree in (state.params, *adam):
        assert jax.tree.all(jax.tree.map(lambda leaf, s: leaf.sharding == s, tree, expected))
        assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, tree))
    query = state.params["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.shape == (2, 8, 2, 8)


def test_only_the_sum_of_gradients_crosses_replicas():
    _, step, _ = build(2, 2, make_optimizer(OptimizerConfig()), replica=2)
    given = ("old_logprobs", "reference_logprobs")
    program = count_program(parse_module(step.lower(*given).compile().as_text()), 8)
    assert program.open_loops == 2

    def crossing(work):
        return [one for one in work.merged_collectives() if any({0, 1, 2, 3} & {*g} and max(g) > 3 for g in one.groups)]

    assert program.micro_batch.collectives
    assert crossing(program.micro_batch) == crossing(program.forward) == []
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract_params(CONFIG)))
    assert gradient / 4 <= sum(one.bytes for one in crossing(program.step)) <= 4 * gradient


def test_noise_is_that_of_each_replicas_micro_batches():
    """On one device the two replicas' parts of a micro-batch are micro-batches of their own."""
    _, step, state = build(2, 2, gradient_keeper(), replica=2, remat="blocks")  # this program exists already
    found = step(state, batch(), 0.1, True, True)[1]["optimizer/grad_noise"]
    m, b, t = shape()
    parted = jax.tree.map(lambda x: x.reshape(2 * m, b // 2, t) if x.ndim else 2 * x, batch())
    _, step, state = build(1, 1, gradient_keeper(), batch_shape=(2 * m, b // 2, t), diagnosis=None)
    expected = step(state, parted, 0.1, True, True)[1]["optimizer/grad_noise"]
    assert float(expected) > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4)
