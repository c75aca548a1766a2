"""Tests of the client alone, against a stand-in server."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from opened_clients import listed_asks, opened, probes, quick, sampled
from python_calls import count_calls
from vllm_fake import rollout_reply
from waiting import until

from rljax.errors import ServerRefusedError
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import ClientLimits, SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
WIRE = quick()


@pytest.fixture
def client(fake):
    with opened(fake.url, backend=WIRE, route=GENERATE) as made:
        yield made
    made.close()


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_both_routes_carry_tokens_and_logprobs(fake, client, route):
    client.servers[0].route = route
    ((place, reply),) = sampled(client, [Request(PROMPT, SamplingParams(3), seed=1)])
    assert place == (0, 0)
    assert reply.response.tolist() == [5, 6, 7]
    assert reply.response.dtype == np.int32
    assert reply["rollout_logprobs"].tolist() == [-1.0, -1.0, -1.0]
    assert reply.spans == (("default", 0, 3),)


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_prompt_logprobs_come_only_when_asked_for(fake, client, route):
    client.servers[0].route = route
    asked, not_asked = probes(client, [Request(PROMPT, SamplingParams(1), prompt_logprobs=ask) for ask in (0, None)])
    assert asked.prompt_logprobs == ({}, {4: -0.125}, {5: -0.25})
    assert not_asked.prompt_logprobs == ()


def test_a_server_may_call_its_model_otherwise(fake, client):
    fake.model = "org/name"
    with pytest.raises(ServerRefusedError, match="no model policy"):
        probes(client, [Request(PROMPT, SamplingParams(1))])
    client.servers[0].model = "org/name"
    (reply,) = probes(client, [Request(PROMPT, SamplingParams(1))])
    assert reply.response.tolist() == [5]


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_body_leaves_no_default_to_the_server(route):
    sent = WIRE.body(
        route, Request(PROMPT, SamplingParams(7, temperature=0.5, stop_token_ids=(1, 2)), seed=9), WIRE.model
    )
    sampling = sent["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["repetition_penalty"]) == (1, 0, 0, 1)
    assert sampling["max_tokens"] == 7
    assert sampling["ignore_eos"] is True
    assert sampling["stop_token_ids"] == [1, 2]
    assert sampling["seed"] == 9


@pytest.mark.parametrize("top", [0, 2, 3])
def test_a_reply_is_read_as_pythons_json_reads_it(top):
    """All bits of 2,000 log-probabilities are read. Unknown fields may hold anything.

    vLLM lists the sampled token first, which is the third likeliest here.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**31 - 1, 2000).tolist()
    logprobs = (-np.exp(rng.normal(-1, 2, 2000))).tolist()
    pairs = zip(ids, logprobs, strict=True)
    tops = [[((i + 1) % 2**31, x / 4), ((i + 2) % 2**31, x / 2), (i, x)] for i, x in pairs]
    listed = [[{"token_id": i, "logprob": x, "rank": 1} for i, x in (each[2], *each[:2])] for each in tops]
    content = [
        {"token_id": i, "logprob": x, "rank": "unread", "top_logprobs": each if top else []}
        for i, x, each in zip(ids, logprobs, listed, strict=True)
    ]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    choice["routed_experts"] = None
    request = Request(PROMPT, SamplingParams(2000, reported=top))
    reply = WIRE.completion(GENERATE, json.dumps({"request_id": "é", "choices": [choice]}).encode(), request)
    assert reply.response.tolist() == ids
    np.testing.assert_array_equal(reply["rollout_logprobs"], np.array(logprobs, np.float32))
    assert reply["rollout_logprobs"].dtype == np.float32
    if not top:
        assert set(reply.columns) == {"rollout_logprobs"}
        return
    assert reply["top_ids"].tolist() == [[i for i, _ in each[:top]] for each in tops]
    values = [[x for _, x in each[:top]] for each in tops]
    np.testing.assert_array_equal(reply["top_logprobs"], np.array(values, np.float32))


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_no_python_runs_for_each_token_of_a_reply(route, k):
    """The interpreter makes as many calls for 3,000 tokens as for 3. So only compiled code holds up the event loop."""

    def calls(count):
        ids = list(range(count))
        top = [
            {"token_id": i, "logprob": x, "rank": 1} for i, x in ((count, -0.7), (count + 1, -2.0), (count + 2, -3.0))
        ]
        content = [{"token_id": i, "logprob": -5.0, "rank": 9, "top_logprobs": top} for i in ids]
        choice = {"token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}}
        whole = {"choices": [choice]} if route != ROLLOUTS else rollout_reply({"choices": [choice]}, PROMPT)
        reply, request = json.dumps(whole).encode(), Request(PROMPT, SamplingParams(count, reported=k))
        return count_calls(lambda: check_completion("", WIRE.completion(route, reply, request), request, None))

    assert calls(3) == calls(3000)


def test_server_errors_are_retried_and_counted(fake, client):
    fake.fail_next, metrics = [500, 429, 503], {}
    assert len(sampled(client, [Request(PROMPT, SamplingParams(1))], metrics=metrics)) == 1
    assert metrics == {"rollout/requests": 4, "rollout/retries": 3}
    assert client.report()["rollout/server_losses"] == 0


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_a_refusal_is_not_retried(fake, client, route):
    client.servers[0].route = route
    fake.fail_next, metrics = [400], {}
    with pytest.raises(ServerRefusedError, match=rf"{route} answered 400: told to fail with 400$"):
        sampled(client, [Request(PROMPT, SamplingParams(1))], metrics=metrics)
    assert metrics["rollout/requests"] == 1


@pytest.mark.slow
def test_hundreds_of_responses_come_back_as_they_complete(fake, client):
    """There are 640 responses. At most 512 are under way at once, as max_outstanding allows, and none times out.

    The server holds the first 512 until all of them are under way, and the others until a response has come back.
    """
    are_many, has_come, later = threading.Event(), threading.Event(), []

    def held(prompt, sampling):
        if not are_many.is_set():
            if fake.running >= 512:
                are_many.set()
            are_many.wait(60)
        else:
            later.append(has_come.wait(60))
        return [prompt[-1]] * 8, [-1.0] * 8

    fake.policy = held
    requests = [Request(np.array([i % 64], np.int32), SamplingParams(8)) for i in range(640)]
    completed = set()
    for item in client.stream(lambda: listed_asks(requests)):
        has_come.set()
        completed.add(item[0])
        assert item[1].response[0] == item[0][0] % 64
    assert completed == {(i, 0) for i in range(640)}
    assert len(later) >= 128
    assert all(later)
    assert fake.most_running == 512


def test_a_group_stays_at_one_server(another):
    """Twelve groups of six meet two servers, which refuse some requests at first, and one that is gone.

    Then they wait for three places each. Only the last group of a server may end at the other one, which has nothing
    else to do.
    """
    fakes, gone = [another(), another()], another()
    gone.stop()
    requests = [Request(np.array([i], np.int32), SamplingParams(1)) for i in range(12) for _ in range(6)]
    for limit, most_split in ((512, 0), (3, 2)):
        for fake in fakes:
            fake.fail_next, fake.delay_s = [500, 500], 0.01
            fake.asked.clear()
        urls = [fake.url for fake in (*fakes, gone)][: 2 + (limit == 512)]
        with opened(*urls, backend=WIRE, limits=ClientLimits(max_outstanding=limit)) as client:
            assert len(sampled(client, requests, group_size=6)) == 72
        homes = [{prompt[0] for prompt, _, _ in fake.asked} for fake in fakes]
        assert len(homes[0] & homes[1]) <= most_split
        assert min(map(len, homes)) >= 4


def test_the_idler_server_samples_more(another):
    slow, fast = another(), another()
    slow.delay_s, fast.delay_s = 2.0, 0.02
    limits = ClientLimits(max_outstanding=4)
    with opened(slow.url, fast.url, backend=WIRE, limits=limits, route=GENERATE) as client:
        sampled(client, [Request(PROMPT, SamplingParams(1)) for _ in range(80)])
    assert fast.seen[GENERATE] > 3 * slow.seen[GENERATE] > 0
    assert max(fast.most_running, slow.most_running) <= 4


def test_replies_of_other_weights_are_not_handed_on(fake):
    with opened(fake.url, backend=WIRE, route=GENERATE, version="run.1") as client, ThreadPoolExecutor() as threads:
        sampling = threads.submit(sampled, client, [Request(PROMPT, SamplingParams(1))])
        until(client.down)
        assert "samples from weights 'default'" in client.down()[fake.url]
        fake.version = "run.1"
        client.on_loop(client.servers[0].open, "run.1")
        ((_, reply),) = sampling.result()
        assert reply.spans == (("run.1", 0, 1),)
