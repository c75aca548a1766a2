"""The injected rate on eight devices keeps its sharding, and a run compiles once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rljax.schedule import (
    SurgeConfig,
    get_learning_rate,
    inject_learning_rate,
    length_triggered_schedule,
    set_learning_rate,
)

pytestmark = pytest.mark.mesh

RATES = [1e-3, 5e-4, 1.25e-4, 1e-6]


@pytest.fixture
def mesh():
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def sharded(mesh, tx, dtype):
    """Returns parameters and moments that are split over both axes, with everything else replicated."""
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    params = {"w": jax.device_put(jnp.ones((8, 4), dtype), split)}
    shapes = jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda x: split if x.ndim == 2 else NamedSharding(mesh, PartitionSpec()), shapes)
    return params, jax.jit(tx.init, out_shardings=shardings)(params), shardings


def run(tx, params, state, shardings, rates, extra):
    """Runs a step for each pair of a rate to set (None leaves it) and extra arguments."""
    traces = []

    def update(params, state, extra):
        traces.append(None)
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, **extra)
        return optax.apply_updates(params, updates), state

    placed = jax.tree.map(lambda x: x.sharding, params)
    step = jax.jit(update, out_shardings=(placed, shardings), donate_argnums=(0, 1))
    seen = []
    for rate, arguments in zip(rates, extra, strict=True):
        if rate is not None:
            state = set_learning_rate(state, rate)
        params, state = step(params, state, arguments)
        seen.append(float(get_learning_rate(state)))
    assert len(traces) == 1
    assert step._cache_size() == 1
    return state, seen


def test_a_donated_sharded_run_compiles_once(mesh):
    """So the written rate has the sharding and the type of the old one."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), inject_learning_rate(optax.adamw, 1e-3))
    params, state, shardings = sharded(mesh, tx, jnp.float32)
    _, seen = run(tx, params, state, shardings, RATES, [{}] * len(RATES))
    np.testing.assert_array_equal(np.float32(seen), np.float32(RATES))


def test_a_rate_stays_uncommitted_or_on_another_device():
    state = inject_learning_rate(optax.adamw, 1e-3).init({"w": jnp.ones(3)})
    assert not set_learning_rate(state, 5e-4).hyperparams["learning_rate"].committed
    state = jax.device_put(state, jax.devices()[5])
    assert set_learning_rate(state, 5e-4).hyperparams["learning_rate"].devices() == {jax.devices()[5]}


def test_the_in_graph_form_on_the_mesh(mesh):
    config = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)
    tx = inject_learning_rate(optax.adamw, length_triggered_schedule(1e-3, config=config, multiplier=1.0))
    params, state, shardings = sharded(mesh, tx, jnp.bfloat16)
    lengths = [np.float32(100 if number < 10 else 400) for number in range(1, 23)]
    extra = [{"response_length": length} for length in lengths]
    _, seen = run(tx, params, state, shardings, [None] * len(lengths), extra)
    np.testing.assert_array_equal(np.float32(seen), np.float32([1e-3] * 10 + [5e-4] * 11 + [2.5e-4]))
