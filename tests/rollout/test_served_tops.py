"""Likeliest tokens and routes of responses: the requests to servers, and the replies that are read or refused."""

import base64
import io
import json
import math
import pickle
import re

import numpy as np
import pytest
from records import completion
from served_engines import PROMPTS, published

from rljax.errors import ReplyError
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.replies import check_completion, check_tops, make_completion, make_tops, without_ties
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import RolloutConfig, SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
NONE = -math.inf
HALF, QUARTER, EIGHTH = -math.log(2), -math.log(4), -math.log(8)


def array_tops(*rows):
    """Returns the arrays of rows of (token, log-probability) pairs."""
    return {
        "top_ids": np.array([[token for token, _ in row] for row in rows], np.int32),
        "top_logprobs": np.array([[value for _, value in row] for row in rows], np.float32),
    }


def made(*rows, k):
    """Calls ``make_tops`` with (token, log-probability) pairs by position."""
    flat = [pair for row in rows for pair in row]
    return make_tops(map(len, rows), [token for token, _ in flat], [value for _, value in flat], k)


def pairs(tops):
    lists = (tops["top_ids"].tolist(), tops["top_logprobs"].tolist())
    return [list(zip(*row, strict=True)) for row in zip(*lists, strict=True)]


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ([(9, -4.0), (1, -0.5), (2, -1.5)], [(1, -0.5), (2, -1.5)]),  # vLLM lists the sampled token first
        ([(2, -1.5), (1, -0.5), (7, -3.0)], [(1, -0.5), (2, -1.5)]),
        ([(2, -1.5), (1, -0.5), (2, -1.5), (7, -3.0)], [(1, -0.5), (2, -1.5)]),  # it may be there twice
        ([(9, -1.5), (1, -0.5), (2, -1.5)], [(1, -0.5), (9, -1.5)]),  # it is kept if it ties with the last one
        # A token that could not be sampled becomes id -1. So does a missing token.
        ([(1, 0.0), (2, -9999.0), (3, -3.4028234663852886e38)], [(1, 0.0), (-1, NONE)]),
        ([(1, 0.0)], [(1, 0.0), (-1, NONE)]),
        ([], [(-1, NONE), (-1, NONE)]),
    ],
)
def test_the_likeliest_of_what_a_server_lists(row, kept):
    tops = made([(5, -0.25), (6, -2.0), (8, -3.0)], row, k=2)
    assert pairs(tops) == [[(5, -0.25), (6, -2.0)], kept]
    assert (tops["top_ids"].dtype, tops["top_logprobs"].dtype) == (np.int32, np.float32)
    assert made(k=3)["top_ids"].shape == made(k=3)["top_logprobs"].shape == (0, 3)


def test_one_token_more_is_asked_for_if_there_is_one():
    """In the reply of rljax's endpoint, unlike vLLM's, the sampled token comes beside the k likeliest."""
    for k, vocab_size, asked in ((0, 64, 0), (5, 64, 6), (5, None, 6), (63, 64, 64), (64, 64, 64)):
        request = Request(PROMPT, SamplingParams(2, reported=k), vocab_size=vocab_size)
        for route, wanted in ((GENERATE, asked), (ROLLOUTS, k)):
            assert VllmBackend().body(route, request, "policy")["sampling_params"]["logprobs"] == wanted


PLAIN = SamplingParams(2, reported=2)
CUT = SamplingParams(2, reported=2, top_k=2)
SOUND = array_tops([(1, HALF), (2, QUARTER)], [(1, HALF), (2, QUARTER)])
WHOLE = array_tops([(1, HALF), (2, HALF)], [(1, 0.0), (-1, NONE)])


def test_sound_likeliest_tokens_pass():
    """Likeliest tokens of fewer positions do not."""
    rounded = [HALF, QUARTER + 5e-4]
    plain = [(SOUND, [1, 2], [HALF, QUARTER]), (SOUND, [1, 7], [HALF, EIGHTH]), (SOUND, [1, 7], rounded)]
    for sampling, cases in ((PLAIN, [*plain, (WHOLE, [1, 1], [HALF, 0.0])]), (CUT, [(WHOLE, [2, 1], [HALF, 0.0])])):
        for tops, tokens, logprobs in cases:
            check_tops("u", completion(tokens, logprobs, **tops), sampling, 8)
    arrays = {"rollout_logprobs": np.float32([HALF, HALF]), **made([(1, HALF), (2, HALF)], k=2)}
    with pytest.raises(ReplyError, match=r"/generate gave likeliest tokens of shape \(1, 2\), expected \(2, 2\)"):
        make_completion("/generate", Request(PROMPT[:0], PLAIN), np.int32([1, 2]), arrays, are_others=False)


