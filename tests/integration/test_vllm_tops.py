"""The likeliest tokens and cut sampling of a real server are compared with the trainer's distribution in float32."""

import numpy as np
import pytest
from small_engines import distributions

from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm
VOCABULARY = 256
TOKENS = 24
WITHIN = {"float32": 2e-5, "bfloat16": 0.25}  # the largest |server - trainer| of a likeliest token (nats)


def support(logprobs: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Returns a mask of the tokens that can be sampled at one position.

    The cuts follow in the order min_p, top_k, top_p.
    """
    stays = logprobs >= logprobs.max() + np.log(max(sampling.min_p, 1e-300))
    stays &= logprobs >= np.sort(np.where(stays, logprobs, -np.inf))[-sampling.top_k]
    shares = np.where(stays, np.exp(logprobs), 0.0)
    order = np.argsort(-shares)
    likelier = np.concatenate([[0.0], np.cumsum(shares[order] / shares.sum())[:-1]])
    return stays & np.isin(np.arange(len(logprobs)), order[likelier < sampling.top_p])


def sampled(served, prompts, sampling, n=3, *, route=None, **config):
    """Returns the responses of an engine that has published the policy that the server was started from."""
    with served.published(**config) as engine:
        if route is not None:
            engine.fleet.server(served.url).route = route
        return list(engine.generate(prompts, n, sampling, seed=3))


@pytest.mark.parametrize("served", ["float32", pytest.param("bfloat16", marks=pytest.mark.harness)], indirect=True)
def test_the_five_likeliest_are_the_trainers(served, prompts):
    sampling = SamplingParams(TOKENS, 0.8, reported=5)
    responses = sampled(served, prompts, sampling, top_logprobs=5)
    gaps, found, of_sampled = [], 0, 0
    for response in responses:
        trainers = distributions(served.model.params, served.model.config, prompts, response, 0.8)
        assert response["top_ids"].shape == (TOKENS, 5)
        assert (np.diff(response["top_logprobs"], axis=1) <= 0).all()
        gaps.append(np.abs(np.take_along_axis(trainers, response["top_ids"], 1) - response["top_logprobs"]))
        found += (np.sort(np.argsort(-trainers, axis=1)[:, :5]) == np.sort(response["top_ids"])).all(axis=1).sum()
        of_sampled += (response["top_ids"] == response.response[:, None]).any(axis=1).sum()
    together = np.concatenate(gaps)
    print(served.dtype, "mean", together.mean(), "largest", together.max(), "sampled among", of_sampled)
    assert together.max() < WITHIN[served.dtype]
    assert 0 < of_sampled < TOKENS * len(responses)  # both kinds of positions occur
    if served.dtype == "float32":
        assert found >= TOKENS * len(responses) - 2  # two tokens may be nearly tied


@pytest.mark.parametrize("route", [None, pytest.param(GENERATE, marks=pytest.mark.harness)])
def test_the_whole_vocabulary_sums_to_1(float32, prompts, route):
    responses = sampled(
        float32, prompts, SamplingParams(4, reported=VOCABULARY), 1, route=route, top_logprobs=VOCABULARY
    )
    for response in responses:
        trainers = distributions(float32.model.params, float32.model.config, prompts, response, 1.0)
        np.testing.assert_array_equal(np.sort(response["top_ids"]), np.tile(np.arange(VOCABULARY), (4, 1)))
        np.testing.assert_allclose(np.exp(response["top_logprobs"].astype(np.float64)).sum(1), 1.0, atol=1e-5)
        np.testing.assert_allclose(
            np.take_along_axis(trainers, response["top_ids"], 1), response["top_logprobs"], atol=WITHIN["float32"]
        )


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 6},
        pytest.param({"top_k": 15, "top_p": 0.7}, marks=pytest.mark.harness),
        pytest.param({"top_k": 15, "min_p": 0.2}, marks=pytest.mark.harness),
        {"top_k": 12, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=lambda cut: " ".join(cut),
)
@pytest.mark.parametrize("served", ["float32"], indirect=True)
def test_supports_are_those_of_the_trainers_distribution(served, prompts, cut):
    sampling = SamplingParams(TOKENS, 0.9, reported=cut["top_k"], **cut)
    responses = sampled(served, prompts, sampling, **cut)
    equal, sizes, gaps = [], [], []
    for response in responses:
        trainers = distributions(served.model.params, served.model.config, prompts, response, 0.9)
        assert (response["top_ids"] == response.response[:, None]).any(axis=1).all()
        np.testing.assert_allclose(np.exp(response["top_logprobs"].astype(np.float64)).sum(1), 1.0, atol=1e-5)
        for ids, reported, logprobs in zip(response["top_ids"], response["top_logprobs"], trainers, strict=True):
            kept = ids[ids >= 0]
            stays = np.zeros(VOCABULARY, bool)
            stays[kept] = True
            equal.append((stays == support(logprobs, sampling)).all())
            sizes.append(len(kept))
            normalised = logprobs[kept] - np.log(np.exp(logprobs[kept]).sum())
            gaps.append(np.abs(normalised - reported[ids >= 0]).max())
    print(cut, "sizes", min(sizes), max(sizes), "largest gap", max(gaps), "equal", np.mean(equal))
    assert max(gaps) < WITHIN["float32"]
    assert np.mean(equal) > 0.98  # a token may lie at the edge of the cut
    assert max(sizes) <= cut["top_k"]
    assert (min(sizes) < cut["top_k"]) == (len(cut) > 1)


@pytest.mark.harness
@pytest.mark.parametrize("served", ["bfloat16"], indirect=True)
def test_a_head_in_16_bits_has_ties(served, prompts):
    """Without Triton the server keeps all tokens that tie with the last one of ``top_k``."""
    sampling = SamplingParams(TOKENS, 1.5, reported=20, top_k=20)
    responses = sampled(served, prompts, sampling, 6, top_k=20)
    gaps = []
    for response in responses:
        trainers = distributions(served.model.params, served.model.config, prompts, response, 1.5)
        assert (response["top_ids"] == response.response[:, None]).any(axis=1).all()
        np.testing.assert_allclose(np.exp(response["top_logprobs"].astype(np.float64)).sum(1), 1.0, atol=2e-3)
        kept = np.take_along_axis(trainers, response["top_ids"], 1)
        gaps.append(np.abs(kept - np.log(np.exp(kept).sum(1, keepdims=True)) - response["top_logprobs"]))
    together = np.concatenate(gaps)
    print("mean", together.mean(), "largest", together.max())
    assert together.mean() < 0.02
    assert together.max() < WITHIN["bfloat16"]
