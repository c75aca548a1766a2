"""The recipes of docs/schedule.md for optax and flax run unchanged. tests/peers runs the others in their packages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import run_block
from surging import LENGTHS, RATES, early_controller

from rljax import schedule

nnx = pytest.importorskip("flax.nnx")


def run(title, **names):
    """Executes the block called ``title``; a controller in it calls early enough for a short test."""
    public = {name: getattr(schedule, name) for name in schedule.__all__}
    space = {"jax": jax, "optax": optax, **public, "LengthTriggeredLR": early_controller, **names}
    return run_block("schedule.md", f"# {title}\n", **space)


def test_in_graph_form():
    space = run("The in-graph form", params={"w": jnp.ones(3)}, grads={"w": jnp.ones(3)}, length=jnp.float32(800))
    assert space["rate"] == np.float32(1e-6)
    assert int(space["opt_state"].hyperparams_states["learning_rate"].surge.step) == 1


def test_flax_nnx():
    rates, traces, lengths = [], [], iter(LENGTHS)

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(lambda model: jnp.square(model(x)).mean())(model))

    def train_step(model, optimizer, x):
        step(model, optimizer, x)
        rates.append(schedule.get_learning_rate(optimizer.opt_state))

    model, batches = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), [jnp.ones((2, 4))] * 100
    given = {"model": model, "train_step": train_step, "batches": batches, "mean_length": lambda: next(lengths)}
    run("flax.nnx", nnx=nnx, **given)
    np.testing.assert_array_equal(rates, RATES)
    assert len(traces) == 1
