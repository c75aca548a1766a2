"""Tests of the likeliest tokens that the embedded and the exact engine report, and of cut sampling in both."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import CONFIG, MESH, PROMPTS, distributions, exact_pass, in_order

from rljax.policy.model import init_params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import InjectConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

PARAMS = init_params(CONFIG, 0)
LIMIT, WIDTH, TEMPERATURE = 10, 6, 0.8
TOPS = {"reported": 4}
CUT = {"top_k": 5, "top_p": 0.9, "reported": 5}


def embedded(dtype=jnp.float32, **options):
    engine = JaxEngine(CONFIG, dtype, WIDTH, mesh=MESH, **options)
    engine.publish(PARAMS, 0)
    return engine


def exact(noise=0.0):
    executable = exact_pass(CONFIG, 12, LIMIT, rows=4, row_tokens=16)
    engine = ExactEngine(executable, inject=InjectConfig(logit_noise=noise))
    engine.publish(PARAMS, 0)
    return engine


def sample(engine, n=3, *, seed=0, temperature=TEMPERATURE, **asked):
    return in_order(engine.generate(PROMPTS, n, SamplingParams(LIMIT, temperature, (0, 1), **asked), seed=seed))


def log_softmax_of(response, temperature=TEMPERATURE):
    """Returns the log-softmax that each token of a response was sampled from, [r, v], by the policy's own forward."""
    return distributions(PARAMS, CONFIG, PROMPTS, response, temperature)


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.response, b.response)
        assert a.truncated == b.truncated


@pytest.mark.parametrize("make", [embedded, exact])
def test_the_likeliest_tokens_are_those_of_the_full_forward(make):
    """A token among the likeliest ones has the same bits there as in the log-probabilities of the exact engine."""
    for r in sample(make(), **TOPS):
        expected = log_softmax_of(r)
        assert r["top_ids"].dtype == np.int32
        assert r["top_logprobs"].dtype == np.float32
        assert r["top_ids"].shape == r["top_logprobs"].shape == (r.length, 4)
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-expected)[:, :4], atol=2e-5, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(expected, r["top_ids"], 1), r["top_logprobs"], atol=2e-5, rtol=0)
        if make is exact:
            hit = r["top_ids"] == r.response[:, None]
            np.testing.assert_array_equal(r["top_logprobs"][hit], r["rollout_logprobs"][hit.any(axis=1)])


@pytest.mark.parametrize("make", [embedded, exact])
def test_reporting_changes_no_token(make):
    engine = make()
    plain, told = sample(engine, seed=5), sample(engine, seed=5, **TOPS)
    assert_same(plain, told)
    for a, b in zip(plain, told, strict=True):
        assert "top_ids" not in a.columns
        np.testing.assert_allclose(a["rollout_logprobs"], b["rollout_logprobs"], atol=1e-6, rtol=0)
        hit = b["top_ids"] == b.response[:, None]
        assert hit.sum() > 0
        np.testing.assert_allclose(b["top_logprobs"][hit], b["rollout_logprobs"][hit.any(axis=1)], atol=1e-6, rtol=0)


def test_greedy_reports_at_temperature_1_and_is_not_cut():
    """The tokens are the likeliest ones of the full forward."""
    for r in sample(embedded(), n=1, temperature=0.0, **CUT):
        expected = log_softmax_of(r, 1.0)
        np.testing.assert_array_equal(r.response, r["top_ids"][:, 0])
        np.testing.assert_allclose(r["top_logprobs"][:, 0], r["rollout_logprobs"], atol=1e-6)
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-expected)[:, :5], atol=2e-5, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(expected, r["top_ids"], 1), r["top_logprobs"], atol=2e-5, rtol=0)


@pytest.mark.parametrize("make", [embedded, exact])
def test_a_cut_response_has_its_whole_support(make):
    sizes = set()
    for r in sample(make(), **CUT):
        whole = log_softmax_of(r)
        for place, token in enumerate(r.response):
            ids, logprobs = r["top_ids"][place], r["top_logprobs"][place]
            stays = ids >= 0
            sizes.add(int(stays.sum()))
            assert np.isneginf(logprobs).tolist() == (~stays).tolist()
            five = np.sort(np.exp(whole[place]))[::-1][:5]
            likelier = np.cumsum(five / five.sum()) - five / five.sum()
            assert stays.sum() == np.sum(likelier < 0.9)
            own = np.exp(whole[place][ids[stays]])
            np.testing.assert_allclose(logprobs[stays], np.log(own / own.sum()), atol=3e-5, rtol=0)
            assert r["rollout_logprobs"][place] == logprobs[ids == token]
    assert len(sizes) > 1


def test_noise_is_in_the_reported_numbers():
    noisy = sample(exact(noise=2.0), **TOPS)
    assert_same(noisy, sample(exact(noise=2.0)))
    gaps = []
    for r in noisy:
        hit = r["top_ids"] == r.response[:, None]
        np.testing.assert_allclose(r["top_logprobs"][hit], r["rollout_logprobs"][hit.any(axis=1)], atol=1e-6)
        gaps.append(np.abs(np.take_along_axis(log_softmax_of(r), r["top_ids"], 1) - r["top_logprobs"]).max())
    assert min(gaps) > 0.1


def test_all_tokens_of_the_vocabulary_sum_to_one():
    for r in sample(embedded(jnp.bfloat16), n=1, reported=CONFIG.vocab_size):
        assert {tuple(sorted(ids)) for ids in r["top_ids"].tolist()} == {tuple(range(CONFIG.vocab_size))}
        np.testing.assert_allclose(np.exp(r["top_logprobs"]).sum(axis=1), 1.0, atol=1e-5)


@pytest.mark.mesh
def test_a_sharded_engine_reports_the_same():
    engine = JaxEngine(CONFIG, jnp.float32, WIDTH, mesh=make_mesh(MeshConfig(2, 2, 2)))
    engine.publish(PARAMS, 0)
    for r in sample(engine, **CUT):
        assert (
            (r["rollout_logprobs"][:, None] == np.where(r["top_ids"] == r.response[:, None], r["top_logprobs"], 1.0))
            .any(axis=1)
            .all()
        )
    for r in sample(engine, **TOPS):
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-log_softmax_of(r))[:, :4], atol=2e-5, rtol=0)
