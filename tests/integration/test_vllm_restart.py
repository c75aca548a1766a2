"""A server dies and comes back. Nothing is lost, and nothing is sampled from its old weights."""

import itertools
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from stopping import StopWhen
from vllm_processes import kill_worker

from rljax.errors import StoppedWaitingError
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.types import RolloutConfig, SamplingParams

pytestmark = pytest.mark.vllm


def worst_gap(served, params, prompts, responses) -> float:
    sequences = [r.ids for r in responses]
    scored = served.score(params, sequences)
    return max(
        float(np.abs(s[-r.length :] - r["rollout_logprobs"]).max()) for r, s in zip(responses, scored, strict=True)
    )


def test_weights_changed_behind_our_back(float32, prompts):
    """A server may say that it holds other weights, as after an unnoticed restart.

    It gets the current weights first.
    """
    engine = float32.engine()
    params = float32.model.moved(8)
    try:
        engine.publish(params, 3)
        engine.fleet.wait(
            engine.fleet.server(float32.url).call("POST", "/update_weight_version", json={"new_version": "default"})
        )
        responses = list(engine.generate(prompts, 2, SamplingParams(8), seed=0))
        metrics = engine.fleet.report()
    finally:
        engine.close()
    assert all(r["version"].tolist() == [3] * 8 for r in responses)
    assert metrics["rollout/servers_brought_back"] == 1
    assert worst_gap(float32, params, prompts, responses) < 1e-4


@pytest.mark.harness
def test_killed_in_mid_rollout_and_restarted(servers, mortal, prompts):
    """The run waits, sends the weights again, verifies them, and samples every response from them."""
    model = mortal.model
    thread = threading.Thread(target=servers.kill_and_restart)
    engine = ServedEngine(
        RolloutConfig(engine="vllm", urls=(mortal.url,), dtype="float32", server_wait_s=480.0),
        VllmBackend(),
        PolicyFunctions(model.tensors("float32"), model.checksums("float32"), mortal.score),
        hf_config=model.hf_config,
        max_tokens=512,
        stop=StopWhen(lambda: not thread.is_alive() and not servers.alive()),
    )
    params = model.moved(9)
    try:
        engine.publish(model.params, 0)
        engine.publish(params, 1)
        # These are more than the server runs at once. When the first ones arrive, others have yet to begin.
        stream = iter(samples := engine.generate(prompts, 24, SamplingParams(160), seed=0))
        responses = [next(stream)]
        thread.start()
        responses += stream
        metrics = engine.fleet.report() | samples.metrics
    finally:
        thread.join()
        engine.close()
    assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == 120
    assert all(r["version"].tolist() == [1] * 160 for r in responses)
    assert metrics["rollout/server_losses"] == metrics["rollout/servers_brought_back"] == 1
    assert metrics["rollout/retries"] > 0
    assert worst_gap(mortal, params, prompts, responses) < 1e-4


@pytest.mark.harness
def test_the_death_of_a_server_of_ours_ends_the_wait(mortal, prompts):
    """The server's worker dies as from SIGILL.

    The engine would wait for 900 s, but `alive` notices the server's end.
    """
    with closing(mortal.engine()) as engine:
        engine.publish(mortal.model.params, 0)
        stream = iter(engine.generate(prompts, 24, SamplingParams(160), seed=0))
        next(stream)
        kill_worker(mortal.server.pid)
        began = time.monotonic()
        with pytest.raises(StoppedWaitingError, match="no vLLM server answers"):
            # On a busy machine all responses of the first request may have come before the worker died.
            list(itertools.chain(stream, engine.generate(prompts, 1, SamplingParams(300), seed=1)))
        assert time.monotonic() - began < 240
    assert not mortal.server.alive()
    assert "EngineDeadError" in mortal.server.log_tail(200)
