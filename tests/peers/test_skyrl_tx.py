"""The recipe of docs/schedule.md for SkyRL tx runs on its own JAX backend with a tiny model."""

import numpy as np
import pytest
from pages import run_block
from surging import LENGTHS, RATES, early_controller

pytest.importorskip("tx.tinker")

import jax
from tx.tinker import types
from tx.tinker.backends.jax import JaxBackendConfig, JaxBackendImpl

STEPS = 60


def test_the_rate_of_each_request_is_used(tiny_model):
    backend = JaxBackendImpl(str(tiny_model), JaxBackendConfig(max_lora_adapters=2, max_lora_rank=4))
    backend.create_model("policy", types.LoraConfig(rank=4, alpha=8.0, seed=0))
    rates, lengths = [], iter(LENGTHS)

    def weights():
        return jax.device_get(jax.tree.leaves(backend.lora_params))

    def forward_backward(batch):
        tokens = [2, 3, 4, 5 + batch % 3]
        every = {"input_ids": tokens[:-1], "targets": tokens[1:], "model_ids": "policy", "loss_fn_configs": None}
        every |= {"token_weights": [1.0] * 3, "sampling_logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
        every["loss_fn_types"] = types.LOSS_TYPES["importance_sampling"]
        prepared = types.PreparedModelPassBatch(
            **{f"all_{name}": [value] for name, value in every.items()},
            request_batch_slices=[("request", "policy", 0, 1)],
        )
        (output,) = backend.forward_backward(prepared).values()
        assert isinstance(output, types.ForwardBackwardOutput)

    def optim_step(adam_params):
        before = weights()
        backend.optim_step("policy", types.OptimStepInput(adam_params=adam_params))
        moved = max(float(np.abs(x.astype(np.float64) - y).max()) for x, y in zip(before, weights(), strict=True))
        rate = float(backend.optimizers["policy"].opt_state.hyperparams["learning_rate"][...])
        assert 0.1 * rate < moved < 3.0 * rate
        rates.append(rate)

    run_block(
        "schedule.md",
        "# SkyRL tx",
        AdamParams=types.AdamParams,
        LengthTriggeredLR=early_controller,
        batches=range(STEPS),
        mean_length=lambda: next(lengths),
        forward_backward=forward_backward,
        optim_step=optim_step,
    )
    np.testing.assert_array_equal(np.float32(rates), RATES[:STEPS])
