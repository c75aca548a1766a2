"""Equations 2 to 6 of arXiv 2602.01826 on a tabular policy: every expectation is a sum over all responses."""

import itertools

import numpy as np
import pytest
import tabular
from tabular import every_response, free_features, probabilities, token_logprobs, token_scores

from rljax.mismatch import importance_weights, rejection_mask

EXACT = {"rtol": 1e-11, "atol": 1e-13}


class World:
    """Two policies of vocabulary 3 over three tokens, with an advantage for each response, which ``end`` ends."""

    def __init__(self, seed, size, end=None):
        rng = np.random.default_rng(seed)
        self.tokens, self.mask = every_response(3, 3, end)
        self.tables = tabular.random_tables(rng, 3, 3)
        self.rollout_tables = tabular.shifted(self.tables, tabular.random_tables(rng, 3, 3), size)
        self.trainer = token_logprobs(self.tables, self.tokens)
        self.rollout = token_logprobs(self.rollout_tables, self.tokens)
        self.pi, self.mu = probabilities(self.trainer, self.mask), probabilities(self.rollout, self.mask)
        self.scores = token_scores(self.tables, free_features(3, 3), self.tokens) * self.mask[..., None]
        self.advantages = rng.standard_normal(len(self.tokens))
        self.rho = self.pi / self.mu

    def expected_reward(self, tables):
        return np.sum(np.exp(np.sum(self.mask * token_logprobs(tables, self.tokens), axis=1)) * self.advantages)

    def sum(self, drawn, weights=1.0):
        """Returns, as [p], the sum over responses of drawn [n] x A x sum_t weights [n, t] x score."""
        weights = np.broadcast_to(weights, self.mask.shape)
        return np.einsum("n,n,nt,ntp->p", drawn, self.advantages, weights, self.scores)

    @property
    def gradient(self):
        return self.sum(self.pi)

    def weights(self, **settings):
        return importance_weights(self.trainer, self.rollout, self.mask, **settings)[0]

    def bias(self, **settings):
        return np.linalg.norm(self.sum(self.mu, self.weights(**settings)) - self.gradient)


UNCLIPPED = {"mode": "truncate", "threshold": np.inf}
ENDS = pytest.mark.parametrize("end", [None, 0])


@ENDS
@pytest.mark.parametrize("seed", range(3))
def test_equation_2_is_the_gradient(seed, end):
    world = World(seed, 0.5, end)
    assert len(world.tokens) == (27 if end is None else 1 + 2 + 4 * 3)
    assert world.pi.sum() == pytest.approx(1, rel=1e-14)
    np.testing.assert_allclose(world.gradient, tabular.gradient_of(world.expected_reward, world.tables), **EXACT)
    assert np.linalg.norm(world.gradient) > 0.05


@ENDS
def test_equation_3_is_biased_by_the_mismatch(end):
    """The bias is sum_y (mu - pi) A score: zero without mismatch, and proportional to a small mismatch."""
    assert np.linalg.norm(World(0, 0.0, end).sum(World(0, 0.0, end).mu) - World(0, 0.0, end).gradient) < 1e-14
    biases = {}
    for size in (0.001, 0.002, 0.3, 1.0):
        world = World(0, size, end)
        bias = world.sum(world.mu) - world.gradient
        np.testing.assert_allclose(bias, world.sum(world.mu - world.pi), **EXACT)
        biases[size] = np.linalg.norm(bias) / np.linalg.norm(world.gradient)
    assert biases[0.002] / biases[0.001] == pytest.approx(2, rel=0.01)
    assert 0.05 < biases[0.3] < biases[1.0]


@ENDS
@pytest.mark.parametrize("size", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_equation_4_is_unbiased(seed, size, end):
    world = World(seed, size, end)
    weights = world.weights(level="sequence", **UNCLIPPED)
    np.testing.assert_allclose(weights, np.where(world.mask, world.rho[:, None], 0), rtol=1e-11)
    np.testing.assert_allclose(world.sum(world.mu, weights), world.gradient, **EXACT)


def test_beyond_exp_20_equation_4_is_truncated():
    world = World(0, 3.0)
    weights = world.weights(level="sequence", **UNCLIPPED)
    np.testing.assert_allclose(weights[:, 0], np.minimum(world.rho, np.exp(20)), rtol=1e-11)
    assert np.linalg.norm(world.sum(world.mu, weights) - world.gradient) > 1e-3


@ENDS
@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0])
def test_equations_5_and_6_leave_the_bias_of_what_they_cut(threshold, end):
    """The bias of 5 is at most K (1 + chi2) / (4 C), K the largest |A score|. In 6 responses above C are missing."""
    world = World(2, 1.0, end)
    five, six = ({"level": "sequence", "mode": mode, "threshold": threshold} for mode in ("truncate", "mask"))
    expected = world.sum(world.mu * np.minimum(world.rho, threshold))
    np.testing.assert_allclose(world.sum(world.mu, world.weights(**five)), expected, **EXACT)
    largest = np.abs(world.advantages) * np.linalg.norm(world.scores.sum(axis=1), axis=1)
    assert 1e-3 < world.bias(**five) <= largest.max() * (world.mu @ world.rho**2) / (4 * threshold)
    dropped = world.rho > threshold
    assert 0 < dropped.sum() < len(dropped)
    np.testing.assert_allclose(world.sum(world.mu, world.weights(**six)), world.sum(world.pi * ~dropped), **EXACT)
    assert world.bias(**six) > 1e-3


