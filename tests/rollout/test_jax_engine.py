"""Tests of the embedded engine: its samples, their log-probabilities, and the number of its compilations."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import CONFIG, EXPERTS, MESH, PROMPTS, assert_same_bits, counted_loops, in_order

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout import decode_sizes as sizes
from rljax.rollout.decoding import Queue
from rljax.rollout.embedded import JaxEngine, make_functions
from rljax.rollout.likeliest import next_tokens
from rljax.rollout.types import SamplingParams


def make(dtype=jnp.float32, seed=0, **options):
    engine = JaxEngine(CONFIG, dtype, 6, mesh=MESH, **options)
    params = init_params(CONFIG, seed)
    engine.publish(params, 0)
    return engine, params


def sample(engine, n=3, *, seed=0, temperature=1.0, limit=12, stops=(0, 1)):
    return in_order(engine.generate(PROMPTS, n, SamplingParams(limit, temperature, stops), seed=seed))


def far_from_the_forward(responses, params, dtype, temperature=1.0):
    """Returns the distances [n] of the tokens' log-probabilities to those of the trainer's forward."""
    scored = make_scorer(CONFIG, dtype, temperature=temperature)(params, [r.ids for r in responses])
    pairs = zip(responses, scored, strict=True)
    return np.concatenate([np.abs(r["rollout_logprobs"] - logprobs[-r.length :]) for r, logprobs in pairs])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_full_forward(temperature):
    """The responses end with a stop token or at the limit. The engine keeps the weights that the trainer donates."""
    engine, params = make()
    responses = sample(engine, n=8, temperature=temperature)
    assert far_from_the_forward(responses, params, jnp.float32, temperature).max() < 2e-5
    jax.tree.map(lambda p: p.delete(), params)
    assert_same_bits(sample(engine, n=8, temperature=temperature), responses)
    assert {r.truncated for r in responses} == {True, False}
    for r in responses:
        assert r["version"].shape == (r.length,)
        assert r.length == 12 or not r.truncated
        assert {*r.response[:-1].tolist()} & {0, 1} == set()
        assert (r.response[-1] in (0, 1)) == (not r.truncated)


def test_samples_follow_the_distribution():
    engine, params = make()
    prompt = PROMPTS[0]
    responses = engine.generate([prompt] * 4, 2000, SamplingParams(1, 1.0, ()), seed=5)
    counts = np.bincount([r.response[0] for r in responses], minlength=CONFIG.vocab_size)
    every = make_scorer(CONFIG, jnp.float32)(params, [np.append(prompt, t) for t in range(CONFIG.vocab_size)])
    expected = np.exp([logprobs[-1] for logprobs in every]) * counts.sum()
    chi2 = np.sum((counts - expected) ** 2 / expected)
    assert chi2 < 49.7  # 99.9% quantile of chi-squared with 23 degrees of freedom


@pytest.mark.parametrize(
    ("dtype", "least"), [("bfloat16", 1e-3), pytest.param("float16", 1e-4, marks=pytest.mark.harness)]
)
def test_engine_and_trainer_agree_in_a_float32_head(dtype, least):
    """The blocks add nothing, so only the head can differ. At last bfloat16 would round a logit of 1 + 2^-8."""
    gaps, params = {}, init_params(CONFIG, 0)
    params["layers"] = jax.tree.map(jnp.zeros_like, params["layers"])
    for head in (None, jnp.float32):
        engine = JaxEngine(CONFIG, dtype, 6, mesh=MESH, lm_head_dtype=head)
        engine.publish(params, 0)
        gaps[head] = far_from_the_forward(sample(engine), params, dtype).max()
    assert gaps[jnp.float32] < 2e-6
    assert gaps[None] > least
    table, token = jnp.asarray([[1.0, 1.0], [0.0, 0.0]], jnp.bfloat16), jnp.zeros(1, jnp.int32)
    hidden = jnp.asarray([[1.0, 2.0**-8]], jnp.bfloat16)
    for head, logit in ((None, 1.0), (jnp.float32, 1.0 + 2.0**-8)):
        new = next_tokens({"lm_head": table}, hidden, None, jnp.float32(1.0), token, head)
        assert float(new.arrays["rollout_logprobs"][0]) == pytest.approx(-np.log1p(np.exp(-logit)), abs=1e-7)


def test_requests_for_a_part_of_a_step_share_programs(caplog):
    """With 5 prompts a step, requests for 1 to 5 take 1, 2, 4, 4 and 5 rows, and one for 6 is not padded."""
    assert [sizes.padded_count(count, 5) for count in range(1, 7)] == [1, 2, 4, 4, 5, 6]
    assert [sizes.padded_count(count, 0) for count in range(1, 4)] == [1, 2, 3]
    make_functions.cache_clear()
    (plain, _), (padded, _) = make(), make(step_prompts=4)
    limits = SamplingParams(12, 1.0, (0, 1))
    with counted_loops(caplog) as loops:
        for seed in range(2):
            of_three = [list(engine.generate(PROMPTS[:3], 3, limits, seed=seed)) for engine in (plain, padded)]
            assert [len(responses) for responses in of_three] == [9, 9]
            for one, other in zip(*of_three, strict=True):
                assert (one.prompt_index, one.sample_index) == (other.prompt_index, other.sample_index)
                np.testing.assert_array_equal(one.response, other.response)
                np.testing.assert_allclose(one["rollout_logprobs"], other["rollout_logprobs"], atol=2e-5, rtol=0)
        assert loops() == 2
        for count in (4, 2, 1, 3):
            assert len(list(padded.generate(PROMPTS[:count], 3, limits, seed=0))) == 3 * count
        assert loops() == 4


@pytest.mark.parametrize("decode_tokens", [3 * 18, pytest.param(0, marks=pytest.mark.harness)])
def test_engines_of_one_kind_share_only_their_programs(decode_tokens, caplog):
    """Seeds and weights decide the bits. New ones compile nothing. The cache holds all responses, or three."""
    make_functions.cache_clear()
    (first, _), (second, params), (third, _) = (make(seed=seed, decode_tokens=decode_tokens) for seed in (0, 0, 1))
    with counted_loops(caplog) as loops:
        alike, again = sample(first), sample(second)
        assert_same_bits(alike, again)
        for other in (sample(third), sample(first, seed=4)):
            assert any(a.response.tolist() != b.response.tolist() for a, b in zip(alike, other, strict=True))
        first.close()
        with pytest.raises(RuntimeError, match="no policy was published"):
            sample(first)
        assert_same_bits(sample(second), again)
        for version in (1, 2):
            second.publish(jax.tree.map(lambda p: p * 1.01, params), version)
            responses = sample(second, seed=version, temperature=1.0 / version)
            assert {r.versions[0] for r in responses} == {version}
        assert loops() == 1
        sample(make(jnp.float16, decode_tokens=decode_tokens)[0])
        assert loops() == 2


def test_given_responses_score_as_the_full_forward_scores_them():
    """The scores are the same in any order, alone or together, and under another limit."""
    engine, params = make()
    responses = sample(engine, n=2, temperature=0.7)[::-1]
    prompts, tokens = [PROMPTS[r.prompt_index] for r in responses], [r.response for r in responses]
    scored = engine.score(prompts, tokens, temperature=0.7)
    scored += engine.score(prompts[:1], tokens[:1], temperature=0.7, max_response_tokens=20)
    full = make_scorer(CONFIG, jnp.float32, temperature=0.7)(params, [r.ids for r in responses])
    for logprobs, expected in zip(scored, [*full, full[0]], strict=True):
        np.testing.assert_allclose(logprobs, expected[-len(logprobs) :], atol=2e-5, rtol=0)
    for length in (0, 7):
        with pytest.raises(ValueError, match=f"a prompt has {length} tokens, expected 1 to max_prompt_tokens = 6"):
            engine.generate([np.arange(length)], 1, SamplingParams(4), seed=0)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [pytest.param(jnp.bfloat16, 1e-4, 5e-2, marks=pytest.mark.harness), (jnp.float16, 1e-5, 5e-3)],
)
def test_given_responses_keep_the_rounding_of_decoding(dtype, low, high):
    """The scores have the rounding of decoding: the full forward is more than five times as far from the samples."""
    engine, params = make(dtype)
    responses = sample(engine, n=2)
    scored = engine.score([PROMPTS[r.prompt_index] for r in responses], [r.response for r in responses])
    sampled = np.concatenate([r["rollout_logprobs"] for r in responses])
    forward = far_from_the_forward(responses, params, dtype).mean()
    assert low < forward < high
    assert forward > 5 * np.abs(np.concatenate(scored) - sampled).mean()


FIVE_PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2], [9, 3, 1])]
LIMIT, WIDTH = 12, 6


def continuous(decode_tokens, *, config=CONFIG, **asked):
    """Returns 4 responses to each prompt. A response takes LIMIT + WIDTH of the cache's ``decode_tokens``."""
    settings = {"with_routes": bool(config.num_experts), "decode_tokens": decode_tokens}
    engine = JaxEngine(config, jnp.float32, WIDTH, mesh=MESH, **settings)
    engine.publish(init_params(config, 0), 7)
    return list(engine.generate(FIVE_PROMPTS, 4, SamplingParams(LIMIT, 1.0, (0, 1), **asked), seed=0))


