"""Rollouts go through a real vllm-router to stand-in servers.

tests/integration/test_vllm_router.py has real servers.
"""

import contextlib
import time

import pytest
from routers import started_router
from served_engines import PARAMS, PROMPTS, make
from vllm_fake import FakeVllm

from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.types import ClientLimits, SamplingParams

pytestmark = pytest.mark.router


@pytest.fixture
def router():
    with started_router() as url:
        yield url


@pytest.fixture
def fakes():
    with contextlib.ExitStack() as stack:
        made = [FakeVllm(), FakeVllm()]
        for each in made:
            stack.callback(each.stop)
        yield made


def sampled(engine, n=8):
    return list(engine.generate(PROMPTS, n, SamplingParams(4), seed=0))


def test_rollouts_go_to_the_router_and_checks_to_each_server(router, fakes):
    engine = make(*(each.url for each in fakes), router=router)
    try:
        engine.publish(PARAMS, 0)
        before = [each.seen[GENERATE] for each in fakes]
        assert min(before) > 0
        responses = sampled(engine, 40)
        assert all(r["version"].tolist() == [0] * 4 for r in responses)
        assert sum(each.seen[GENERATE] for each in fakes) == sum(before) + 80
        engine.publish(PARAMS, 1)
        assert {version for r in sampled(engine) for version in r.versions.tolist()} == {1}
    finally:
        engine.close()


def test_the_router_knows_verified_servers_alone(router, fakes):
    """A server that is not verified gets no requests, even if the router knew it before."""
    good, bad = fakes
    engine = make(good.url, bad.url, router=router)
    try:
        engine.publish(PARAMS, 0)
        bad.not_loaded = {"a"}
        engine.publish(PARAMS, 1)
        before = bad.seen[GENERATE]
        assert len(sampled(engine, 40)) == 80
        assert bad.seen[GENERATE] == before
        bad.not_loaded = set()
        engine.publish(PARAMS, 2)
        assert set(engine.fleet.client.opened()) == {good.url, bad.url}
    finally:
        engine.close()
    engine = make(good.url, router=router)
    try:
        engine.publish(PARAMS, 0)
        before = bad.seen[GENERATE]
        assert len(sampled(engine, 40)) == 80
        assert bad.seen[GENERATE] == before
    finally:
        engine.close()


@pytest.mark.parametrize("how", ["ends", "is restarted with other weights"])
def test_responses_of_a_lost_server_are_sampled_again(router, fakes, how):
    good, other = fakes
    limits = ClientLimits(max_attempts=30, backoff_s=0.05, max_backoff_s=0.5, max_outstanding=4)
    engine = make(good.url, other.url, router=router, limits=limits)
    try:
        engine.publish(PARAMS, 0)
        good.delay_s = other.delay_s = 0.02
        places = []
        for response in engine.generate(PROMPTS, 150, SamplingParams(4), seed=0):
            assert response["version"].tolist() == [0] * 4
            places.append((response.prompt_index, response.sample_index))
            if len(places) == 20:
                if how == "ends":
                    other.stop()
                else:
                    other.version = "another"
        assert sorted(places) == [(i, j) for i in range(2) for j in range(150)]
        metrics = engine.fleet.report()
        assert metrics["rollout/server_losses"] >= 1
        if how != "ends":
            assert metrics["rollout/servers_brought_back"] == 1
            assert other.version == engine.files.tag(0)
    finally:
        engine.close()


def test_a_router_that_is_gone_is_waited_for(fakes):
    engine = None
    try:
        with started_router() as url:
            engine = make(fakes[0].url, router=url, server_wait_s=3.0)
            engine.publish(PARAMS, 0)
            assert len(sampled(engine)) == 16
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"no vLLM server came back within 3 s: the router does not take"):
            sampled(engine)
        assert time.monotonic() - began < 30
        with started_router(int(url.rpartition(":")[2])):
            engine.publish(PARAMS, 1)
            assert len(sampled(engine)) == 16
    finally:
        if engine is not None:
            engine.close()


def test_the_key_of_the_servers_goes_through(router, fakes, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    fakes[0].key = key.read_text()
    engine = make(fakes[0].url, router=router, api_key_file=str(key))
    try:
        engine.publish(PARAMS, 0)
        assert len(sampled(engine)) == 16
    finally:
        engine.close()