@ENDS
def test_token_level_corrects_the_token_and_not_its_prefix(end):
    """Token t comes from pi, and its prefix and continuation from mu. So a bias is left."""
    world = World(0, 1.0, end)
    hybrids = world.mu[:, None] * np.exp(np.where(world.mask, world.trainer - world.rollout, 0))
    np.testing.assert_allclose(hybrids.sum(axis=0), 1, rtol=1e-12)
    expected = np.einsum("nt,n,ntp->p", hybrids, world.advantages, world.scores)
    found = world.sum(world.mu, world.weights(level="token", **UNCLIPPED))
    np.testing.assert_allclose(found, expected, **EXACT)
    assert np.linalg.norm(found - world.gradient) > 0.05 * np.linalg.norm(world.gradient)


@ENDS
def test_the_geometric_level_is_the_root_of_the_sequence_ratio(end):
    world = World(0, 1.0, end)
    root = world.rho ** (1 / world.mask.sum(axis=1))
    found = world.sum(world.mu, world.weights(level="geometric", **UNCLIPPED))
    np.testing.assert_allclose(found, world.sum(world.mu * root), **EXACT)
    assert world.bias(level="geometric", **UNCLIPPED) > 0.01


def test_normalising_is_biased_in_small_batches_only():
    """In batches of N responses equation 4 is unbiased; normalised, a share 1 / N of equation 3's bias is left."""
    world, biases = World(0, 0.02), {}
    values = np.einsum("n,ntp->np", world.advantages, world.scores)
    for number, normalize in ((2, False), (1, True), (2, True), (3, True)):
        mean = np.zeros(39)
        for batch in itertools.combinations_with_replacement(range(27), number):
            rows, orders = list(batch), len(set(itertools.permutations(batch)))
            arrays = (world.trainer[rows], world.rollout[rows], world.mask[rows])
            weights = importance_weights(*arrays, level="sequence", normalize=normalize, **UNCLIPPED)[0]
            mean += orders * np.prod(world.mu[rows]) * (weights[:, 0] @ values[rows]) / number
        biases[number, normalize] = np.linalg.norm(mean - world.gradient)
    assert biases[2, False] < 1e-13
    plain = np.linalg.norm(world.sum(world.mu) - world.gradient)
    assert biases[1, True] == pytest.approx(plain, rel=1e-11)
    assert [biases[n, True] / plain for n in (2, 3)] == pytest.approx([1 / 2, 1 / 3], rel=0.05)


REJECTIONS = [
    ("k3", 0.1, lambda lr, n: np.sum(np.exp(lr) - 1 - lr, axis=1) / n <= 0.1),
    ("geometric", (0.8, 1.25), lambda lr, n: np.abs(np.sum(lr, axis=1) / n) <= np.log(1.25)),
    ("veto", 0.6, lambda lr, n: np.all(np.exp(lr) >= 0.6, axis=1)),
]


@ENDS
@pytest.mark.parametrize(("statistic", "threshold", "keeps"), REJECTIONS)
def test_rejection_samples_from_the_kept_responses(statistic, threshold, keeps, end):
    """The shrunken denominator makes the mean conditional under mu on the kept responses, so equation 4 is biased."""
    world = World(3, 0.5, end)
    found, stats = rejection_mask(world.trainer, world.rollout, world.mask, statistic=statistic, threshold=threshold)
    keep = keeps(np.where(world.mask, world.trainer - world.rollout, 0), world.mask.sum(axis=1))
    assert 0 < keep.sum() < len(keep)
    np.testing.assert_array_equal(found, world.mask & keep[:, None])
    assert stats["rejected_sequence_fraction"] == pytest.approx(1 - keep.mean())
    given_kept = world.mu * keep / (world.mu @ keep)
    share = world.mu @ (found[:, 0] > 0)
    np.testing.assert_allclose(world.sum(world.mu, found / share), world.sum(given_kept), **EXACT)
    rho = world.weights(level="sequence", **UNCLIPPED)
    bias = world.sum(world.mu, rho * found / share) - world.gradient
    assert np.linalg.norm(bias) > 0.01 * np.linalg.norm(world.gradient)
