"""The endpoint of rljax's plugin in a real server is compared with vLLM's own endpoint for token ids."""

import base64
import json
import urllib.request

import httpx
import numpy as np
import pytest
from opened_clients import listed_asks, opened, probes
from waiting import until

from rljax.errors import ServerRefusedError
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm


def metric(url, name):
    """Returns the sum over all labels of one of the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_it_samples_and_scores_as_vllms_own_endpoint_does(float32, prompts):
    found, scored = [], []
    cut, asked = {"top_k": 6, "top_p": 0.9}, Request(prompts[0], SamplingParams(1), prompt_logprobs=3)
    with float32.published(top_logprobs=6, **cut) as engine:
        for route in (ROLLOUTS, GENERATE):
            engine.fleet.server(float32.url).route = route
            responses = engine.generate(prompts, 3, SamplingParams(24, 0.8, reported=6, **cut), seed=5)
            found.append(sorted(responses, key=lambda r: (r.prompt_index, r.sample_index)))
    for route in (ROLLOUTS, GENERATE):
        with opened(float32.url, route=route) as client:
            scored += [reply.prompt_logprobs for reply in probes(client, [asked])]
    for own, plain in zip(*found, strict=True):
        assert own["version"].tolist() == plain["version"].tolist() == [0] * 24
        np.testing.assert_array_equal(own.response, plain.response)
        np.testing.assert_allclose(own["rollout_logprobs"], plain["rollout_logprobs"], atol=1e-6)
        np.testing.assert_array_equal(own["top_ids"], plain["top_ids"])
        np.testing.assert_allclose(own["top_logprobs"], plain["top_logprobs"], atol=1e-6)
    own, plain = scored
    assert own[0] == plain[0] == {}
    for mine, theirs in zip(own[1:], plain[1:], strict=True):
        assert mine.keys() == theirs.keys()
        np.testing.assert_allclose([mine[token] for token in theirs], list(theirs.values()), atol=1e-6)


PLAIN = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}


def ask(url, token_ids=(3, 4, 5), **settings):
    """Returns the status and the content of the reply to one response."""
    body = [{"token_ids": list(token_ids), "sampling_params": PLAIN | settings}]
    reply = httpx.post(url + ROLLOUTS, json=body, timeout=60)
    number, status, content = reply.text.split(" ", 2)
    assert (reply.status_code, number, reply.content.isascii()) == (200, "0", True)
    return int(status), json.loads(content)


WRONG = {
    "negative id": {"token_ids": [-1]},
    "id of the vocabulary's size": {"token_ids": [3, 256]},
    "large id": {"token_ids": [10**6]},
    "id beyond 64 bits": {"token_ids": [2**70]},
    "seed beyond 64 bits": {"seed": 2**63},
    "large seed": {"seed": 2**70},
    "seed that is a text": {"seed": "1"},
    "bias of no token": {"logit_bias": {"256": 1.0}},
    "bias of a text": {"logit_bias": {"a": 1.0}},
    "large bias": {"logit_bias": {"3": 1e300}},
    "forced token": {"extra_args": {"rljax_tokens": [256]}},
    "unknown key with a line break": {"evil\u2028": 1},
    "stop token that is a text": {"stop_token_ids": ["a"]},
    "tokens that are a number": {"allowed_token_ids": 3},
}


def test_what_would_end_the_engine_is_refused(float32, prompts):
    """Each reply names what is wrong, and the server goes on. A bad request in a batch does not harm the others."""
    assert httpx.get(float32.url + ROLLOUTS).status_code == 405
    assert httpx.post(float32.url + ROLLOUTS, json={"token_ids": [1]}).status_code == 400
    for name, settings in WRONG.items():
        status, content = ask(float32.url, **settings)
        assert status == 400, (name, content)
        assert content["error"]["message"], name
    for settings in ({"seed": -(2**63)}, {"seed": 2**63 - 1}, {"logit_bias": {"7": 100}}, {"token_ids": [255]}):
        status, content = ask(float32.url, **settings)
        assert status == 200, content
    tokens = np.frombuffer(base64.b64decode(ask(float32.url, logit_bias={"7": 100})[1]["token_ids"]), "<i4")
    assert tokens.tolist() == [7, 7]
    empty = httpx.post(float32.url + ROLLOUTS, json=[], timeout=10)
    assert (empty.status_code, empty.content) == (200, b"")
    bad = Request(np.full(600, 7, np.int32), SamplingParams(4))  # longer than the server takes
    good = [Request(prompts[0], SamplingParams(4), seed) for seed in range(3)]
    with opened(float32.url) as client:
        with pytest.raises(ServerRefusedError, match="answered 400: "):
            probes(client, [*good, bad])
        assert [len(reply.response) for reply in probes(client, good)] == [4, 4, 4]
    assert httpx.get(f"{float32.url}/health", timeout=10).status_code == 200


# The server samples 64 requests at a time. One that is slow to notice has not sampled most of them yet.
MANY, LONG = 320, SamplingParams(400)


def test_the_server_gives_up_what_nobody_waits_for(float32, prompts):
    before = metric(float32.url, "generation_tokens_total")
    with opened(float32.url) as client:
        requests = [Request(prompts[0], LONG if seed else SamplingParams(2), seed) for seed in range(MANY)]
        (index, _), first = next(client.stream(lambda: listed_asks(requests)))
        assert len(first.response) == requests[index].sampling.max_response_tokens  # of any batch
    until(lambda: metric(float32.url, "num_requests_running") == 0, 10, every_s=0.02)
    assert 0 < metric(float32.url, "generation_tokens_total") - before < 0.8 * MANY * 400
