"""The injected rate in flax.nnx.Optimizer, which keeps it in a Variable."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.schedule import (
    get_learning_rate,
    inject_learning_rate,
    length_decay_schedule,
    set_learning_rate,
)

nnx = pytest.importorskip("flax.nnx")

RATES = [1e-3, 5e-4, 5e-4, 1.25e-4, 1e-6, 0.0]


def injected(rate=1e-3):
    return inject_learning_rate(optax.adamw, rate)


class TestNnx:
    def make(self, rate=1e-3):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), injected(rate))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def test_the_variable_is_written_in_place_in_one_trace(self):
        model, optimizer = self.make()
        variable = optimizer.opt_state[1].hyperparams["learning_rate"]
        traces = []

        @nnx.jit
        def step(model, optimizer, x):
            traces.append(None)
            grads = nnx.grad(lambda model: jnp.square(model(x)).mean())(model)
            optimizer.update(model, grads)

        for rate in RATES:
            set_learning_rate(optimizer.opt_state, rate)
            step(model, optimizer, jnp.ones((4, 2)))
            assert optimizer.opt_state[1].hyperparams["learning_rate"] is variable
            assert get_learning_rate(optimizer.opt_state) == np.float32(rate)
        assert len(traces) == 1

    def test_a_rate_of_zero_stops_the_model(self):
        model, optimizer = self.make()
        before = np.asarray(model.kernel[...])
        grads = nnx.grad(lambda model: model(jnp.ones((4, 2))).sum())(model)
        set_learning_rate(optimizer.opt_state, 0.0)
        optimizer.update(model, grads)
        np.testing.assert_array_equal(model.kernel[...], before)
        set_learning_rate(optimizer.opt_state, 1e-3)
        optimizer.update(model, grads)
        assert np.abs(model.kernel[...] - before).max() > 0

    def test_a_refusal_leaves_every_variable_as_it_was(self):
        tx = optax.chain(injected(1e-3), injected(length_decay_schedule(1e-3, 5)))
        optimizer = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
        with pytest.raises(ValueError, match="set by its schedule"):
            set_learning_rate(optimizer.opt_state, 1e-4)
        assert get_learning_rate(optimizer.opt_state) == np.float32(1e-3)
