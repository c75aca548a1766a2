"""Tests of cut sampling: supports that are worked out by hand, and the frequencies of the sampled tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.rollout.likeliest import Selection, draw_tokens, sample_support, selection_of, support
from rljax.rollout.types import SamplingParams

# Token 2 has probability 0.4, token 0 has 0.3, token 3 has 0.2 and token 1 has 0.1.
LOGITS = jnp.log(jnp.asarray([[0.3, 0.1, 0.4, 0.2]]))


def cut(logits, selection):
    """Returns the ids of the support and its log-probabilities, in the form that is reported for a sample."""
    keys = jax.random.split(jax.random.key(0), len(logits))
    new = sample_support(keys, logits, selection._replace(reported=selection.top_k))
    return new.arrays["top_ids"], new.arrays["top_logprobs"]


@pytest.mark.parametrize(
    ("selection", "ids", "probabilities"),
    [
        (Selection(0, 4), [2, 0, 3, 1], [0.4, 0.3, 0.2, 0.1]),
        (Selection(0, 3), [2, 0, 3], [4 / 9, 3 / 9, 2 / 9]),
        (Selection(0, 1), [2], [1.0]),
        (Selection(0, 4, top_p=0.75), [2, 0, 3, -1], [4 / 9, 3 / 9, 2 / 9, 0]),
        (Selection(0, 4, top_p=0.69), [2, 0, -1, -1], [4 / 7, 3 / 7, 0, 0]),
        (Selection(0, 4, top_p=0.01), [2, -1, -1, -1], [1, 0, 0, 0]),
        (Selection(0, 4, min_p=0.6), [2, 0, -1, -1], [4 / 7, 3 / 7, 0, 0]),
        # Before renormalisation the first two tokens have 0.7, below top_p = 0.75. Among the top three they have 0.78.
        (Selection(0, 3, top_p=0.75), [2, 0, -1], [4 / 7, 3 / 7, 0]),
        # min_p leaves the same three first, so top_p leaves two. If min_p came after top_p, all three would stay.
        (Selection(0, 4, top_p=0.75, min_p=0.3), [2, 0, -1, -1], [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_supports_by_hand(selection, ids, probabilities):
    found, logits = support(LOGITS, selection)
    assert found.tolist() == [ids]
    assert np.isneginf(logits[0]).tolist() == [token < 0 for token in ids]
    again, logprobs = cut(LOGITS, selection)
    assert again.tolist() == [ids]
    np.testing.assert_allclose(np.exp(logprobs[0]), probabilities, atol=1e-6)
    assert np.isneginf(logprobs[0]).tolist() == [token < 0 for token in ids]


def test_of_equal_tokens_the_lower_ids_stay():
    ids, logits = support(jnp.asarray([[0.0, 1.0, 1.0, 1.0]]), Selection(0, 2))
    assert (ids.tolist(), logits.tolist()) == ([[1, 2]], [[1.0, 1.0]])


def test_the_likeliest_tokens_keep_their_whole_probabilities():
    new = draw_tokens(LOGITS + 7.0, jnp.full(1, 7.0), None, Selection(2, greedy=True))
    ids, logprobs = new.arrays["top_ids"], new.arrays["top_logprobs"]
    assert ids.tolist() == [[2, 0]]
    assert ids.dtype == jnp.int32
    np.testing.assert_allclose(np.exp(logprobs), [[0.4, 0.3]], atol=1e-6)


@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_supports_are_those_of_vllm(top_p, min_p):
    """vLLM 0.32 drops tokens from the least likely up while their summed probability is at most 1 - top_p."""
    logits = np.random.default_rng(0).normal(0, 2, (200, 50)).astype(np.float32)
    ids, logprobs = cut(jnp.asarray(logits), Selection(0, 12, top_p, min_p))
    for row, found, values in zip(logits.astype(np.float64), np.asarray(ids), np.asarray(logprobs), strict=True):
        p = np.exp(row - row.max())
        kept = np.where((p < min_p) | (row < np.sort(row)[-12]), 0.0, p)
        upwards = np.argsort(kept)
        dropped = np.cumsum(kept[upwards] / kept.sum()) <= 1 - top_p
        dropped[-1] = False
        kept[upwards[dropped]] = 0.0
        assert set(found[found >= 0].tolist()) == set(np.flatnonzero(kept).tolist())
        np.testing.assert_allclose(values[found >= 0], np.log((kept / kept.sum())[found[found >= 0]]), atol=1e-5)
        assert (np.diff(values[found >= 0]) <= 0).all()


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
    assert selection_of(SamplingParams(8, 0.0, top_k=3, top_p=0.5, min_p=0.1, reported=3)) == Selection(3, greedy=True)
    assert selection_of(SamplingParams(8, 0.7, top_k=3, top_p=0.5, min_p=0.1, reported=2)) == Selection(2, 3, 0.5, 0.1)
    assert selection_of(SamplingParams(8)) == Selection()
