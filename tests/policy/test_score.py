"""Tests of the scores of packed rows: the likeliest tokens at their places, and the distribution cut to a support."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_batches import cut_log_softmax

from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, init_params, lm_head_table
from rljax.policy.score import over_support, packed_logprobs
from rljax.policy.trees import segment_ends

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=False, initializer_range=0.2)
K, TEMPERATURE = 5, 0.8

# Row 0 has two sequences. Row 1 has one sequence with padding behind it.
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4])
POSITIONS = jnp.asarray([[*range(5), *range(7)], [*range(8)] + [0] * 4])
INSIDE = np.asarray((POSITIONS > 0) & (SEGMENTS > 0))


def rows():
    """Returns tokens and supports.

    Responses begin at position 2, and some supports have fewer ids but always the sampled one.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, SEGMENTS.shape).astype(np.int32)
    ids = np.full((*tokens.shape, K), -1, np.int32)
    for place in zip(*np.nonzero(INSIDE & (np.asarray(POSITIONS) >= 2)), strict=True):
        others = rng.permutation(np.delete(np.arange(CONFIG.vocab_size), tokens[place]))
        size = int(rng.integers(1, K + 1))
        ids[place][:size] = rng.permutation([tokens[place], *others[: size - 1]])
    return jnp.asarray(tokens), jnp.asarray(ids)


def scores(params, **options):
    tokens, ids = rows()
    where = (tokens, segment_ends(SEGMENTS), POSITIONS)
    return packed_logprobs(params, CONFIG, *where, temperature=TEMPERATURE, top_ids=ids, **options)


def reference(params, cut):
    """Returns the same scores from the whole softmax. With ``cut`` the logits outside the support are -inf."""
    tokens, ids = rows()
    hidden, _ = hidden_states(params, CONFIG, tokens, segment_ends(SEGMENTS), POSITIONS)
    logits = jnp.einsum("btd,vd->btv", hidden, lm_head_table(params))[:, :-1] / TEMPERATURE
    logits = jnp.pad(logits, ((0, 0), (1, 0), (0, 0)))  # the state before token t predicts it
    known = INSIDE
    if cut:
        known = INSIDE & (ids >= 0).any(-1)
    logp = cut_log_softmax(logits, ids) if cut else jax.nn.log_softmax(logits)
    p = jnp.exp(logp)
    picked = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
    tops = jnp.where(ids >= 0, jnp.take_along_axis(logp, jnp.maximum(ids, 0), axis=-1), -jnp.inf)
    entropy, collision = -jnp.sum(p * logp, axis=-1), jnp.sum(p**2, axis=-1)
    return [jnp.where(known, x, 0.0) for x in (picked, entropy)] + [tops, jnp.where(known, collision, 0.0)]


@pytest.mark.parametrize("cut", [False, True])
def test_scores_match_the_whole_softmax(cut):
    params = init_params(CONFIG, 0)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda params: scores(params, cut=cut, collision=True))(params)
        expected = jax.jit(lambda params: reference(params, cut))(params)
    ours = (found.logprobs, found.entropy, found.tops, found.collision)
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)
    assert np.isfinite(found.tops).sum() == (rows()[1] >= 0).sum()


@pytest.mark.parametrize("cut", [False, True])
def test_gradients_match_the_whole_softmax(cut):
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=(*SEGMENTS.shape, *more)), jnp.float32) for more in ((), (), (K,))]

    def summed(values):
        return sum(jnp.sum(w * jnp.where(x > -jnp.inf, x, 0.0)) for w, x in zip(weights, values, strict=True))

    def ours(params):
        found = scores(params, cut=cut)
        return summed((found.logprobs, found.entropy, found.tops))

    params = init_params(CONFIG, 0)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(ours))(params)
        expected = jax.jit(jax.grad(lambda params: summed(reference(params, cut)[:3])))(params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()), rtol=1e-4)


def test_a_cut_moves_no_token_outside_its_support():
    """The gradient of a cut log-probability is 0 at the logits of all other tokens."""

    @jax.jit
    @jax.grad
    def gradient(logits):
        logp = jax.nn.log_softmax(logits)
        return over_support(logp[1], logp[ids], ids).logprobs

    ids = jnp.asarray([1, 3])
    grads = gradient(jnp.log(jnp.asarray([0.5, 0.2, 0.1, 0.2])))
    np.testing.assert_allclose(grads, [0.0, 0.5, 0.0, -0.5], atol=1e-6)


def test_a_cut_of_four_tokens_by_hand():
    """The first two of 1/2, 1/4, 1/8 and 1/8 are left, which gives 2/3 and 1/3."""
    logp = jnp.log(jnp.asarray([1 / 2, 1 / 4, 1 / 8, 1 / 8]))
    tops = jnp.append(logp[:2], -jnp.inf)
    found = over_support(logp[1], tops, jnp.asarray([0, 1, -1]), collision=True)
    assert float(found.logprobs) == pytest.approx(np.log(1 / 3), abs=1e-6)
    np.testing.assert_allclose(found.tops, [np.log(2 / 3), np.log(1 / 3), -np.inf], atol=1e-6)
    assert float(found.entropy) == pytest.approx(-2 / 3 * np.log(2 / 3) - 1 / 3 * np.log(1 / 3), abs=1e-6)
    assert float(found.collision) == pytest.approx(5 / 9, abs=1e-6)


def test_a_position_without_support_has_zeros():
    where = functools.partial(over_support, ids=jnp.full((1, 2), -1), collision=True)
    nothing = jnp.full((1, 2), -jnp.inf)
    found = where(jnp.asarray([-2.0]), nothing)
    assert [float(x[0]) for x in (found.logprobs, found.entropy, found.collision)] == [0.0, 0.0, 0.0]
    assert np.array_equal(found.tops, nothing)
    grads = jax.jit(jax.grad(lambda a, b: jnp.sum(where(a, b).logprobs + where(a, b).entropy), (0, 1)))
    assert not any(np.any(part) for part in grads(jnp.asarray([-2.0]), nothing))


def test_a_support_of_one_token_is_certain():
    found = over_support(jnp.asarray([-3.25]), jnp.asarray([[-3.25, -jnp.inf]]), jnp.asarray([[7, -1]]), collision=True)
    assert [float(x[0]) for x in (found.logprobs, found.entropy, found.collision)] == [0.0, 0.0, 1.0]


def test_a_token_outside_the_support_is_finite():
    found = over_support(jnp.asarray([-4.0]), jnp.log(jnp.asarray([[0.5, 0.25]])), jnp.asarray([[0, 1]]))
    assert float(found.logprobs[0]) == pytest.approx(-4.0 - np.log(0.75), abs=1e-6)


def test_a_cut_without_likeliest_tokens_is_refused():
    tokens, _ = rows()
    with pytest.raises(ValueError, match="top_ids must be given to score a cut distribution, got None"):
        packed_logprobs(init_params(CONFIG, 0), CONFIG, tokens, SEGMENTS, POSITIONS, cut=True)
