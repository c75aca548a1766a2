"""Drift of the state occupancy, and the T^2 bound on the bias of equation 3, checked by enumeration.

This is appendix B of arXiv 2602.01826. The policy pi is differentiated (its score), and mu is sampled. D is the largest
total variation between their next-token distributions over all prefixes. S is the largest norm of a token's score, and
abs(A) <= M. With T tokens:

    occupancy   TV of the first t tokens <= 1 - (1 - D)^t <= t D
    bias        |E_mu - E_pi of sum_t A_t score_t| <= T (T + 1) D S M   for A_t of the tokens up to t
                |E_mu - E_pi of A sum_t score_t|   <= 2 T^2 D S M       for one A of the whole response

The paper writes Delta_max for D and B for S, and has rewards of 0 and 1 (M = 1). Its theorem B.1 is 2 B Delta_max T^2.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import (
    every_response,
    log_softmax,
    prefixes,
    probabilities,
    random_tables,
    shifted,
    token_logprobs,
    token_scores,
)

LENGTHS = range(1, 9)


def drift(trainer, rollout):
    """Returns, for t = 1 .. T, the total variation between the two policies' distributions of the first t tokens.

    The result is [T].
    """
    vocabulary, out, pi, mu = trainer[0].shape[1], [], np.ones(1), np.ones(1)
    for table, other in zip(trainer, rollout, strict=True):
        pi = (pi[:, None] * np.exp(log_softmax(table))).reshape(-1)
        mu = (mu[:, None] * np.exp(log_softmax(other))).reshape(-1)
        out.append(0.5 * np.abs(pi - mu).sum())
    assert pi.size == vocabulary ** len(trainer)
    return np.array(out)


def largest_distance(trainer, rollout):
    both = zip(trainer, rollout, strict=True)
    return max(0.5 * np.abs(np.exp(log_softmax(a)) - np.exp(log_softmax(b))).sum(axis=1).max() for a, b in both)


class Case:
    """Two policies with shared parameters, and every quantity of the bound."""

    def __init__(self, trainer, rollout, features):
        self.length = len(trainer)
        self.tokens, mask = every_response(trainer[0].shape[1], self.length)
        self.scores = token_scores(trainer, features, self.tokens)
        self.trainer, self.rollout = token_logprobs(trainer, self.tokens), token_logprobs(rollout, self.tokens)
        self.surplus = probabilities(self.rollout, mask) - probabilities(self.trainer, mask)
        self.distance = largest_distance(trainer, rollout)
        self.drift = drift(trainer, rollout)
        self.unit = self.distance * np.linalg.norm(self.scores, axis=-1).max()

    def bias(self, advantages):
        """Returns the norm of E_mu - E_pi of sum_t A_t score_t; the advantages are [n, T]."""
        return np.linalg.norm(np.einsum("n,nt,ntp->p", self.surplus, advantages, self.scores))


def random_case(seed, length, vocabulary, size):
    rng = np.random.default_rng(seed)
    trainer = random_tables(rng, vocabulary, length, scale=rng.uniform(0, 3))
    rollout = shifted(trainer, random_tables(rng, vocabulary, length), size)
    return Case(trainer, rollout, [rng.standard_normal((*table.shape, 1)) for table in trainer])


def by_prefix(rng, tokens, vocabulary):
    """Returns advantages [n, T] in -1 .. 1; each is a function of the tokens up to its own."""
    own = prefixes(tokens, vocabulary) * vocabulary + tokens
    return np.stack([rng.uniform(-1, 1, own.max() + 1)[own[:, t]] for t in range(tokens.shape[1])], axis=1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (6, 2), (7, 2), (8, 2)]),
    size=st.sampled_from([0.01, 0.1, 1.0, 5.0]),
)
def test_random_policies_stay_under_every_bound(seed, shape, size):
    """The signs are chosen against the bounds, for token-wise and whole-response sums with one parameter."""
    case = random_case(seed, *shape, size)
    step = np.arange(1, case.length + 1)
    assert np.all(case.drift <= 1 - (1 - case.distance) ** step + 1e-12)
    assert np.all(case.drift <= step * case.distance + 1e-12)
    assert np.all(np.diff(case.drift) >= -1e-12)
    assert case.drift[-1] == pytest.approx(0.5 * np.abs(case.surplus).sum(), rel=1e-9, abs=1e-14)
    length, vocabulary = case.length, shape[1]
    own = prefixes(case.tokens, vocabulary) * vocabulary + case.tokens
    worst = np.zeros(case.tokens.shape)
    for t in range(length):
        surplus = np.bincount(own[:, t], weights=case.surplus)[own[:, t]]
        worst[:, t] = np.sign(surplus * case.scores[:, t, 0])
    assert case.bias(worst) <= length * (length + 1) * case.unit
    whole = np.sign(case.surplus * case.scores.sum(axis=1)[:, 0])
    assert case.bias(worst) >= case.bias(by_prefix(np.random.default_rng(seed), case.tokens, vocabulary))
    assert case.bias(np.repeat(whole[:, None], length, axis=1)) <= 2 * length**2 * case.unit


def slipping_policies(length, slip=1e-4):
    """Returns a case in which mu slips into token 2 and pi (almost) never does.

    The vocabulary is 3. One parameter at 0 tilts token 1 against token 0. Before the first slip both policies toss a
    coin between 0 and 1, and mu slips with probability ``slip``. After it both toss the coin. So D = slip and S = 1/2.
    The occupancies differ by 1 - (1 - slip)^t, the largest possible value.
    """
    coin, never = np.log([0.5, 0.5]), -60.0
    trainer = [np.tile([*coin, never], (3**t, 1)) for t in range(length)]
    rollout = [np.array(table) for table in trainer]
    for t, table in enumerate(rollout):
        digits = np.array([np.base_repr(s, 3).zfill(t) if t else "" for s in range(3**t)])
        table[np.array(["2" not in text for text in digits])] = [*(coin + np.log1p(-slip)), np.log(slip)]
    features = [np.tile([[-0.5], [0.5], [0.0]], (3**t, 1, 1)) for t in range(length)]
    return Case(trainer, rollout, features)


def slipped(case):
    """Returns [n, T] whether token 2 is among the tokens up to each."""
    return np.cumsum(case.tokens == 2, axis=1) > 0


def token_wise_worst(case):
    """Returns A_t = +-1 with the sign of its score after the slip, and the opposite sign before."""
    return np.where(slipped(case), 1.0, -1.0) * np.where(case.tokens == 1, 1.0, -1.0)


def whole_response_worst(case):
    """Returns A = +-1 with the sign of the response's score if it slipped, and the opposite sign if not."""
    total = case.scores.sum(axis=1)[:, 0]
    sign = np.where(slipped(case)[:, -1], 1.0, -1.0) * np.where(total >= 0, 1.0, -1.0)
    return np.repeat(sign[:, None], case.length, axis=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_constructed_case_drifts_at_the_highest_rate(length):
    case = slipping_policies(length, slip=0.05)
    assert case.distance == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(case.drift, 1 - 0.95 ** np.arange(1, length + 1), rtol=1e-12)
    assert case.unit == pytest.approx(0.05 / 2, rel=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_constructed_case_comes_near_the_token_wise_bound(length):
    """Its bias is T^2 D S M up to order D.

    This is the share T / (T + 1) of the bound, so an eighth of the bound fails.
    """
    case = slipping_policies(length)
    bias = case.bias(token_wise_worst(case))
    assert bias == pytest.approx(length**2 * case.unit, rel=2 * length * 1e-4)
    assert length * (length + 1) * case.unit / 4 < bias <= length * (length + 1) * case.unit


@pytest.mark.parametrize("length", LENGTHS)
def test_the_constructed_case_is_near_the_response_bound(length):
    """Up to T = 8 the bias is within a factor 4 of the bound.

    Its share, the mean abs(sum of coins) over T, falls like sqrt(2 / (pi T)).
    """
    coins = {1: 1.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 1.875, 6: 1.875, 7: 2.1875, 8: 2.1875}
    case = slipping_policies(length)
    bias = case.bias(whole_response_worst(case))
    expected = length * case.unit * (coins[length] + coins.get(length - 1, 0.0))
    assert bias == pytest.approx(expected, rel=2 * length * 1e-4)
    assert 2 * length**2 * case.unit / 4 < bias <= 2 * length**2 * case.unit


def test_one_step_attains_the_bounds():
    """With T = 1 and two tokens, pi tosses a coin and mu leans by D.

    With A = 1 on both tokens the bias is 2 D S, exactly both bounds.
    """
    case = Case([np.zeros((1, 2))], [np.log([[0.4, 0.6]])], [np.array([[[-0.5], [0.5]]])])
    assert case.distance == pytest.approx(0.1)
    assert case.bias(np.ones((2, 1))) == pytest.approx(2 * case.unit, rel=1e-12)
    assert case.unit == pytest.approx(0.05)
