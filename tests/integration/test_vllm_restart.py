"""A server dies and comes back. Nothing is lost, and nothing is sampled from its old weights."""

import itertools
import threading
import time

import pytest
from stopping import StopWhen
from vllm_processes import kill_worker

from rljax.errors import StoppedWaitingError
from rljax.rollout.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.harness]


def test_killed_in_mid_rollout_and_restarted(servers, mortal, prompts):
    """The run waits, sends the weights again, verifies them, and samples every response from them."""
    thread = threading.Thread(target=servers.kill_and_restart)
    params, stop = mortal.model.moved(9), StopWhen(lambda: not thread.is_alive() and not servers.alive())
    try:
        with mortal.published(server_wait_s=480.0, stop=stop) as engine:
            engine.publish(params, 1)
            # These are more than the server runs at once. When the first ones arrive, others have yet to begin.
            stream = iter(samples := engine.generate(prompts, 24, SamplingParams(160), seed=0))
            responses = [next(stream)]
            thread.start()
            responses += stream
            metrics = engine.fleet.report() | samples.metrics
    finally:
        thread.join()
    assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == 120
    assert all(r["version"].tolist() == [1] * 160 for r in responses)
    assert metrics["rollout/server_losses"] == metrics["rollout/servers_brought_back"] == 1
    assert metrics["rollout/retries"] > 0
    assert mortal.gaps(params, responses).max() < 1e-4


def test_the_death_of_a_server_of_ours_ends_the_wait(mortal, prompts):
    """The server's worker dies as from SIGILL. The engine would wait for 900 s, but notices the server's end."""
    with mortal.published() as engine:
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
