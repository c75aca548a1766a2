"""Tests of an HTTP engine that samples on another thread than the publishing one: when each server is verified."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from served_engines import PARAMS, PROMPTS, published

from rljax.errors import ServersLostError
from rljax.rollout.engine import AHEAD
from rljax.rollout.types import SamplingParams


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(1, initializer=AHEAD.set, initargs=(1,)) as thread:
        yield thread


def sample(engine, n=3):
    return list(engine.generate(PROMPTS, n, SamplingParams(5), seed=0))


def test_a_server_that_comes_back_waits_for_the_next_publish(fake, elsewhere, another):
    other = another()
    with published(fake.url, other.url) as engine:
        port = other.port
        other.stop()
        other = another(port)
        # Nothing may be verified here, because the trainer may have taken over the weights.
        responses = elsewhere.submit(sample, engine).result(timeout=30)
        assert len(responses) == 6
        assert engine.fleet.opened() == [fake.url]
        engine.publish(PARAMS, 1)
        assert sorted(engine.fleet.opened()) == sorted([fake.url, other.url])
        for response in elsewhere.submit(sample, engine).result(timeout=30):
            assert response["version"].tolist() == [1] * 5


def test_without_any_server_sampling_ends_at_once(fake, elsewhere, another):
    with published(fake.url) as engine:
        port = fake.port
        fake.stop()
        another(port)
        with pytest.raises(ServersLostError, match="no vLLM server is left to sample"):
            elsewhere.submit(sample, engine).result(timeout=30)
        # On the thread that published, the weights are at hand, so the server is recovered as usual.
        assert len(sample(engine)) == 6
        np.testing.assert_equal(engine.fleet.report()["rollout/servers_brought_back"], 1)
