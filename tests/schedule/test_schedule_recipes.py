"""The recipes of docs/schedule.md for optax and flax run unchanged. tests/peers runs the others in their packages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import run_block
from surging import LENGTHS, RATES, early_controller

from rljax import schedule
from rljax.schedule import get_learning_rate

nnx = pytest.importorskip("flax.nnx")


def run(title, **names):
    """Executes the block called ``title``; a controller in it calls early enough for a short test."""
    public = {name: getattr(schedule, name) for name in schedule.__all__}
    space = {"jax": jax, "optax": optax, **public, "LengthTriggeredLR": early_controller, **names}
    return run_block("schedule.md", f"# {title}\n", **space)


@pytest.fixture
def mean_length():
    lengths = iter(LENGTHS)
    return lambda: next(lengths)


def test_in_graph_form():
    space = run("The in-graph form", params={"w": jnp.ones(3)}, grads={"w": jnp.ones(3)}, length=jnp.float32(800))
    assert space["rate"] == np.float32(1e-6)
    assert int(space["opt_state"].hyperparams_states["learning_rate"].surge.step) == 1


def squared(model, x):
    return jnp.square(model(x)).mean()


def test_flax_nnx(mean_length):
    rates, traces = [], []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(squared)(model, x))

    def train_step(model, optimizer, x):
        step(model, optimizer, x)
        rates.append(get_learning_rate(optimizer.opt_state))

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    batches = [jnp.ones((2, 4))] * 100
    run("flax.nnx", nnx=nnx, model=model, train_step=train_step, mean_length=mean_length, batches=batches)
    np.testing.assert_array_equal(rates, RATES)
    assert len(traces) == 1
