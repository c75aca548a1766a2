"""The client alone. Whatever a server answers, a response is sampled again within bounds, or one line ends the run."""

import asyncio
import contextlib
import json
import math
import re
import resource
import threading
import time

import numpy as np
import pytest
from opened_clients import fleet_of, listed_asks, opened, quick, sampled
from python_calls import count_calls
from stopping import StopWhen
from vllm_fake import rollout_reply

from rljax.errors import ServerError, ServerRefusedError
from rljax.rollout.servers import http
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import ClientLimits, SamplingParams

pytestmark = pytest.mark.timeout(60)
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
    """Unknown fields may hold anything. vLLM lists the sampled token first, which is the third likeliest here."""
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
    """The server holds 160 responses until all are under way, and 40 others until a response has come back."""
    are_many, has_come, later = threading.Event(), threading.Event(), []

    def held(prompt, sampling):
        if not are_many.is_set():
            if fake.running >= 160:
                are_many.set()
            are_many.wait(60)
        else:
            later.append(has_come.wait(60))
        return [prompt[-1]] * 8, [-1.0] * 8

    fake.policy, completed = held, set()
    requests = [Request(np.array([i % 64], np.int32), SamplingParams(8)) for i in range(200)]
    with opened(fake.url, backend=WIRE, route=GENERATE, limits=ClientLimits(max_outstanding=160)) as client:
        for (i, number), reply in client.stream(lambda: listed_asks(requests)):
            has_come.set()
            completed.add((i, number))
            assert reply.response[0] == i % 64
    assert completed == {(i, 0) for i in range(200)}
    assert len(later) >= 40
    assert all(later)
    assert fake.most_running == 160 < ClientLimits().max_outstanding == 512


def test_a_group_stays_at_one_server(another):
    """At first servers refuse requests, and one is gone. Then they have few places, and only a last group splits."""
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


REQUEST = Request(np.array([3, 4, 5], np.int32), SamplingParams(3, stop_token_ids=(50,)))
QUICK = quick(attempts=3, wait_s=0.001)


def opened_at(*urls, backend=QUICK, **settings):
    return opened(*urls, version="default", backend=backend, route=GENERATE, **settings)


def tokens(*ids, finish="length", second=-1.0):
    """Returns a choice of these tokens, with the log-probability of the second one."""
    pairs = [(number, second if place == 1 else -1.0) for place, number in enumerate(ids)]
    content = [{"token_id": number, "logprob": logprob, "top_logprobs": []} for number, logprob in pairs]
    return {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}} | spans((0, len(ids)))


def spans(*ends):
    return {"weight_versions": [{"version": "default", "start": start, "end": end} for start, end in ends]}


