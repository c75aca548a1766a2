"""Whatever a server answers, the response is sampled again within bounds, or one line ends the run. Nothing hangs."""

import asyncio
import contextlib
import copy
import math
import resource
import threading
import time

import numpy as np
import pytest
from opened_clients import fleet_of, quick
from opened_clients import opened as opened_at
from opened_clients import sampled as sampled_from
from stopping import StopWhen

from rljax.errors import ServerError
from rljax.rollout.servers import http
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.types import ClientLimits, SamplingParams

pytestmark = pytest.mark.timeout(60)
REQUEST = Request(np.array([3, 4, 5], np.int32), SamplingParams(3, stop_token_ids=(50,)))
QUICK = quick(attempts=3, wait_s=0.001)


def opened(*urls, limits=None, backend=QUICK):
    return opened_at(*urls, limits=limits, version="default", backend=backend, route=GENERATE)


def sampled(client, requests, metrics=None):
    return sampled_from(client, requests, 64, metrics)


def logprob(value):
    return lambda choice: choice["logprobs"]["content"][1].update(logprob=value)


def tokens(*ids, finish="length"):
    def change(choice):
        content = [{"token_id": i, "logprob": -1.0, "top_logprobs": []} for i in ids]
        spans = [{"version": "default", "start": 0, "end": len(ids)}]
        choice.update(token_ids=list(ids), finish_reason=finish, logprobs={"content": content}, weight_versions=spans)

    return change


def spans(*given):
    named = [dict(zip(("version", "start", "end"), span, strict=True)) for span in given]
    return lambda choice: choice.update(weight_versions=named)


BAD = {
    "text": (logprob("-1.0"), "Expected `float`, got `str` - at `$.choices[0].logprobs.content[1].logprob`"),
    "none": (logprob(None), "Expected `float`, got `null`"),
    "NaN": (logprob(math.nan), "JSON is malformed"),
    "infinity": (logprob(math.inf), "JSON is malformed"),
    "minus infinity": (logprob(-math.inf), "JSON is malformed"),
    "beyond float32": (logprob(-1e300), "gave a log-probability of -inf"),
    "NaN as vLLM writes it": (logprob(-9999.0), "gave a log-probability of -9999.0"),
    "positive": (logprob(0.01), "gives logits"),
    "boolean": (logprob(True), "Expected `float`, got `bool`"),
    "no log-probabilities": (lambda choice: choice.update(logprobs=None), "gave 3 tokens and log-probabilities of 0"),
    "a field less": (lambda choice: choice["logprobs"]["content"][0].pop("token_id"), "required field `token_id`"),
    "fraction of a token": (tokens(5.0, 6, 7), "Expected `int`, got `float`"),
    "token as text": (tokens("5", 6, 7), "Expected `int`, got `str`"),
    "huge token": (tokens(2**40, 6, 7), "OverflowError"),
    "negative token": (tokens(-1, 6, 7), "gave token ids from -1 to 7, outside the vocabulary"),
    "token beyond": (tokens(5, 6, 64), "gave token ids from 5 to 64, outside the vocabulary"),
    "no tokens": (tokens(), "gave 0 tokens and 0 log-probabilities, asked for 1 to 3"),
    "too many": (tokens(5, 6, 7, 8), "gave 4 tokens and 4 log-probabilities, asked for 1 to 3"),
    "cut short": (tokens(5, 6), "ended a response at 2 tokens, its limit was 3"),
    "stopped at nothing": (tokens(5, 6, finish="stop"), "not at its first stop token"),
    "went on after its end": (tokens(5, 50, 7), "not at its first stop token"),
    "counts differ": (lambda choice: choice["token_ids"].append(8), "gave 4 tokens and log-probabilities of 3 others"),
    "given up": (lambda choice: choice.update(finish_reason=None), "ended a response with 'None'"),
    "gap": (spans(("default", 0, 1), ("default", 2, 3)), "gave weight versions of other tokens"),
    "too short a span": (spans(("default", 0, 2)), "gave weight versions of other tokens"),
    "overlap": (spans(("default", 0, 2), ("default", 1, 3)), "gave weight versions of other tokens"),
    "spans of text": (lambda choice: choice.update(weight_versions="abc"), "Expected `array | null`, got `str`"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_reply_is_sampled_again_and_then_ends_in_one_line(fake, change, said):
    plain, bad = fake.answer, [2]

    def answer(method, path, body):
        status, reply = plain(method, path, body)
        if path == GENERATE and bad[0]:
            bad[0] -= 1
            reply = copy.deepcopy(reply)
            change(reply["choices"][0])
        return status, reply

    fake.answer = answer
    with opened(fake.url) as client:
        metrics = {}
        ((_, reply),) = sampled(client, [REQUEST], metrics=metrics)
        assert reply.response.tolist() == [5, 6, 7]
        assert (metrics, client.report()["rollout/server_losses"]) == ({"rollout/requests": 3, "rollout/retries": 2}, 0)
        bad[0] = 99
        with pytest.raises(ServerError) as ended:
            sampled(client, [REQUEST])
    line = str(ended.value)
    assert line.startswith(f"response 0 failed 3 times; the last: {fake.url}")
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"[[[" * 50_000,
        b'{"choices": [{"tok',
        b'{"choices": []}',
        b'{"choices": 3}',
        b"\xff",
    ],
)
def test_whatever_bytes_come_back(fake, body):
    fake.answer = lambda *call: (200, iter([body]))
    with opened(fake.url) as client:
        with pytest.raises(ServerError, match="response 0 failed 3 times; the last: http") as ended:
            sampled(client, [REQUEST])
        assert "\n" not in str(ended.value)


