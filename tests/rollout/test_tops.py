"""Tests of cut sampling and of reported likeliest tokens: supports, frequencies, and both engines of this process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import CONFIG, MESH, PROMPTS, distributions, exact_pass, in_order

from rljax.policy.model import init_params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.exact import ExactEngine
from rljax.rollout.likeliest import Selection, draw_tokens, sample_support, selection_of
from rljax.rollout.types import InjectConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

# Token 2 has probability 0.4, token 0 has 0.3, token 3 has 0.2 and token 1 has 0.1.
LOGITS = jnp.log(jnp.asarray([[0.3, 0.1, 0.4, 0.2]]))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(12, 0.3, 0), (12, 0.8, 0.05), (12, 1.0, 0.05), (1, 1, 0)])
def test_supports_are_those_of_vllm(top_k, top_p, min_p):
    """vLLM 0.32 drops tokens from the least likely up while their summed probability is at most 1 - top_p."""
    logits = np.random.default_rng(0).normal(0, 2, (200, 50)).astype(np.float32)
    selection = Selection(top_k, top_k, top_p, min_p)
    arrays = sample_support(jax.random.split(jax.random.key(0), 200), jnp.asarray(logits), selection).arrays
    found_ids, found_logprobs = np.asarray(arrays["top_ids"]), np.asarray(arrays["top_logprobs"])
    rows = zip(logits.astype(np.float64), found_ids, found_logprobs, strict=True)
    for row, found, values in rows:
        p = np.exp(row - row.max())
        kept = np.where((p < min_p) | (row < np.sort(row)[-top_k]), 0.0, p)
        upwards = np.argsort(kept)
        dropped = np.cumsum(kept[upwards] / kept.sum()) <= 1 - top_p
        dropped[-1] = False
        kept[upwards[dropped]] = 0.0
        stays = found >= 0
        assert np.isneginf(values).tolist() == (~stays).tolist()
        assert set(found[stays].tolist()) == set(np.flatnonzero(kept).tolist())
        np.testing.assert_allclose(values[stays], np.log((kept / kept.sum())[found[stays]]), atol=1e-5)
        assert (np.diff(values[stays]) <= 0).all()


@pytest.mark.parametrize(
    ("selection", "probabilities", "threshold"),
    [  # 99.9% quantiles of chi-squared with 2 degrees of freedom and with 1
        (Selection(2, 3), [3 / 9, 0, 4 / 9, 2 / 9], 13.82),
        (Selection(0, 4, top_p=0.6), [3 / 7, 0, 4 / 7, 0], 10.83),
    ],
)
def test_samples_follow_the_cut_distribution(selection, probabilities, threshold):
    count = 20_000
    new = sample_support(jax.random.split(jax.random.key(3), count), jnp.tile(LOGITS, (count, 1)), selection)
    expected = count * np.asarray(probabilities)
    counts = np.bincount(new.tokens, minlength=4)
    assert not counts[expected == 0].any()
    chosen = expected > 0
    assert np.sum((counts - expected)[chosen] ** 2 / expected[chosen]) < threshold
    np.testing.assert_allclose(np.exp(new.arrays["rollout_logprobs"]), np.asarray(probabilities)[new.tokens], atol=1e-6)


def test_greedy_requests_are_never_cut():
    """Their likeliest tokens keep their whole probabilities. Of equal tokens the lower ids are the likelier ones."""
    assert selection_of(SamplingParams(8, 0.0, top_k=3, top_p=0.5, min_p=0.1, reported=3)) == Selection(3, greedy=True)
    assert selection_of(SamplingParams(8, 0.7, top_k=3, top_p=0.5, min_p=0.1, reported=2)) == Selection(2, 3, 0.5, 0.1)
    assert selection_of(SamplingParams(8)) == Selection()
    tied = jnp.log(jnp.asarray([[0.1, 0.3, 0.3, 0.3]]))
    for logits, ids, expected in ((LOGITS, [2, 0], [0.4, 0.3]), (tied, [1, 2], [0.3, 0.3])):
        new = draw_tokens(logits + 7.0, jnp.full(1, 7.0), None, Selection(2, greedy=True))
        assert new.arrays["top_ids"].tolist() == [ids]
        np.testing.assert_allclose(np.exp(new.arrays["top_logprobs"]), [expected], atol=1e-6)


PARAMS, LIMIT, WIDTH, TEMPERATURE = init_params(CONFIG, 0), 10, 6, 0.8
TOPS = {"reported": 4}
CUT = {"top_k": 5, "top_p": 0.9, "reported": 5}


def embedded(dtype=jnp.float32, **settings):
    engine = JaxEngine(CONFIG, dtype, WIDTH, **{"mesh": MESH} | settings)
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


def chosen(r):
    """Returns the log-probabilities of sampled tokens among the likeliest ones: as reported there, and their own."""
    hit = r["top_ids"] == r.response[:, None]
    return r["top_logprobs"][hit], r["rollout_logprobs"][hit.any(axis=1)]


@pytest.mark.parametrize("make", [embedded, exact])
def test_the_likeliest_tokens_are_those_of_the_full_forward(make):
    """To report them changes no token. With the exact engine a token has the same bits among them."""
    engine, hits = make(), 0
    for r, plain in zip(sample(engine, **TOPS), sample(engine), strict=True):
        expected = log_softmax_of(r)
        assert (r["top_ids"].dtype, r["top_logprobs"].dtype) == (np.int32, np.float32)
        assert r["top_ids"].shape == r["top_logprobs"].shape == (r.length, 4)
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-expected)[:, :4], atol=2e-5, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(expected, r["top_ids"], 1), r["top_logprobs"], atol=2e-5, rtol=0)
        np.testing.assert_allclose(*chosen(r), atol=0 if make is exact else 1e-6, rtol=0)
        np.testing.assert_array_equal(r.response, plain.response)
        np.testing.assert_allclose(plain["rollout_logprobs"], r["rollout_logprobs"], atol=1e-6, rtol=0)
        assert (r.truncated, "top_ids" in plain.columns) == (plain.truncated, False)
        hits += len(chosen(r)[0])
    assert hits > 0


@pytest.mark.parametrize("make", [embedded, exact])
def test_a_cut_response_has_its_whole_support(make):
    sizes = set()
    for r in sample(make(), **CUT):
        whole, stays = log_softmax_of(r), r["top_ids"] >= 0
        np.testing.assert_array_equal(np.isneginf(r["top_logprobs"]), ~stays)
        five = np.exp(-np.sort(-whole)[:, :5])
        likelier = (np.cumsum(five, 1) - five) / five.sum(1, keepdims=True)
        np.testing.assert_array_equal(stays.sum(1), (likelier < 0.9).sum(1))
        own = np.exp(np.take_along_axis(whole, np.maximum(r["top_ids"], 0), 1)) * stays
        np.testing.assert_allclose(np.exp(r["top_logprobs"]), own / own.sum(1, keepdims=True), rtol=3e-5)
        np.testing.assert_array_equal(*chosen(r))
        assert len(chosen(r)[0]) == r.length
        sizes |= {*stays.sum(1).tolist()}
    assert len(sizes) > 1


def test_noise_greed_and_16_bits_are_in_the_reported_numbers():
    """In 16 bits all tokens sum to one. Greedy sampling reports at temperature 1, and is not cut."""
    for r, plain in zip(sample(exact(noise=2.0), **TOPS), sample(exact(noise=2.0)), strict=True):
        np.testing.assert_array_equal(r.response, plain.response)
        np.testing.assert_allclose(*chosen(r), atol=1e-6)
        assert np.abs(np.take_along_axis(log_softmax_of(r), r["top_ids"], 1) - r["top_logprobs"]).max() > 0.1
    for r in sample(embedded(jnp.bfloat16), n=1, reported=CONFIG.vocab_size):
        assert {tuple(sorted(ids)) for ids in r["top_ids"].tolist()} == {tuple(range(CONFIG.vocab_size))}
        np.testing.assert_allclose(np.exp(r["top_logprobs"]).sum(axis=1), 1.0, atol=1e-5)
    for r in sample(embedded(), n=1, temperature=0.0, **CUT):
        expected = log_softmax_of(r, 1.0)
        np.testing.assert_array_equal(r.response, r["top_ids"][:, 0])
        np.testing.assert_allclose(*chosen(r), atol=1e-6)
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-expected)[:, :5], atol=2e-5, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(expected, r["top_ids"], 1), r["top_logprobs"], atol=2e-5, rtol=0)


@pytest.mark.mesh
def test_a_sharded_engine_reports_the_same():
    """Its cache holds four responses, so that places are used again."""
    engine = embedded(mesh=make_mesh(MeshConfig(2, 2, 2)), decode_tokens=4 * (LIMIT + WIDTH))
    for r in sample(engine, **CUT):
        np.testing.assert_array_equal(*chosen(r))
        assert len(chosen(r)[0]) == r.length
    for r in sample(engine, **TOPS):
        expected = log_softmax_of(r)
        np.testing.assert_allclose(r["top_logprobs"], -np.sort(-expected)[:, :4], atol=2e-5, rtol=0)
        np.testing.assert_allclose(r["rollout_logprobs"], expected[np.arange(r.length), r.response], atol=2e-5, rtol=0)
