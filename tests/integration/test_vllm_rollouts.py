"""Responses and reports of a real vLLM server are compared with the trainer's whole distributions."""

from contextlib import closing

import numpy as np
import pytest
from small_engines import distributions

from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm
VOCABULARY = 256
TOKENS = 24
WITHIN = {"float32": 2e-5, "bfloat16": 0.25}  # the largest |server - trainer| of a likeliest token (nats)


@pytest.mark.parametrize("served", ["bfloat16", pytest.param("float16", marks=pytest.mark.harness)], indirect=True)
def test_engines_agree_after_each_publish(served, prompts):
    """The mismatch is the dtype's own, before and after two big updates. Versions and figures are recorded."""
    measured = []
    with closing(served.engine()) as engine:
        for version in range(3):
            params = served.model.params if version == 0 else served.model.moved(version)
            metrics = engine.publish(params, version)
            samples = engine.generate(prompts, 4, SamplingParams(TOKENS), seed=version)
            responses = list(samples)
            assert len(responses) == 20
            assert {(r.prompt_index, r.sample_index) for r in responses} == {(i, j) for i in range(5) for j in range(4)}
            assert all(r["version"].tolist() == [version] * TOKENS and r.truncated for r in responses)
            measured.append(served.gaps(params, responses))
            assert metrics["publish/seconds"] >= metrics["publish/stall_s"] > 0
            assert metrics["publish/bytes"] > 0
            assert metrics["publish/verified_tensors"] == len(served.model.checksums(served.dtype)(params))
            assert samples.metrics["rollout/requests"] == 20
            assert samples.metrics["rollout/retries"] == 0
            assert 0 <= samples.metrics["rollout/cached_prompt_fraction"] < 1
            assert ("publish/changed_fraction" in metrics) == (version > 0)
    together = np.concatenate(measured)
    low, high = {"bfloat16": (1e-4, 5e-2), "float16": (1e-5, 6e-3)}[served.dtype]
    assert low < together.mean() < high


def test_stops_greedy_and_many_seeded_prompts(float32, prompts):
    """Greedy log-probabilities are those at temperature 1. A seeded prompt computed in parts would end the engine."""
    stops, rng = tuple(range(0, VOCABULARY, 5)), np.random.default_rng(0)
    many = [rng.integers(2, 250, 150).astype(np.int32) for _ in range(120)]
    with float32.published() as engine:
        drawn = list(engine.generate(prompts, 4, SamplingParams(30, stop_token_ids=stops), seed=1))
        greedy = list(engine.generate(prompts, 1, SamplingParams(8, temperature=0.0), seed=1))
        answered = list(engine.generate(many, 1, SamplingParams(2, stop_token_ids=(1,)), seed=3))
    assert any(not r.truncated for r in drawn)
    for r in drawn:
        assert not np.isin(r.response[:-1], stops).any()
        assert r.truncated == (r.response[-1] not in stops)
    assert float32.gaps(float32.model.params, [*drawn, *greedy]).max() < 1e-4
    assert sorted(response.prompt_index for response in answered) == list(range(120))


def support(logprobs: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Returns a mask of the tokens that can be sampled after the cuts, in the order min_p, top_k, top_p."""
    stays = logprobs >= logprobs.max() + np.log(max(sampling.min_p, 1e-300))
    stays &= logprobs >= np.sort(np.where(stays, logprobs, -np.inf))[-sampling.top_k]
    shares = np.where(stays, np.exp(logprobs), 0.0)
    order = np.argsort(-shares)
    likelier = np.concatenate([[0.0], np.cumsum(shares[order] / shares.sum())[:-1]])
    return stays & np.isin(np.arange(len(logprobs)), order[likelier < sampling.top_p])


def compared(served, prompts, sampling, n=3, **config):
    """Yields responses of the first policy with the trainer's distributions. What is reported whole adds up to 1."""
    with served.published(**config) as engine:
        responses = list(engine.generate(prompts, n, sampling, seed=3))
    for response in responses:
        if sampling.top_k:
            sums = np.exp(response["top_logprobs"].astype(np.float64)).sum(1)
            np.testing.assert_allclose(sums, 1.0, atol=1e-5 if served.dtype == "float32" else 2e-3)
        yield response, distributions(served.model.params, served.model.config, prompts, response, sampling.temperature)


@pytest.mark.parametrize("served", ["float32", pytest.param("bfloat16", marks=pytest.mark.harness)], indirect=True)
def test_the_five_likeliest_are_the_trainers(served, prompts):
    """The sampled token, too, has the log-probability of the distribution at the temperature of the request."""
    gaps, found, of_sampled, positions = [], 0, 0, 0
    for response, trainers in compared(served, prompts, SamplingParams(TOKENS, 0.8, reported=5), top_logprobs=5):
        assert response["top_ids"].shape == (TOKENS, 5)
        assert (np.diff(response["top_logprobs"], axis=1) <= 0).all()
        gaps.append(np.abs(np.take_along_axis(trainers, response["top_ids"], 1) - response["top_logprobs"]))
        sampled = np.take_along_axis(trainers, response.response[:, None], 1)
        gaps.append(np.abs(sampled - response["rollout_logprobs"][:, None]))
        found += (np.sort(np.argsort(-trainers, axis=1)[:, :5]) == np.sort(response["top_ids"])).all(axis=1).sum()
        of_sampled += (response["top_ids"] == response.response[:, None]).any(axis=1).sum()
        positions += TOKENS
    together = np.concatenate([gap.ravel() for gap in gaps])
    assert together.max() < WITHIN[served.dtype]
    assert 0 < of_sampled < positions  # both kinds of positions occur
    if served.dtype == "float32":
        assert found >= positions - 2  # two tokens may be nearly tied


@pytest.mark.parametrize(
    ("served", "cut"),
    [
        ("float32", {"top_k": 12, "top_p": 0.8, "min_p": 0.1}),
        pytest.param("float32", {"top_k": 6}, marks=pytest.mark.harness),
        pytest.param("bfloat16", {"top_k": 20}, marks=pytest.mark.harness),
    ],
    ids=str,
    indirect=["served"],
)
def test_supports_are_those_of_the_trainers_distribution(served, prompts, cut):
    """A head in 16 bits has ties. Without Triton the server keeps all tokens that tie with the last one."""
    sampling = SamplingParams(TOKENS, 0.9, reported=cut["top_k"], **cut)
    equal, sizes, gaps = [], [], []
    for response, trainers in compared(served, prompts, sampling, **cut):
        assert (response["top_ids"] == response.response[:, None]).any(axis=1).all()
        for ids, reported, logprobs in zip(response["top_ids"], response["top_logprobs"], trainers, strict=True):
            kept = ids[ids >= 0]
            equal.append((np.isin(np.arange(VOCABULARY), kept) == support(logprobs, sampling)).all())
            sizes.append(len(kept))
            normalised = logprobs[kept] - np.log(np.exp(logprobs[kept]).sum())
            gaps.append(np.abs(normalised - reported[ids >= 0]))
    together = np.concatenate(gaps)
    assert together.max() < WITHIN[served.dtype]
    assert together.mean() < 0.02
    assert served.dtype != "float32" or np.mean(equal) > 0.98  # a token may lie at the edge of the cut
    assert max(sizes) <= cut["top_k"]
    assert (min(sizes) < cut["top_k"]) == (len(cut) > 1)