@pytest.mark.parametrize(
    ("sampling", "tops", "tokens", "logprobs", "said"),
    [
        (PLAIN, {}, [1, 2], [HALF, QUARTER], "shape None, expected (2, 2)"),
        (SamplingParams(2, reported=3), SOUND, [1, 2], [HALF, QUARTER], "expected (2, 3)"),
        (PLAIN, array_tops([(8, HALF), (2, QUARTER)]), [2], [QUARTER], "from 2 to 8, outside the vocabulary"),
        (PLAIN, array_tops([(-2, HALF), (2, QUARTER)]), [2], [QUARTER], "from -2 to 2, outside the vocabulary"),
        (PLAIN, array_tops([(1, QUARTER), (2, HALF)]), [2], [HALF], "not in order"),
        (PLAIN, array_tops([(1, HALF), (2, NONE)]), [1], [HALF], "not finite"),
        (PLAIN, array_tops([(1, HALF), (-1, QUARTER)]), [1], [HALF], "not finite"),
        (PLAIN, array_tops([(1, -0.1), (2, -0.2)]), [1], [-0.1], "sum to 1.7236, expected at most 1"),
        (PLAIN, SOUND, [1, 2], [HALF, QUARTER + 0.01], "0.01 nats from their likeliest tokens'"),
        (PLAIN, SOUND, [1, 7], [HALF, HALF], "0.693 nats from their likeliest tokens'"),
        (PLAIN, array_tops([(1, HALF), (-1, NONE)]), [1], [HALF], "gave 1 likeliest tokens at a position, expected 2"),
        (CUT, SOUND, [1, 2], [HALF, QUARTER], "have probability 0.7500, expected 1 with rollout.top_k"),
        (CUT, array_tops([(1, HALF), (2, HALF)]), [3], [-20.0], "did not report all tokens"),
    ],
)
def test_likeliest_tokens_that_cannot_be_are_refused(sampling, tops, tokens, logprobs, said):
    with pytest.raises(ReplyError, match=rf"^u .*{re.escape(said)}.*$"):
        check_tops("u", completion(tokens, logprobs, **tops), sampling, 8)


