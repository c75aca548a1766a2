"""Hybrids of delta nets and attention compute the same on every mesh: steps, operations of blocks, and responses."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hybrids import tiny_hybrid
from sharded_step import check_equal, make_step, outcome

from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer
from rljax.policy.hf import save_params
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

CONFIG = tiny_hybrid(vocab_size=32, initializer_range=0.05, delta_key_heads=4, delta_value_heads=8)
pytestmark = [pytest.mark.mesh, pytest.mark.slow]


@functools.cache
def alone():
    return outcome(MeshConfig(1), config=CONFIG, diagnosis=None)


# On 8 devices of tp, each computes all 4 key heads.
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(1, 2, context=2), {"remat": "blocks", "keep_gathered": True}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.harness)
            for mesh, options in [
                (MeshConfig(2, 2, context=2), {"remat": "blocks", "keep_gathered": True}),
                (MeshConfig(2, 2), {"remat": "blocks"}),
                (MeshConfig(2, context=4), {}),
                (MeshConfig(1, 8), {}),
                (MeshConfig(1, 2, replica=2), {"remat": "dots"}),
            ]
        ),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(mesh, options):
    check_equal(outcome(mesh, config=CONFIG, diagnosis=None, **options), alone())


def test_devices_of_tp_hold_a_part_of_each_product():
    """A device has half of the width, and half of the 128 channels, of the 64 outputs and of the 8 rates."""
    _, state = make_step(MeshConfig(2, 2), config=CONFIG)
    shapes = {
        name: leaf.addressable_shards[0].data.shape[1:]
        for name, leaf in state.params["layers"]["0"]["attention"].items()
        if name in ("qkv", "gate", "rate", "output", "kernel")
    }
    assert shapes == {"qkv": (16, 64), "gate": (16, 32), "rate": (16, 4), "output": (32, 16), "kernel": (128, 1, 4)}
    said = r"mesh.context x mesh.tp = 2 x 4 must divide the 4 heads whose state a qwen3_5_text policy passes from token"
    with pytest.raises(ValueError, match=said):
        make_step(MeshConfig(1, 4, context=2), config=CONFIG)


def test_operations_on_devices_of_tp_have_the_order_of_a_file(tmp_path):
    save_params(tmp_path, init_params(CONFIG, 0), CONFIG)
    tokens = np.random.default_rng(0).integers(0, 32, 70).astype(np.int32)
    one, two = (JaxTracer(tmp_path, JaxForm("float32", tp=tp), str(tp)) for tp in (1, 2))
    given = {}
    for _ in range(2):
        expected = one.run(tokens, given)
        for name, value in two.run(tokens, given).items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5 * np.abs(expected[name]).max(), err_msg=name)
        given = {f"1/{kind}": 2 * expected[f"1/{kind}"] for kind in ("delta_qkv", "convolution")}


@pytest.mark.harness  # policy/test_hybrid.py has an engine on one device
def test_an_engine_on_devices_of_tp_samples_from_the_policy():
    prompts = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10])]
    engine = JaxEngine(CONFIG, jnp.float32, 6, mesh=make_mesh(MeshConfig(2, 2)), decode_tokens=4 * 18)
    params = init_params(CONFIG, 0)
    engine.publish(params, 0)
    responses = list(engine.generate(prompts, 4, SamplingParams(12, 1.0, (0, 1)), seed=0))
    scored = make_scorer(CONFIG, jnp.float32)(params, [r.ids for r in responses])
    assert len(responses) == 12
    for response, logprobs in zip(responses, scored, strict=True):
        wanted = logprobs[len(prompts[response.prompt_index]) :]
        np.testing.assert_allclose(response["rollout_logprobs"], wanted, atol=2e-5, rtol=0)
