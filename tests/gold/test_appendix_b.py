"""Appendix B of arXiv 2602.01826 by enumeration: drift of the occupancy, and the T^2 bound on the bias of equation 3.

docs/theory.md has the bounds: D is the largest distance of next tokens, and S the largest norm of a token's score.
"""

import numpy as np
import pytest
import tabular
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import every_response, log_softmax, prefixes, random_tables, token_scores

LENGTHS = range(1, 9)


def drift(trainer, rollout):
    """Returns [T], the total variation between the two policies' distributions of the first t tokens."""
    out, pi, mu = [], np.ones(1), np.ones(1)
    for table, other in zip(trainer, rollout, strict=True):
        pi = (pi[:, None] * np.exp(log_softmax(table))).reshape(-1)
        mu = (mu[:, None] * np.exp(log_softmax(other))).reshape(-1)
        out.append(0.5 * np.abs(pi - mu).sum())
    return np.array(out)


class Case:
    """Two policies with shared parameters, and every quantity of the bound."""

    def __init__(self, trainer, rollout, features):
        self.length = len(trainer)
        self.tokens, mask = every_response(trainer[0].shape[1], self.length)
        self.scores = token_scores(trainer, features, self.tokens)
        pi, mu = (tabular.probabilities(tabular.token_logprobs(x, self.tokens), mask) for x in (trainer, rollout))
        pairs = [[np.exp(log_softmax(table)) for table in both] for both in zip(trainer, rollout, strict=True)]
        self.surplus, self.distance = mu - pi, max(0.5 * np.abs(a - b).sum(axis=1).max() for a, b in pairs)
        self.drift = drift(trainer, rollout)
        self.unit = self.distance * np.linalg.norm(self.scores, axis=-1).max()

    def bias(self, advantages):
        """Returns the norm of E_mu - E_pi of sum_t A_t score_t; the advantages are [n, T]."""
        return np.linalg.norm(np.einsum("n,nt,ntp->p", self.surplus, advantages, self.scores))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (6, 2), (7, 2), (8, 2)]),
    size=st.sampled_from([0.01, 0.1, 1.0, 5.0]),
)
def test_random_policies_stay_under_every_bound(seed, shape, size):
    """The signs are chosen against the bounds, for token-wise and whole-response sums with one parameter."""
    rng, (length, vocabulary), step = np.random.default_rng(seed), shape, np.arange(1, shape[0] + 1)
    trainer = random_tables(rng, vocabulary, length, scale=rng.uniform(0, 3))
    rollout = tabular.shifted(trainer, random_tables(rng, vocabulary, length), size)
    case = Case(trainer, rollout, [rng.standard_normal((*table.shape, 1)) for table in trainer])
    assert np.all(case.drift <= 1 - (1 - case.distance) ** step + 1e-12)
    assert np.all(case.drift <= step * case.distance + 1e-12)
    assert np.all(np.diff(case.drift) >= -1e-12)
    assert case.drift[-1] == pytest.approx(0.5 * np.abs(case.surplus).sum(), rel=1e-9, abs=1e-14)
    own = prefixes(case.tokens, vocabulary) * vocabulary + case.tokens
    worst = np.zeros(case.tokens.shape)
    for t in range(length):
        surplus = np.bincount(own[:, t], weights=case.surplus)[own[:, t]]
        worst[:, t] = np.sign(surplus * case.scores[:, t, 0])
    assert case.bias(worst) <= length * (length + 1) * case.unit
    whole = np.sign(case.surplus * case.scores.sum(axis=1)[:, 0])
    draw = np.random.default_rng(seed).uniform(-1, 1, (length, own.max() + 1))
    assert case.bias(worst) >= case.bias(np.stack([draw[t][own[:, t]] for t in range(length)], axis=1))
    assert case.bias(np.repeat(whole[:, None], length, axis=1)) <= 2 * length**2 * case.unit


def slipping_policies(length, slip=1e-4):
    """Returns a case in which mu slips into token 2 with probability ``slip``, once, and pi (almost) never does.

    Else both toss a coin between 0 and 1, which one parameter at 0 tilts. So D = slip and S = 1/2.
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


@pytest.mark.parametrize("length", LENGTHS)
def test_the_constructed_case_comes_near_each_bound(length):
    """Its drift attains the bound, A_t has a bias of T^2 D S, and one A grows with the mean abs(sum of coins)."""
    case = slipping_policies(length, slip=0.05)
    assert case.distance == pytest.approx(0.05, rel=1e-12)
    np.testing.assert_allclose(case.drift, 1 - 0.95 ** np.arange(1, length + 1), rtol=1e-12)
    case = slipping_policies(length)
    assert case.unit == pytest.approx(1e-4 / 2, rel=1e-9)
    # The signs are those of the score after the slip, and the opposite ones before.
    of_tokens = np.where(slipped(case), 1.0, -1.0) * np.where(case.tokens == 1, 1.0, -1.0)
    total = case.scores.sum(axis=1)
    of_response = np.where(slipped(case)[:, -1:], 1.0, -1.0) * np.where(total >= 0, 1.0, -1.0)
    coins = {1: 1.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 1.875, 6: 1.875, 7: 2.1875, 8: 2.1875}
    for advantages, expected, bound in (
        (of_tokens, length**2, length * (length + 1)),
        (np.repeat(of_response, length, axis=1), length * (coins[length] + coins.get(length - 1, 0.0)), 2 * length**2),
    ):
        bias = case.bias(advantages) / case.unit
        assert bias == pytest.approx(expected, rel=2 * length * 1e-4)
        assert bound / 4 < bias <= bound


def test_one_step_attains_the_bounds():
    """Between two tokens pi tosses a coin and mu leans by D. With A = 1 the bias is 2 D S, exactly both bounds."""
    case = Case([np.zeros((1, 2))], [np.log([[0.4, 0.6]])], [np.array([[[-0.5], [0.5]]])])
    assert case.bias(np.ones((2, 1))) == pytest.approx(2 * case.unit, rel=1e-12)
    assert (case.distance, case.unit) == (pytest.approx(0.1), pytest.approx(0.05))
