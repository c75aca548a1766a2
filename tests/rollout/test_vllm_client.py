"""Tests of the client alone, against a stand-in server."""

import json
import threading

import numpy as np
import pytest
from opened_clients import listed_asks, opened, sampled
from python_calls import count_calls
from quick_backends import quick
from vllm_fake import rollout_reply

from rljax.errors import ServerRefusedError
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import ClientLimits, SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
WIRE = quick()


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_body_leaves_no_default_to_the_server(route):
    request = Request(PROMPT, SamplingParams(7, temperature=0.5, stop_token_ids=(1, 2)), seed=9)
    sampling = WIRE.body(route, request, WIRE.model)["sampling_params"]
    expected = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "temperature": 0.5}
    expected |= {"max_tokens": 7, "ignore_eos": True, "stop_token_ids": [1, 2], "seed": 9}
    assert {name: sampling[name] for name in expected} == expected


@pytest.mark.parametrize("top", [0, 2, 3])
def test_a_reply_is_read_as_pythons_json_reads_it(top):
    """All bits of 2,000 log-probabilities are read. Unknown fields may hold anything.

    vLLM lists the sampled token first, which is the third likeliest here.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**31 - 1, 2000).tolist()
    logprobs = (-np.exp(rng.normal(-1, 2, 2000))).tolist()
    content, tops = [], []
    for i, x in zip(ids, logprobs, strict=True):
        tops.append([((i + 1) % 2**31, x / 4), ((i + 2) % 2**31, x / 2), (i, x)])
        listed = [{"token_id": j, "logprob": y, "rank": 1} for j, y in (tops[-1][2], *tops[-1][:2])]
        content.append({"token_id": i, "logprob": x, "rank": "unread", "top_logprobs": listed if top else []})
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    body = json.dumps({"request_id": "é", "choices": [choice | {"routed_experts": None}]}).encode()
    reply = WIRE.completion(GENERATE, body, Request(PROMPT, SamplingParams(2000, reported=top)))
    assert reply.response.tolist() == ids
    assert reply["rollout_logprobs"].dtype == np.float32
    np.testing.assert_array_equal(reply["rollout_logprobs"], np.array(logprobs, np.float32))
    assert set(reply.columns) == {"rollout_logprobs"} | ({"top_ids", "top_logprobs"} if top else set())
    if top:
        found = zip(reply["top_ids"].tolist(), reply["top_logprobs"].tolist(), strict=True)
        expected = [[(j, np.float32(y)) for j, y in each[:top]] for each in tops]
        assert [[*zip(*row, strict=True)] for row in found] == expected


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


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_a_refusal_is_not_retried(fake, route):
    fake.fail_next, metrics = [400], {}
    with (
        opened(fake.url, backend=WIRE, route=route) as client,
        pytest.raises(ServerRefusedError, match=rf"{route} answered 400: told to fail with 400$"),
    ):
        sampled(client, [Request(PROMPT, SamplingParams(1))], metrics=metrics)
    assert metrics["rollout/requests"] == 1


@pytest.mark.slow
def test_hundreds_of_responses_come_back_as_they_complete(fake):
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

    fake.policy, completed = held, set()
    requests = [Request(np.array([i % 64], np.int32), SamplingParams(8)) for i in range(640)]
    with opened(fake.url, backend=WIRE, route=GENERATE) as client:
        for (i, number), reply in client.stream(lambda: listed_asks(requests)):
            has_come.set()
            completed.add((i, number))
            assert reply.response[0] == i % 64
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
    slow.delay_s, fast.delay_s = 1.0, 0.02
    with opened(slow.url, fast.url, backend=WIRE, limits=ClientLimits(max_outstanding=4), route=GENERATE) as client:
        sampled(client, [Request(PROMPT, SamplingParams(1)) for _ in range(60)])
    assert fast.seen[GENERATE] > 3 * slow.seen[GENERATE] > 0
    assert max(fast.most_running, slow.most_running) <= 4
