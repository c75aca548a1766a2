"""Rollouts go through a real vllm-router to two real vLLM servers. One of them is killed and comes back."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from routers import started_router

from rljax.policy.score import make_scorer
from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
from rljax.rollout.servers.process import ServerProcess
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ServerConfig, start
from rljax.rollout.types import ClientLimits, RolloutConfig, SamplingParams

pytestmark = pytest.mark.router
PROMPTS = [np.arange(1 + i, 9 + i, dtype=np.int32) for i in range(4)]
N, TOKENS = 24, 240  # the sampling takes ten seconds, so it is not over when the server is killed
LIMITS = ClientLimits(max_attempts=60, max_backoff_s=1.0, max_outstanding=16)


@pytest.fixture
def servers(make_model, vllm_interpreter, tmp_path):
    config = ServerConfig(
        str(make_model(True).path), vllm_interpreter, "float32", max_model_len=512, log_path=tmp_path / "0.log"
    )
    with contextlib.ExitStack() as stack:
        made = [dataclasses.replace(config, log_path=tmp_path / f"{i}.log") for i in range(2)]
        yield [stack.enter_context(start(each, timeout_s=480)) for each in made]


def sampled(engine):
    places = []
    for response in engine.generate(PROMPTS, N, SamplingParams(TOKENS), seed=0):
        yield response
        places.append((response.prompt_index, response.sample_index))
    assert sorted(places) == [(i, j) for i in range(len(PROMPTS)) for j in range(N)]


def test_one_of_two_is_killed_in_mid_rollout_and_comes_back(servers, make_model, tmp_path):
    model, urls = make_model(True), tuple(each.url for each in servers)
    with started_router() as router, contextlib.ExitStack() as stack:
        engine = ServedEngine(
            RolloutConfig(engine="vllm", urls=urls, dtype="float32", router=router, limits=LIMITS, server_wait_s=300.0),
            VllmBackend(),
            PolicyFunctions(
                model.tensors("float32"), model.checksums("float32"), make_scorer(model.config, jnp.float32)
            ),
            hf_config=model.hf_config,
            max_tokens=512,
        )
        stack.callback(engine.close)
        engine.publish(model.params, 0)
        for count, _ in enumerate(sampled(engine)):
            if count == 10:
                servers[1].kill()
        assert engine.fleet.client.opened() == [urls[0]]
        metrics = engine.fleet.report()
        assert metrics["rollout/server_losses"] >= 1
        again = ServerProcess(dataclasses.replace(servers[1].config, port=servers[1].port, log_path=tmp_path / "2.log"))
        stack.callback(again.stop)
        again.wait_healthy(480)
        engine.publish(model.moved(1), 1)
        assert set(engine.fleet.client.opened()) == set(urls)
        assert {version for response in sampled(engine) for version in response.versions.tolist()} == {1}
        assert engine.fleet.report()["rollout/server_losses"] == 0
