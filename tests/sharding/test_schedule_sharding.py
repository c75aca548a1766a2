"""The schedule inside a compiled step on eight devices keeps its sharding, and a run compiles once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rljax import schedule

pytestmark = pytest.mark.mesh


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_a_written_rate_lies_where_the_old_one_lay(mesh):
    """A run whose state is donated therefore compiles once (schedule/test_schedule_inject.py)."""
    state = schedule.inject_learning_rate(optax.adamw, 1e-3).init({"w": jnp.ones(3)})
    assert not schedule.set_learning_rate(state, 5e-4).hyperparams["learning_rate"].committed
    state = jax.device_put(state, jax.devices()[5])
    assert schedule.set_learning_rate(state, 5e-4).hyperparams["learning_rate"].devices() == {jax.devices()[5]}
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    new = schedule.set_learning_rate(state, 5e-4).hyperparams["learning_rate"]
    assert (new.sharding, new.committed) == (state.hyperparams["learning_rate"].sharding, True)
    assert (new.dtype, new.weak_type, new.shape, len(new.addressable_shards)) == (jnp.float32, False, (), 8)


def test_the_in_graph_form_on_the_mesh(mesh):
    """Parameters and moments are split over both axes, and everything else is replicated."""
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    config = schedule.SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)
    tx = schedule.inject_learning_rate(
        optax.adamw, schedule.length_triggered_schedule(1e-3, config=config, multiplier=1.0)
    )
    params = {"w": jax.device_put(jnp.ones((8, 4), jnp.bfloat16), split)}
    shapes = jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda x: split if x.ndim == 2 else NamedSharding(mesh, PartitionSpec()), shapes)
    state, traces, seen = jax.jit(tx.init, out_shardings=shardings)(params), [], []

    def update(params, state, length):
        traces.append(None)
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, response_length=length)
        return optax.apply_updates(params, updates), state

    step = jax.jit(update, out_shardings=({"w": split}, shardings), donate_argnums=(0, 1))
    for number in range(1, 23):
        params, state = step(params, state, np.float32(100 if number < 10 else 400))
        seen.append(float(schedule.get_learning_rate(state)))
    assert (len(traces), step._cache_size()) == (1, 1)
    np.testing.assert_array_equal(np.float32(seen), np.float32([1e-3] * 10 + [5e-4] * 11 + [2.5e-4]))