def test_two_choices_for_one_request_are_none(fake):
    with opened(fake.url) as client:
        plain = fake.answer
        fake.answer = lambda *call: (200, {"choices": 2 * plain(*call)[1].get("choices", [])})
        with pytest.raises(ServerError, match="too many values to unpack"):
            sampled(client, [REQUEST])


def test_an_error_that_nobody_thought_of_is_one_line(fake, monkeypatch):
    monkeypatch.setattr(VllmBackend, "completion", lambda *_: 1 // 0)
    with (
        opened(fake.url) as client,
        pytest.raises(ServerError, match=r"response 0 from http.* failed: ZeroDivisionError"),
    ):
        sampled(client, [REQUEST])


def test_an_exchange_has_a_deadline_though_bytes_keep_coming(fake):
    """Each read is quick, so httpx's own timeouts never end the exchange."""

    def drip():
        for _ in range(1000):
            time.sleep(0.1)
            yield b" "

    fake.answer = lambda method, path, body: (200, drip() if path == GENERATE else {})
    limits = ClientLimits(request_timeout_s=0.5)
    with opened(fake.url, limits=limits, backend=quick(attempts=1)) as client:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"within 0\.5 s: TimeoutError"):
            sampled(client, [REQUEST])
        assert time.monotonic() - began < 5


def test_a_server_is_looked_after_while_another_answers(fake):
    """Replies come all the time, and the run is still asked at its interval whether it gives them up."""
    fake.delay_s, asked = 0.05, []
    stop = StopWhen(gives_up=lambda: asked.append(1))
    with contextlib.closing(
        fleet_of(fake.url, backend=QUICK, limits=ClientLimits(max_outstanding=1), stop=stop)
    ) as fleet:
        fleet.on_loop(fleet.servers[0].open, None)
        assert len(sampled(fleet, [REQUEST] * 30)) == 30
    assert len(asked) >= 4


def test_a_client_whose_thread_has_ended_says_so(fake, monkeypatch):
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    with opened(fake.url) as client:
        fake.delay_s = 5.0
        threading.Timer(0.5, lambda: loop.call_soon_threadsafe(loop.stop)).start()
        with pytest.raises(ServerError, match="the event loop of the HTTP client has ended"):
            sampled(client, [REQUEST])


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["127.0.0.1:8000"], "such as http://host:port"),
        (["http://"], "such as http://host:port"),
        (["http://a:b"], "such as http://host:port"),
        (["http://me:secret-word@a:1"], "URL of a holds a user or a password"),
        (["http://a:1", "http://a:1/"], "urls must be distinct"),
        ([], "at least one server is needed"),
    ],
)
def test_what_is_no_list_of_urls_is_refused(urls, said):
    with pytest.raises(ValueError, match=said) as refused:
        fleet_of(*urls)
    assert "secret-word" not in str(refused.value)


class TestDescriptors:
    @pytest.fixture
    def limit(self, monkeypatch):
        """Returns a function that sets the limits the process seems to have."""
        state = {}

        def make(soft, hard):
            state["now"] = soft, hard
            monkeypatch.setattr(resource, "getrlimit", lambda which: state["now"])
            monkeypatch.setattr(resource, "setrlimit", lambda which, limits: state.update(now=limits))
            return state

        return make

    @pytest.mark.parametrize(
        ("soft", "hard", "room", "then"),
        [
            (1024, 8192, 1024, 1024 + 4096),
            (1024, resource.RLIM_INFINITY, 1024, 1024 + 4096),
            (1024, 1024, 1024 - 512, 1024),
            (4096, 4096, 1024, 4096),
            (64, 64, 1, 64),
        ],
    )
    def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(self, limit, soft, hard, room, then):
        state = limit(soft, hard)
        assert http.room_for(1024) == room
        assert state["now"] == (then, hard)

    def test_fewer_requests_go_out_where_it_cannot_be_raised(self, limit, caplog, another):
        limit(536, 536)  # room for 24 connections
        servers = [another(), another()]
        with opened(*(server.url for server in servers)) as client:
            for server in servers:
                server.delay_s = 0.2
            assert len(sampled(client, [REQUEST] * 60)) == 60
        assert all(server.most_running == 12 for server in servers)
        assert caplog.text.count("at most 12 requests at a time go to each server, not 512") == 1