CUT, TOPS = {"top_k": 5, "top_p": 0.9, "reported": 5}, {"reported": 4}
FORMS = [(CONFIG, 7, CUT)]  # test_turns.py has experts
MORE = [(EXPERTS, 1, {}), (EXPERTS, 7, {}), (CONFIG, 1, CUT), (CONFIG, 3, CUT), (CONFIG, 16, {}), (CONFIG, 7, TOPS)]


@pytest.mark.parametrize(
    ("config", "at_once", "asked"), [*FORMS, *(pytest.param(*form, marks=pytest.mark.harness) for form in MORE)]
)
def test_the_samples_do_not_depend_on_the_budget(config, at_once, asked):
    """The same 20 responses come from one batch and from places that are used again."""
    together = continuous(0, config=config, **asked)
    refilled = continuous(at_once * (LIMIT + WIDTH), config=config, **asked)
    assert len({response.length for response in together}) > 4
    for a, b in zip(together, refilled, strict=True):
        assert (a.prompt_index, a.sample_index, a.truncated) == (b.prompt_index, b.sample_index, b.truncated)
        np.testing.assert_array_equal(a.ids, b.ids)
        assert a.columns.keys() == b.columns.keys()
        for name, column in a.columns.items():
            close = 6e-6 if "logprobs" in name else 0
            np.testing.assert_allclose(column, b.columns[name], atol=close, rtol=0)