def test_a_token_that_ties_with_the_last_one_is_left_out():
    """The probabilities are 0.4, 0.3 and 0.3 with ``top_k`` 2: a server may sample all three, and two are reported.

    In the second reply a probability of 0.2 is missing, 0.8 tokens of 0.25. Ties would be a whole number of tokens.
    """
    tied = array_tops([(1, math.log(0.4)), (2, math.log(0.3))], [(1, HALF), (2, HALF)])
    reply = without_ties(completion([2, 1], [math.log(0.3), HALF], **tied))
    np.testing.assert_allclose(np.exp(reply["top_logprobs"]), [[4 / 7, 3 / 7], [0.5, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(reply["rollout_logprobs"]), [3 / 7, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(reply["top_ids"], tied["top_ids"])
    check_tops("u", reply, CUT, 8)
    uncut = completion([1], [math.log(0.55)], **array_tops([(1, math.log(0.55)), (2, math.log(0.25))]))
    assert without_ties(uncut) is uncut
    with pytest.raises(ReplyError, match=r"have probability 0\.8000, expected 1"):
        check_tops("u", uncut, CUT, 8)


def of_token(token):
    """Returns vLLM's list of likeliest tokens for the stand-in's token, which is second likeliest at -1."""
    rest = 1.0 - math.exp(-1.0)
    return [(token, -1.0), ((token + 1) % 64, math.log(0.8 * rest)), ((token + 2) % 64, math.log(0.2 * rest))]


@pytest.mark.parametrize(("better", "asked"), [((), 2), ((ROLLOUTS,), 3)])
def test_an_engine_hands_on_the_likeliest_tokens(fake, better, asked):
    """The server lacks the ``better`` routes. Only rljax's own route is asked for no further token."""
    fake.tops = of_token
    fake.routes -= {*better}
    with published(fake.url, top_logprobs=2) as engine:
        probes = len(fake.sampling)
        responses = list(engine.generate(PROMPTS, 2, SamplingParams(5, reported=2), seed=0))
    assert {sampling["logprobs"] for sampling in fake.sampling[probes:]} == {asked}
    logprobs = [[math.log(0.8 * (1 - math.exp(-1))), -1.0]] * 5
    for response in responses:
        tokens = response.response
        np.testing.assert_array_equal(response["top_ids"], np.stack([(tokens + 1) % 64, tokens], 1))
        np.testing.assert_allclose(response["top_logprobs"], logprobs, rtol=1e-6)


def test_probes_are_of_the_whole_distribution(fake):
    fake.tops = of_token
    cut = {"top_k": 3, "top_p": 0.99, "min_p": 0.01}
    with published(fake.url, **cut) as engine:
        probes = len(fake.sampling)
        (response,) = engine.generate(PROMPTS[:1], 1, SamplingParams(5, **cut, reported=3), seed=0)
    shapes = [{name: sampling[name] for name in cut} for sampling in fake.sampling]
    assert all(shape == {"top_k": 0, "top_p": 1.0, "min_p": 0.0} for shape in shapes[:probes])
    assert shapes[probes:] == [cut]
    np.testing.assert_allclose(np.exp(response["top_logprobs"]).sum(1), 1.0, rtol=1e-6)


LAYERS, K, EXPERTS = 3, 2, 8
ROUTED = Request(PROMPT, SamplingParams(4), routes=(LAYERS, K, EXPERTS))
ROUTES = np.random.default_rng(0).integers(0, EXPERTS, (6, LAYERS, K)).astype(np.uint8)


def encoded(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


def read(routes, request=ROUTED):
    content = [{"token_id": 7, "logprob": -1.0, "top_logprobs": []}] * 4
    choice = {"index": 0, "token_ids": [7] * 4, "finish_reason": "length", "logprobs": {"content": content}}
    choice |= {} if routes is None else {"routed_experts": routes}
    completion = VllmBackend().completion(GENERATE, json.dumps({"choices": [choice]}).encode(), request)
    check_completion("http://server", completion, request, 64)
    return completion


def test_the_experts_of_every_token_but_the_last_are_read():
    """Routes that nobody asked for are left alone."""
    np.testing.assert_array_equal(read(encoded(ROUTES)).columns["routes"], [*(ROUTES + 1), np.zeros((LAYERS, K))])
    assert "routes" not in read(encoded(ROUTES[:1]), Request(PROMPT, ROUTED.sampling)).columns


def test_what_cannot_be_the_routes_is_refused():
    cases = {
        None: "does not report the experts of its tokens",
        encoded(ROUTES[:-1]): r"gave routes uint8 \(5, 3, 2\), expected unsigned integers \(6, 3, 2\)",
        encoded(ROUTES.astype(np.int8)): "gave routes int8",
        encoded(ROUTES.astype(np.float32)): "gave routes float32",
        encoded(ROUTES[:, :, :1]): r"gave routes uint8 \(6, 3, 1\)",
        encoded(np.where(ROUTES[2, 1, 0] == ROUTES, 8, ROUTES).astype(np.uint16)): "gave the expert number 8",
    }
    for bad in (
        encoded(ROUTES)[:-40],
        base64.b64encode(pickle.dumps(ROUTES)).decode(),
        encoded(np.array([{}]), allow_pickle=True),
    ):
        cases[bad] = "answered with no completion"
    for routes, said in cases.items():
        with pytest.raises(ReplyError, match=said):
            read(routes)


def test_a_server_without_routes_is_refused():
    config = {"num_hidden_layers": LAYERS, "num_experts_per_tok": K, "num_experts": EXPERTS}
    described = {"backend": "rljax_file", "dtype": "bfloat16", "quantization": None, "max_model_len": 512}
    described |= {"block_size": 16, "max_logprobs": 20, "shape": {"num_experts": EXPERTS}}
    wanted = Expectation(RolloutConfig(router_replay="r3"), config, 16)
    assert wanted.routes == (LAYERS, K, EXPERTS)
    (line,) = VllmBackend().differences(described, wanted)
    assert "--enable-return-routed-experts" in line
    assert not VllmBackend().differences(described | {"returns_routes": True}, wanted)
    assert not VllmBackend().differences(described, Expectation(RolloutConfig(), config, 16))
