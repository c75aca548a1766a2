"""Tests of the scores of packed rows: the likeliest tokens at their places, and the distribution cut to a support."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import micro_batch
from tree_batches import cut_log_softmax, with_supports

from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, init_params, lm_head_table
from rljax.policy.score import over_support, packed_logprobs, segment_ends

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=False, initializer_range=0.2)
K, TEMPERATURE = 5, 0.8

# Row 0 has two sequences. Row 1 has one sequence with padding behind it.
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 7, [1] * 8 + [0] * 4])
POSITIONS = jnp.asarray([[*range(5), *range(7)], [*range(8)] + [0] * 4])
INSIDE = np.asarray((POSITIONS > 0) & (SEGMENTS > 0))


def rows():
    """Returns tokens and supports. Responses begin at position 2, and some supports have fewer ids."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, SEGMENTS.shape).astype(np.int32)
    mask = INSIDE & (np.asarray(POSITIONS) >= 2)
    batch = micro_batch(tokens, mask, 0.0, np.zeros(tokens.shape))
    return jnp.asarray(tokens), jnp.asarray(with_supports(batch, CONFIG.vocab_size, K).top_ids)


def reference(params, cut):
    """Returns the same scores from the whole softmax. With ``cut`` the logits outside the support are -inf."""
    tokens, ids = rows()
    hidden, _ = hidden_states(params, CONFIG, tokens, segment_ends(SEGMENTS), POSITIONS)
    logits = jnp.einsum("btd,vd->btv", hidden, lm_head_table(params))[:, :-1] / TEMPERATURE
    logits = jnp.pad(logits, ((0, 0), (1, 0), (0, 0)))  # the state before token t predicts it
    known = INSIDE & (ids >= 0).any(-1) if cut else INSIDE
    logp = cut_log_softmax(logits, ids) if cut else jax.nn.log_softmax(logits)
    p = jnp.exp(logp)
    picked = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
    tops = jnp.where(ids >= 0, jnp.take_along_axis(logp, jnp.maximum(ids, 0), axis=-1), -jnp.inf)
    entropy, collision = -jnp.sum(p * logp, axis=-1), jnp.sum(p**2, axis=-1)
    return [jnp.where(known, x, 0.0) for x in (picked, entropy)] + [tops, jnp.where(known, collision, 0.0)]


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.harness), True])
def test_scores_and_gradients_match_the_whole_softmax(cut):
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=(*SEGMENTS.shape, *more)), jnp.float32) for more in ((), (), (K,))]

    def ours(params):
        options = {"temperature": TEMPERATURE, "top_ids": rows()[1], "cut": cut, "collision": True}
        found = packed_logprobs(params, CONFIG, rows()[0], SEGMENTS, POSITIONS, **options)
        return found.logprobs, found.entropy, found.tops, found.collision

    def differentiated(values_of):
        def summed(params):
            values = values_of(params)
            pairs = zip(weights, values, strict=False)
            return sum(jnp.sum(w * jnp.where(x > -jnp.inf, x, 0.0)) for w, x in pairs), values

        return jax.jit(jax.grad(summed, has_aux=True))(init_params(CONFIG, 0))

    with jax.default_matmul_precision("highest"):
        grads, values = differentiated(ours)
        expected_grads, expected = differentiated(functools.partial(reference, cut=cut))
    for x, y in zip(values, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)
    assert np.isfinite(values[2]).sum() == (rows()[1] >= 0).sum()
    with pytest.raises(ValueError, match="top_ids must be given to score a cut distribution, got None"):
        packed_logprobs(init_params(CONFIG, 0), CONFIG, rows()[0], SEGMENTS, POSITIONS, cut=True)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()), rtol=1e-4)


LOG = np.log


@pytest.mark.parametrize(
    ("logprob", "tops", "ids", "expected", "inside"),
    [
        (-2.0, [-np.inf, -np.inf], [-1, -1], (0.0, 0.0, 0.0), [0, 0]),  # no support
        (-3.25, [-3.25, -np.inf], [7, -1], (0.0, 0.0, 1.0), [1, 0]),  # one token is certain
        # A token lies outside, and the first two of 1/2, 1/4, 1/8 and 1/8 are left, which gives 2/3 and 1/3.
        (-4.0, [LOG(0.5), LOG(0.25)], [0, 1], (-4.0 - LOG(0.75), 0.636514, 5 / 9), [2 / 3, 1 / 3]),
    ],
)
def test_a_cut_by_hand(logprob, tops, ids, expected, inside):
    arrays, cut = (jnp.asarray([logprob]), jnp.asarray([tops])), functools.partial(over_support, ids=jnp.asarray([ids]))
    found = cut(*arrays, collision=True)
    np.testing.assert_allclose([found.logprobs[0], found.entropy[0], found.collision[0]], expected, atol=1e-6)
    np.testing.assert_allclose(np.exp(found.tops[0]), inside, atol=1e-6)
    grads = jax.grad(lambda *given: jnp.sum(cut(*given).logprobs + cut(*given).entropy), (0, 1))(*arrays)
    assert all(np.isfinite(part).all() for part in grads)
    assert max(ids) >= 0 or not any(np.any(part) for part in grads)
