"""Tests of sampling from servers as they stand, against a stand-in server."""

import numpy as np
import pytest
from opened_clients import quick

from rljax.errors import ServerGoneError
from rljax.rollout.servers.model import ServedModel
from rljax.rollout.types import SamplingParams

PROMPTS = [np.array([3, 4, 5], np.int32), np.array([9], np.int32)]


@pytest.fixture
def fakes(another):
    servers = [another(), another()]
    for server in servers:
        server.model = server.root = "org/name"
    return servers


def drawn(model, tokens=2, n=3):
    return list(model.generate(PROMPTS, n, SamplingParams(tokens, 0.7), seed=1))


def test_responses_of_all_servers_come_back_to_their_prompts(fakes):
    for fake in fakes:
        fake.delay_s = 0.02
    model = ServedModel([fake.url for fake in fakes], quick())
    assert (model.info.root, model.info.max_model_len) == ("org/name", 128)
    samples = model.generate(PROMPTS, 3, SamplingParams(2, 0.7), seed=1)
    responses = list(samples)
    assert sorted((r.prompt_index, r.sample_index) for r in responses) == [(i, j) for i in range(2) for j in range(3)]
    for response in responses:
        assert response.response.tolist() == ([5, 6] if response.prompt_index == 0 else [9, 10])
        assert response.truncated
    assert all("sample" in fake.events for fake in fakes)
    assert samples.metrics["rollout/requests"] == 6
    with pytest.raises(RuntimeError, match="weights cannot be published to a served model"):
        model.publish({}, 1)
    model.close()
    model.close()


def test_a_server_that_goes_away_loses_nothing(fakes):
    model = ServedModel([fake.url for fake in fakes], quick())
    fakes[0].stop()
    assert len(drawn(model)) == 6
    model.close()


def test_no_server_left_ends_the_evaluation_in_bounded_time(fakes):
    model = ServedModel([fakes[0].url], quick(), wait_s=0.5)
    fakes[0].stop()
    with pytest.raises(RuntimeError, match=r"no vLLM server came back within 0\.5 s"):
        drawn(model)
    model.close()


def test_a_prompt_that_does_not_fit_is_refused(fakes):
    model = ServedModel([fakes[0].url], quick())
    with pytest.raises(ValueError, match=r"prompt 0 has 3 tokens; with 126 of response it must have 1 to 2"):
        drawn(model, tokens=126)
    model.close()


def test_servers_of_different_models_and_no_servers_are_named(fakes):
    fakes[1].root = "another"
    with pytest.raises(ValueError, match="the servers hold different models: org/name and another"):
        ServedModel([fake.url for fake in fakes], quick())
    fakes[0].stop()
    with pytest.raises(ServerGoneError, match="no answer from"):
        ServedModel([fakes[0].url], quick())
