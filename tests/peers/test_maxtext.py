"""The recipe of docs/schedule.md for MaxText runs around the optimizer of its own ``get_optimizer``."""

import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState
from pages import run_block
from surging import LENGTHS, RATES, early_controller

from rljax import schedule
from rljax.schedule import get_learning_rate

pytest.importorskip("maxtext")
# Its imports for Muon alone would import every model of MaxText, and with them packages for TPUs and GPUs.
for name in ("muon", "maxtext_muon"):
    left_out = ModuleType(f"maxtext.utils.{name}_utils")
    setattr(left_out, f"get_{name}_weight_dimension_numbers", None)
    sys.modules[left_out.__name__] = left_out

get_optimizer = pytest.importorskip("maxtext.optimizers.optimizers").get_optimizer

STEPS = 60


# The fields of a configuration that ``get_optimizer`` reads.
FIELDS = {"learning_rate": 1e-6, "mu_dtype": jnp.float32, "decoder_block": None}
FIELDS |= {"adam_b1": 0.9, "adam_b2": 0.95, "adam_eps": 1e-8, "adam_eps_root": 0.0, "adam_weight_decay": 0.0}


@pytest.mark.parametrize("trained", [[], ["kernel"]], ids=["all parameters", "some are frozen"])
@pytest.mark.parametrize("kind", ["adamw", "adam_pax", "sgd"])
def test_the_rate_follows_the_lengths(kind, trained):
    params, lengths = {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}, iter(LENGTHS)
    rates, moves = [], []

    @jax.jit
    def step(state, x):
        # The loss is linear in every parameter, so all gradients are equal, and Adam moves each parameter by the rate.
        grads = jax.grad(lambda p: (x @ p["kernel"] + p["bias"][None]).sum())(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        moved = {name: -updates[name] / (grads[name] if kind == "sgd" else 1.0) for name in updates}
        return state.replace(opt_state=opt_state), {name: value.mean() for name, value in moved.items()}

    def train_step(state, batch):
        state, moved = step(state, batch)
        rates.append(get_learning_rate(state.opt_state))
        moves.append(jax.device_get(moved))
        return state

    public = {name: getattr(schedule, name) for name in schedule.__all__}
    run_block(
        "schedule.md",
        "# MaxText",
        **public | {"LengthTriggeredLR": early_controller},
        config=SimpleNamespace(**FIELDS, opt_type=kind, trainable_parameters_mask=trained),
        get_optimizer=get_optimizer,
        make_train_state=lambda tx: TrainState.create(apply_fn=None, params=params, tx=tx),
        train_step=train_step,
        mean_length=lambda: next(lengths),
        batches=[jnp.ones((3, 4))] * STEPS,
    )
    np.testing.assert_array_equal(rates, RATES[:STEPS])
    np.testing.assert_allclose([moved["kernel"] for moved in moves], RATES[:STEPS], rtol=1e-4)
    np.testing.assert_allclose([moved["bias"] for moved in moves], 0.0 if trained else RATES[:STEPS], rtol=1e-4)
