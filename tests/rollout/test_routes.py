"""Tests of a mixture's routes in a server's reply: they are read, checked against the request, or refused."""

import base64
import io
import json
import pickle

import numpy as np
import pytest

from rljax.errors import ReplyError
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.types import RolloutConfig, SamplingParams

LAYERS, K, EXPERTS = 3, 2, 8
REQUEST = Request(np.array([3, 4, 5], np.int32), SamplingParams(4), routes=(LAYERS, K, EXPERTS))
ROUTES = np.random.default_rng(0).integers(0, EXPERTS, (6, LAYERS, K)).astype(np.uint8)


def encoded(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


def reply(routes):
    content = [{"token_id": 7, "logprob": -1.0, "top_logprobs": []}] * 4
    choice = {"index": 0, "token_ids": [7] * 4, "finish_reason": "length", "logprobs": {"content": content}}
    return json.dumps({"choices": [choice | ({} if routes is None else {"routed_experts": routes})]}).encode()


def read(routes, request=REQUEST):
    completion = VllmBackend().completion(GENERATE, reply(routes), request)
    check_completion("http://server", completion, request, 64)
    return completion


def test_the_experts_of_every_token_but_the_last_are_read():
    np.testing.assert_array_equal(read(encoded(ROUTES)).columns["routes"], [*(ROUTES + 1), np.zeros((LAYERS, K))])


def test_routes_that_nobody_asked_for_are_left_alone():
    plain = Request(REQUEST.prompt, REQUEST.sampling)
    assert "routes" not in read(encoded(ROUTES[:1]), plain).columns


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (None, "does not report the experts of its tokens"),
        (encoded(ROUTES[:-1]), r"gave routes uint8 \(5, 3, 2\), expected unsigned integers \(6, 3, 2\)"),
        (encoded(ROUTES[:, :, :1]), r"gave routes uint8 \(6, 3, 1\)"),
        (encoded(ROUTES.astype(np.float32)), "gave routes float32"),
        (encoded(ROUTES.astype(np.int8)), "gave routes int8"),
        (encoded(np.where(ROUTES[2, 1, 0] == ROUTES, 8, ROUTES).astype(np.uint16)), "gave the expert number 8"),
        ("%%%", "answered with no completion"),
        (encoded(ROUTES)[:-40], "answered with no completion"),
        (base64.b64encode(pickle.dumps(ROUTES)).decode(), "answered with no completion"),
        (encoded(np.array([{}]), allow_pickle=True), "answered with no completion"),
    ],
)
def test_what_cannot_be_the_routes_is_refused(routes, said):
    with pytest.raises(ReplyError, match=said):
        read(routes)


def test_a_server_without_routes_is_refused():
    config = {"num_hidden_layers": LAYERS, "num_experts_per_tok": K, "num_experts": EXPERTS}
    described = {
        "backend": "rljax_file", "dtype": "bfloat16", "quantization": None, "max_model_len": 512, "block_size": 16,
        "max_logprobs": 20, "shape": {"num_experts": EXPERTS},
    }  # fmt: skip
    wanted = Expectation(RolloutConfig(router_replay="r3"), config, 16)
    assert wanted.routes == (LAYERS, K, EXPERTS)
    assert [line for line in VllmBackend().differences(described, wanted) if "--enable-return-routed-experts" in line]
    assert not VllmBackend().differences(described | {"returns_routes": True}, wanted)
    assert not VllmBackend().differences(described, Expectation(RolloutConfig(), config, 16))
