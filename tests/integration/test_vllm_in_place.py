"""A real vLLM server writes changed values into its weights in place, as on a GPU.

Its linear layers are kept from packing their weights (vllm_sabotage.py), which vLLM does on every CPU.
"""

import contextlib

import jax
import pytest
from vllm_checks import OTHER_BITS, adamw_step, check_use, rpc

from rljax.errors import ServerRefusedError, VerificationError
from rljax.weights.publish_config import PublishConfig
from tests.integration.conftest import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.harness]
DOWN, QUERY = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def unpacked(start_server, make_model):
    model = make_model(True, repeats_head=True)
    server = start_server(model, "bfloat16", unpacked=True)
    yield Served(server, model, "bfloat16")
    server.stop()


@pytest.fixture
def publishing():
    """Yields a function that builds an engine for updates in place, which has published version 0."""
    with contextlib.ExitStack() as stack:

        def build(served):
            engine = served.engine(publish=PublishConfig(store="http", in_place=True))
            stack.callback(engine.close)
            assert engine.publish(served.model.params, 0)["publish/servers_in_place"] == 0
            return engine

        yield build


def turned(params, seed):
    """Returns parameters with other values in one matrix of the last layer's MLP.

    The change is a tenth of all weights.
    """
    layers = params["layers"]
    down = layers["mlp"]["down"]
    noise = jax.random.normal(jax.random.key(seed), down[1].shape)
    mlp = layers["mlp"] | {"down": down.at[1].set(0.3 * noise)}
    return params | {"layers": layers | {"mlp": mlp}}


def written(engine, params, version):
    """Publishes, checks that every tensor is proven, and returns the number of servers that wrote in place."""
    metrics = engine.publish(params, version)
    assert metrics["publish/verified_tensors"] == 24
    assert metrics["publish/verify_abs_diff_mean"] < metrics["publish/verify_band"]
    return metrics["publish/servers_in_place"]


def test_what_changed_is_written_and_proven(unpacked, publishing):
    engine = publishing(unpacked)
    params = unpacked.model.params
    for version in (1, 2):
        params = adamw_step(params, seed=version)
        assert written(engine, params, version) == 1
    params = turned(params, seed=3)
    assert written(engine, params, 3) == 1
    check_use(engine, unpacked.url, params)
    assert written(engine, unpacked.model.moved(4), 4) == 0  # all of it changed
    assert written(engine, adamw_step(unpacked.model.moved(4), seed=5), 5) == 1


def test_a_tensor_that_is_not_written_is_named(unpacked, publishing):
    engine = publishing(unpacked)
    params = unpacked.model.params
    rpc(unpacked, "sabotage_patches", "skip", QUERY)
    try:
        with pytest.raises(VerificationError, match=f"{OTHER_BITS}: 1 tensor differs: {QUERY}"):
            engine.publish(adamw_step(params, seed=1), 1)
    finally:
        rpc(unpacked, "sabotage_patches", "off", "")
    engine.fleet.report()
    params = adamw_step(params, seed=2)
    assert written(engine, params, 2) == 0
    assert written(engine, adamw_step(params, seed=3), 3) == 1


def test_one_that_breaks_off_is_loaded_whole_at_once(unpacked, publishing):
    engine = publishing(unpacked)
    params = adamw_step(unpacked.model.params, seed=1)
    rpc(unpacked, "sabotage_patches", "raise", DOWN)
    try:
        assert written(engine, params, 1) == 0
    finally:
        rpc(unpacked, "sabotage_patches", "off", "")
    assert written(engine, adamw_step(params, seed=2), 2) == 1


def test_a_server_that_missed_a_version_gets_all_of_the_next(unpacked, publishing):
    engine = publishing(unpacked)
    missed = adamw_step(unpacked.model.params, seed=1)
    engine.prepare(missed, 1)  # the server's machine has this version, but the server does not load it
    params = adamw_step(missed, seed=2)
    assert written(engine, params, 2) == 0
    assert written(engine, adamw_step(params, seed=3), 3) == 1


def test_weights_that_others_changed_are_not_written_into(unpacked, publishing):
    engine = publishing(unpacked)
    params = adamw_step(unpacked.model.params, seed=1)
    rpc(unpacked, "sabotage_scale", DOWN)
    with pytest.raises(VerificationError, match=OTHER_BITS):
        engine.publish(params, 1)
    engine.fleet.report()
    assert written(engine, adamw_step(params, seed=2), 2) == 0


def test_an_update_that_ends_in_an_error_lets_the_next_come(unpacked, publishing):
    """A failed update does not block the next version. vLLM itself takes the failed update for one under way."""
    engine = publishing(unpacked)
    params = unpacked.model.params
    rpc(unpacked, "sabotage_finish", "next")
    with pytest.raises(ServerRefusedError, match="planted"):
        engine.publish(adamw_step(params, seed=1), 1)
    engine.fleet.report()
    assert written(engine, adamw_step(params, seed=2), 2) == 0


def test_layers_that_pack_their_weights_are_loaded_whole(bfloat16, publishing):
    engine = publishing(bfloat16)
    params = bfloat16.model.params
    for version in (1, 2):
        params = adamw_step(params, seed=version)
        assert written(engine, params, version) == 0