BAD = {
    "text": (tokens(5, 6, 7, second="-1"), "Expected `float`, got `str` - at `$.choices[0].logprobs.content[1]."),
    "NaN": (tokens(5, 6, 7, second=math.nan), "JSON is malformed"),
    "beyond float32": (tokens(5, 6, 7, second=-1e300), "gave a log-probability of -inf"),
    "NaN as vLLM writes it": (tokens(5, 6, 7, second=-9999.0), "gave a log-probability of -9999.0"),
    "positive": (tokens(5, 6, 7, second=0.01), "gives logits"),
    "no log-probabilities": ({"logprobs": None}, "gave 3 tokens and log-probabilities of 0"),
    "a field less": ({"logprobs": {"content": [{"logprob": -1.0}]}}, "required field `token_id`"),
    "fraction of a token": (tokens(5.0, 6, 7), "Expected `int`, got `float`"),
    "huge token": (tokens(2**40, 6, 7), "OverflowError"),
    "token beyond": (tokens(5, 6, 64), "gave token ids from 5 to 64, outside the vocabulary"),
    "no tokens": (tokens(), "gave 0 tokens and 0 log-probabilities, asked for 1 to 3"),
    "too many": (tokens(5, 6, 7, 8), "gave 4 tokens and 4 log-probabilities, asked for 1 to 3"),
    "cut short": (tokens(5, 6), "ended a response at 2 tokens, its limit was 3"),
    "stopped at nothing": (tokens(5, 6, finish="stop"), "not at its first stop token"),
    "went on after its end": (tokens(5, 50, 7), "not at its first stop token"),
    "counts differ": ({"token_ids": [5, 6, 7, 8]}, "gave 4 tokens and log-probabilities of 3 others"),
    "given up": ({"finish_reason": None}, "ended a response with 'None'"),
    "gap": (spans((0, 1), (2, 3)), "gave weight versions of other tokens"),
    "overlap": (spans((0, 2), (1, 3)), "gave weight versions of other tokens"),
    "spans of text": ({"weight_versions": "abc"}, "Expected `array | null`, got `str`"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_reply_is_sampled_again_and_then_ends_in_one_line(fake, change, said):
    plain, bad, metrics = fake.answer, [2], {}

    def answer(method, path, body):
        status, reply = plain(method, path, body)
        if path == GENERATE and bad[0]:
            bad[0] -= 1
            reply = {"choices": [reply["choices"][0] | change]}
        return status, reply

    fake.answer = answer
    with opened_at(fake.url) as client:
        ((_, reply),) = sampled(client, [REQUEST], 64, metrics)
        assert reply.response.tolist() == [5, 6, 7]
        assert (metrics, client.report()["rollout/server_losses"]) == ({"rollout/requests": 3, "rollout/retries": 2}, 0)
        bad[0] = 99
        line = rf"^response 0 failed 3 times; the last: {fake.url}.*{re.escape(said)}.*$"
        with pytest.raises(ServerError, match=line):
            sampled(client, [REQUEST], 64)


COMPLETE = '{"token_ids": [5], "finish_reason": "length", "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}'
BODIES = [b"", b"null", b'"x"', b"[[[" * 50_000, b'{"choices": [{"tok', b'{"choices": []}', b'{"choices": 3}', b"\xff"]
BODIES.append(f'{{"choices": [{COMPLETE}, {COMPLETE}]}}'.encode())


def test_whatever_bytes_come_back(fake):
    with opened_at(fake.url) as client:
        for body in BODIES:
            fake.answer = lambda *call, body=body: (200, iter([body]))
            with pytest.raises(ServerError, match=r"^response 0 failed 3 times; the last: http.*$"):
                sampled(client, [REQUEST], 64)


def test_an_error_that_nobody_thought_of_is_one_line(fake, monkeypatch):
    monkeypatch.setattr(VllmBackend, "completion", lambda *_: 1 // 0)
    with opened_at(fake.url) as client, pytest.raises(ServerError, match=r"^response 0 from http.* failed: ZeroDiv.*$"):
        sampled(client, [REQUEST], 64)


def test_an_exchange_has_a_deadline_though_bytes_keep_coming(fake):
    """Each read is quick, so httpx's own timeouts never end the exchange."""

    def drip():
        for _ in range(1000):
            time.sleep(0.1)
            yield b" "

    fake.answer = lambda method, path, body: (200, drip() if path == GENERATE else {})
    limits = ClientLimits(request_timeout_s=0.5)
    with opened_at(fake.url, limits=limits, backend=quick(attempts=1)) as client:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"within 0\.5 s: TimeoutError"):
            sampled(client, [REQUEST], 64)
        assert time.monotonic() - began < 5


def test_a_server_is_looked_after_while_another_answers(fake):
    """Replies come all the time, and the run is still asked at its interval whether it gives them up."""
    fake.delay_s, asked = 0.05, []
    stop = StopWhen(gives_up=lambda: asked.append(1))
    with contextlib.closing(
        fleet_of(fake.url, backend=QUICK, limits=ClientLimits(max_outstanding=1), stop=stop)
    ) as fleet:
        fleet.on_loop(fleet.servers[0].open, None)
        assert len(sampled(fleet, [REQUEST] * 30, 64)) == 30
    assert len(asked) >= 4


def test_a_client_whose_thread_has_ended_says_so(fake, monkeypatch):
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    with opened_at(fake.url) as client:
        fake.delay_s = 5.0
        threading.Timer(0.5, lambda: loop.call_soon_threadsafe(loop.stop)).start()
        with pytest.raises(ServerError, match="the event loop of the HTTP client has ended"):
            sampled(client, [REQUEST], 64)


def test_what_is_no_list_of_urls_is_refused():
    cases = [(["127.0.0.1:8000"], "such as http://host:port"), (["http://a:b"], "such as http://host:port")]
    cases += [(["http://a:1", "http://a:1/"], "urls must be distinct"), ([], "at least one server is needed")]
    for urls, said in [*cases, (["http://me:secret-word@a:1"], "URL of a holds a user or a password")]:
        with pytest.raises(ValueError, match=said) as refused:
            fleet_of(*urls)
        assert "secret-word" not in str(refused.value)


def test_fewer_requests_go_out_where_files_are_few(monkeypatch, caplog, another):
    """The soft limit is raised as far as the hard one allows."""
    now, more = {}, 1024 + 4096
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: now.update(limits=limits))
    rows = [(1024, 8192, 1024, more), (1024, resource.RLIM_INFINITY, 1024, more)]
    for soft, hard, room, then in [*rows, (1024, 1024, 512, 1024), (64, 64, 1, 64)]:
        now["limits"] = soft, hard
        assert http.room_for(1024) == room
        assert now["limits"] == (then, hard)
    now["limits"] = 536, 536  # room for 24 connections
    servers = [another(), another()]
    caplog.clear()
    with opened_at(*(server.url for server in servers)) as client:
        for server in servers:
            server.delay_s = 0.2
        assert len(sampled(client, [REQUEST] * 60, 64)) == 60
    assert all(server.most_running == 12 for server in servers)
    assert caplog.text.count("at most 12 requests at a time go to each server, not 512") == 1