BATCHES = {  # rows, responses to a prompt, the budget of responses and the parts of the mesh: slots, unit and group
    (64, 16, 64, 1): (64, 16, 4),  # all of them fit at once
    (64, 16, 40, 1): (40, 4, 1),  # an eighth of 40 is 5, which holds 4 of the 16 responses
    (1024, 16, 300, 1): (288, 16, 2),
    (64, 16, 20, 8): (16, 2, 1),
    (64, 6, 0, 4): (4, 1, 1),  # each part of the mesh has at least one response
    (3, 1, 2, 4): (4, 1, 4),  # there are fewer responses than parts
}


def test_sizes_by_hand():
    """Rows are padded to 2^k or 3 * 2^k, widths to 6 * 2^k, but one of the 40 places stays for a response."""
    assert {form: sizes.batch_sizes(*form) for form in BATCHES} == BATCHES
    assert [sizes.padded_rows(count) for count in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [sizes.padded_width(longest, 6, 40) for longest in (1, 6, 7, 12, 13, 25, 39)] == [6, 6, 12, 12, 24, 39, 39]
    assert [sizes.prefill_rows(CONFIG, *form) for form in ((256, 1), (256, 2), (2**14, 1))] == [1024, 2048, 1]
    words = {"aaabbb": 3, "aaaabb": 2, "aaab": 1, "aba": 1}  # neighbours with equal prompts
    assert {word: sizes.repeats([np.asarray([ord(letter)]) for letter in word]) for word in words} == words
    queue = Queue(np.zeros((5, 2), np.int32), np.ones(5, np.int32), 1, sizes.DecodeSizes(4, 1, 4), most=2)
    assert [rows.tolist() for _, _, rows, _, _ in queue.admitted(np.arange(4))] == [[[0], [1]], [[2], [3]]]
    queue = Queue(np.zeros((5, 2), np.int32), np.ones(5, np.int32), 1, sizes.DecodeSizes(4, 1, 2))
    next(queue.admitted(np.arange(4)))
    ((_, _, rows, into, numbers),) = queue.admitted(np.asarray([2, 3]))  # what fills the group goes into no slot
    assert (rows.tolist(), into.tolist(), numbers.tolist()) == ([[4], [0]], [[2], [4]], [4, 5])
    qwen3_4b = PolicyConfig(151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True)
    assert sizes.cache_row_bytes(qwen3_4b, MESH, 100, jnp.bfloat16, jnp.bfloat16) == 100 * 147_456
    assert sizes.cache_row_bytes(qwen3_4b, MESH, 1, jnp.bfloat16, jnp.float8_e4m3fn) == 147_456 / 2
    assert (sizes.cache_room(1000, 8), sizes.cache_room(None, 2)) == (700, sizes.cache_room(None, 1) / 2)
    assert 0 < sizes.cache_room(None, 1) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
