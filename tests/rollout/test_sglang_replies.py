"""Tests of SGLang's wire format: the requests that are sent, and replies in the form of SGLang 0.5.23."""

import contextlib
import json

import numpy as np
import pytest

from rljax.errors import ReplyError
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.sglang.client import GENERATE, SglangBackend
from rljax.rollout.types import SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
WIRE = SglangBackend()
TOPS = [[-0.0033606071956455708, 14, None], [-7.485095024108887, 15, None]]
REPLY = {
    "output_ids": [14, 14],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "weight_version": "run.3",
        "output_token_logprobs": [TOPS[0], [-0.0020496377255767584, 14, None]],
        "output_top_logprobs": [TOPS, [[-0.0020496377255767584, 14, None], [-8.02249813079834, 15, None]]],
        "cached_tokens": 0,
        "weight_versions": [{"version": "run.3", "start": 0, "end": 2}],
    },
}
SCORED = {
    "output_ids": [14],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 14},
        "weight_version": "default",
        "input_token_logprobs": [[None, 3, None], [-7.3416523933410645, 4, None], [-9.421671867370605, 5, None]],
        "output_token_logprobs": [[-0.0033606071956455708, 14, None]],
        "weight_versions": [{"version": "default", "start": 0, "end": 1}],
    },
}


def read(reply, request):
    return WIRE.completion(GENERATE, json.dumps(reply).encode(), request)


def changed(**meta):
    return REPLY | {"meta_info": REPLY["meta_info"] | meta}


def test_everything_that_shapes_the_distribution_is_sent():
    """If ignore_eos is true, SGLang passes over stop_token_ids, too."""
    body = WIRE.body(GENERATE, Request(PROMPT, SamplingParams(9, 0.7, (14,), reported=2), seed=5), "policy")
    sampling = {"max_new_tokens": 9, "temperature": 0.7, "sampling_seed": 5, "top_p": 1, "top_k": -1, "min_p": 0}
    sampling |= {"repetition_penalty": 1, "stop_token_ids": [14], "ignore_eos": False}
    expected = {"input_ids": [3, 4, 5], "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2}
    assert {name: body[name] for name in expected} == expected
    assert {name: body["sampling_params"][name] for name in sampling} == sampling
    plain = WIRE.body(GENERATE, Request(PROMPT, SamplingParams(1), prompt_logprobs=0), "policy")
    assert plain["logprob_start_len"] == 0
    assert (plain["sampling_params"]["stop_token_ids"], plain["sampling_params"]["ignore_eos"]) == (None, True)
    assert "sampling_seed" not in plain["sampling_params"]


def test_a_reply_is_read():
    """The second one has a stop token and the log-probabilities of a prompt, and the third one its likeliest tokens."""
    request = Request(PROMPT, SamplingParams(2, reported=2))
    got = read(REPLY, request)
    assert got.response.tolist() == [14, 14]
    np.testing.assert_array_equal(got["rollout_logprobs"], np.float32([-0.0033606071956455708, -0.0020496377255767584]))
    assert (got.finish_reason, got.spans) == ("length", (("run.3", 0, 2),))
    assert got["top_ids"].tolist() == [[14, 15], [14, 15]]
    np.testing.assert_array_equal(got["top_logprobs"][1], np.float32([-0.0020496377255767584, -8.02249813079834]))
    check_completion("u", got, request, 16)
    assert (got.cached, read(changed(cached_tokens=2), request).cached) == (0, 2)
    request = Request(PROMPT, SamplingParams(4, stop_token_ids=(14,)), prompt_logprobs=0)
    got, own = read(SCORED, request), ({4: -7.3416523933410645}, {5: -9.421671867370605})
    assert got.prompt_logprobs == ({}, *own)
    assert (got.finish_reason, got.response.tolist(), got.cached) == ("stop", [14], None)
    check_completion("u", got, request, 16)
    meta = SCORED["meta_info"] | {"input_top_logprobs": [None, [[-0.5, 7, None], [-1.5, 4, None]], [[-0.25, 9, None]]]}
    got = read(SCORED | {"meta_info": meta}, Request(PROMPT, SamplingParams(4), prompt_logprobs=2))
    assert got.prompt_logprobs == ({}, {7: -0.5} | own[0], {9: -0.25} | own[1])


def test_what_is_no_completion_is_refused():
    bad = [{}, {"error": {"message": "x"}}, *(REPLY | {"output_ids": ids} for ids in ([14, 13], [14], "14"))]
    bad += [changed(output_token_logprobs=[[None, 14, None], [-0.1, 14, None]]), changed(output_token_logprobs=None)]
    bad += [changed(weight_versions=[{"version": "a", "start": 0}]), changed(finish_reason="length")]
    for reply in [*bad, changed(prompt_tokens=4)]:
        with pytest.raises(ReplyError, match=GENERATE):
            read(reply, Request(PROMPT, SamplingParams(2)))


@pytest.mark.parametrize(("limit", "stops", "finish"), [(3, (), "abort"), (2, (), "length"), (3, (15,), "stop")])
def test_a_response_given_up_at_its_own_end_is_complete(limit, stops, finish):
    """SGLang answers an aborted request with status 200 and the tokens it had. The response is 14, 15."""
    scores = [[-0.5, 14, None], [-0.5, 15, None]]
    reply = changed(finish_reason={"type": "abort", "message": "Abort"}, output_token_logprobs=scores)
    request = Request(PROMPT, SamplingParams(limit, stop_token_ids=stops))
    got = read(reply | {"output_ids": [14, 15]}, request)
    assert got.finish_reason == finish
    is_refused = pytest.raises(ReplyError, match="ended a response with 'abort'")
    with is_refused if finish == "abort" else contextlib.nullcontext():
        check_completion("u", got, request, 16)
