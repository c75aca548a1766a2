"""Equations 2 to 6 of arXiv 2602.01826 on a tabular policy.

Every expectation is a sum over all responses in float64.
"""

import itertools
import json
import re
from pathlib import Path

import correction_bias
import numpy as np
import pytest
from tabular import (
    every_response,
    free_features,
    gradient_of,
    probabilities,
    random_tables,
    shifted,
    token_logprobs,
    token_scores,
)

from rljax.mismatch import importance_weights, rejection_mask

ROOT = Path(__file__).parents[2]

EXACT = {"rtol": 1e-11, "atol": 1e-13}


class World:
    """Two policies of vocabulary 3 over three tokens, with an advantage for each response.

    The token ``end`` ends a response.
    """

    def __init__(self, seed, size, end=None):
        rng = np.random.default_rng(seed)
        self.tokens, self.mask = every_response(3, 3, end)
        self.tables = random_tables(rng, 3, 3)
        self.rollout_tables = shifted(self.tables, random_tables(rng, 3, 3), size)
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
def test_all_responses_are_there_once(end):
    world = World(0, 0.5, end)
    assert len(world.tokens) == (27 if end is None else 1 + 2 + 4 * 3)
    assert world.pi.sum() == pytest.approx(1, rel=1e-14)
    assert world.mu.sum() == pytest.approx(1, rel=1e-14)
    if end is not None:
        assert sorted(set(world.mask.sum(axis=1))) == [1, 2, 3]


@ENDS
@pytest.mark.parametrize("seed", range(3))
def test_equation_2_is_the_gradient(seed, end):
    world = World(seed, 0.5, end)
    np.testing.assert_allclose(world.gradient, gradient_of(world.expected_reward, world.tables), **EXACT)
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
    """The exponent is clipped at 20, so the bias is the one of C = exp(20)."""
    world = World(0, 3.0)
    assert np.sum(world.rho > np.exp(20)) == 1
    weights = world.weights(level="sequence", **UNCLIPPED)
    np.testing.assert_allclose(weights[:, 0], np.minimum(world.rho, np.exp(20)), rtol=1e-11)
    assert np.linalg.norm(world.sum(world.mu, weights) - world.gradient) > 1e-3


@ENDS
@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0])
def test_equation_5_leaves_the_bias_of_what_it_cuts_off(threshold, end):
    """The bias is sum_y mu (min(rho, C) - rho) A score.

    It is at most K (1 + chi2) / (4 C), where K is the largest |A score|.
    """
    world = World(2, 1.0, end)
    settings = {"level": "sequence", "mode": "truncate", "threshold": threshold}
    expected = world.sum(world.mu * np.minimum(world.rho, threshold)) - world.gradient
    np.testing.assert_allclose(world.sum(world.mu, world.weights(**settings)) - world.gradient, expected, **EXACT)
    largest = np.abs(world.advantages) * np.linalg.norm(world.scores.sum(axis=1), axis=1)
    assert 1e-3 < world.bias(**settings) <= largest.max() * (world.mu @ world.rho**2) / (4 * threshold)


@ENDS
@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0])
def test_equation_6_leaves_the_bias_of_what_it_drops(threshold, end):
    """The responses above C are missing from equation 2 completely, because the denominator stays."""
    world = World(2, 1.0, end)
    settings = {"level": "sequence", "mode": "mask", "threshold": threshold}
    dropped = world.rho > threshold
    assert 0 < dropped.sum() < len(dropped)
    np.testing.assert_allclose(world.sum(world.mu, world.weights(**settings)), world.sum(world.pi * ~dropped), **EXACT)
    assert world.bias(**settings) > 1e-3


@ENDS
def test_token_level_corrects_the_token_and_not_its_prefix(end):
    """Token t comes from pi, and its prefix and continuation from mu.

    Each position has its own hybrid distribution, so a bias is left.
    """
    world = World(0, 1.0, end)
    ratio = np.where(world.mask, world.trainer - world.rollout, 0)
    expected = np.zeros(39)
    for t in range(3):
        hybrid = world.mu * np.exp(ratio[:, t])
        assert hybrid.sum() == pytest.approx(1, rel=1e-12)
        expected += np.einsum("n,n,np->p", hybrid, world.advantages, world.scores[:, t])
    found = world.sum(world.mu, world.weights(level="token", **UNCLIPPED))
    np.testing.assert_allclose(found, expected, **EXACT)
    assert np.linalg.norm(found - world.gradient) > 0.05 * np.linalg.norm(world.gradient)


def test_token_level_is_equation_4_for_one_mismatched_token():
    """The mismatch is only at the last position.

    Every earlier score has too small a weight, and the last score has the right one.
    """
    world = World(0, 1.0)
    world.rollout_tables[:2] = world.tables[:2]
    world.rollout = token_logprobs(world.rollout_tables, world.tokens)
    world.mu = probabilities(world.rollout, world.mask)
    token, sequence = (world.weights(level=level, **UNCLIPPED) for level in ("token", "sequence"))
    np.testing.assert_allclose(token[:, 2], sequence[:, 2], rtol=1e-11)
    np.testing.assert_allclose(token[:, :2], 1.0, rtol=1e-14)
    last = np.arange(39) >= 12
    found = world.sum(world.mu, token)
    np.testing.assert_allclose(found[last], world.gradient[last], **EXACT)
    assert np.linalg.norm((found - world.gradient)[~last]) > 1e-3


@ENDS
def test_the_geometric_level_is_the_root_of_the_sequence_ratio(end):
    world = World(0, 1.0, end)
    root = world.rho ** (1 / world.mask.sum(axis=1))
    found = world.sum(world.mu, world.weights(level="geometric", **UNCLIPPED))
    np.testing.assert_allclose(found, world.sum(world.mu * root), **EXACT)
    assert world.bias(level="geometric", **UNCLIPPED) > 0.01


def test_normalising_is_biased_in_small_batches_only():
    """The test enumerates every batch of N responses.

    Equation 4 is unbiased; normalised, a share 1 / N of equation 3's bias is left.
    """
    world = World(0, 0.02)
    values = np.einsum("n,ntp->np", world.advantages, world.scores)
    biases = {}
    for number in (1, 2, 3):
        # Without normalisation a response has the same weight in every batch; two responses show this.
        for normalize in (False, True) if number < 3 else (True,):
            mean, total = np.zeros(39), 0.0
            for batch in itertools.combinations_with_replacement(range(27), number):
                rows = list(batch)
                orders = len(set(itertools.permutations(batch)))
                chance = orders * np.prod(world.mu[rows])
                arrays = (world.trainer[rows], world.rollout[rows], world.mask[rows])
                weights = importance_weights(*arrays, level="sequence", normalize=normalize, **UNCLIPPED)[0]
                mean += chance * (weights[:, 0] @ values[rows]) / number
                total += chance
            assert total == pytest.approx(1, rel=1e-12)
            biases[number, normalize] = np.linalg.norm(mean - world.gradient)
    assert max(biases[number, False] for number in (1, 2)) < 1e-13
    plain = np.linalg.norm(world.sum(world.mu) - world.gradient)
    assert biases[1, True] == pytest.approx(plain, rel=1e-11)
    assert biases[2, True] / plain == pytest.approx(1 / 2, rel=0.05)
    assert biases[3, True] / plain == pytest.approx(1 / 3, rel=0.05)


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


def own_weights(pair):
    """Returns the weights of some corrections, computed independently of the program except for the pair."""
    lr = pair.trainer - pair.rollout
    mu = np.exp(pair.rollout.sum(axis=1))
    rho, k3 = np.exp(lr.sum(axis=1)), np.mean(np.exp(lr) - 1 - lr, axis=1)
    tis = np.minimum(np.exp(lr), 2)
    return {
        "none (equation 3)": np.ones((27, 3)),
        "token TIS, C = 2": tis,
        "token TIS, C = 2, normalised": tis / (mu @ tis.mean(axis=1)),
        "sequence, unclipped (equation 4)": np.repeat(rho[:, None], 3, axis=1),
        "sequence TIS, C = 2 (equation 5)": np.repeat(np.minimum(rho, 2)[:, None], 3, axis=1),
        "sequence MIS, C = 2 (equation 6)": np.repeat((rho * (rho <= 2))[:, None], 3, axis=1),
        "geometric, unclipped": np.repeat(rho[:, None] ** (1 / 3), 3, axis=1),
        "token TIS, C = 2, rejection by k3 <= 0.001": tis * (k3 <= 0.001)[:, None] / max(mu @ (k3 <= 0.001), 1e-300),
    }


def own_judgement(weights, pair):
    """Returns the bias, cosine and variance of the estimates with these weights, computed independently as well."""
    pi, mu = np.exp(pair.trainer.sum(axis=1)), np.exp(pair.rollout.sum(axis=1))
    values = np.einsum("n,nt,ntp->np", pair.advantages, weights, pair.scores)
    true = np.einsum("n,n,ntp->p", pi, pair.advantages, pair.scores)
    mean, scale = mu @ values, np.linalg.norm(true)
    return {
        "bias": np.linalg.norm(mean - true) / scale,
        "cosine": mean @ true / (np.linalg.norm(mean) * scale) if np.any(mean) else 0.0,
        "variance": (mu @ np.sum(values**2, axis=1) - mean @ mean) / scale**2,
    }


@pytest.mark.parametrize("size", [0.03, 1.0])
def test_the_tool_finds_what_is_found_here(size):
    pair = correction_bias.make_pair(5, size)
    for name, weights in own_weights(pair).items():
        found = correction_bias.CORRECTIONS[name](pair)
        np.testing.assert_allclose(found, weights, rtol=1e-11, err_msg=name)
        judged = correction_bias.judge(pair.gradient, pair.estimates(found), pair.drawn)
        assert judged == pytest.approx(own_judgement(weights, pair), rel=1e-9, abs=1e-12), name


def test_the_scores_are_gradients_of_the_log_probabilities():
    pair = correction_bias.make_pair(5, 1.0)
    logits = np.random.default_rng(5).standard_normal((13, 3))
    tables = [logits[:1], logits[1:4], logits[4:]]
    tokens, _ = every_response(3, 3)
    np.testing.assert_allclose(token_logprobs(tables, tokens), pair.trainer, rtol=1e-12)
    np.testing.assert_allclose(token_scores(tables, free_features(3, 3), tokens), pair.scores, rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "benchmarks/correction_bias.json").read_text(encoding="utf-8"))


def test_the_benchmark_is_what_the_tool_finds(record):
    again = correction_bias.study_corrections(record["seeds"])
    assert list(again["corrections"]) == list(record["corrections"])
    for group in ("mismatch", "corrections"):
        for name, row in again[group].items():
            for size, numbers in row.items():
                assert numbers == pytest.approx(record[group][name][size], rel=1e-6, abs=1e-9), (name, size)


def test_the_page_shows_the_benchmark(record):
    page = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| (\d.*) \|$", page, re.MULTILINE))
    for name, row in record["corrections"].items():
        cells = [tuple(map(float, cell.split("/"))) for cell in rows[name].split("|")]
        assert len(cells) == len(correction_bias.SIZES)
        for (bias, cosine, variance), size in zip(cells, correction_bias.SIZES, strict=True):
            numbers = row[f"{size:g}"]
            assert bias == pytest.approx(numbers["bias"], rel=0.051, abs=1e-11)
            assert cosine == pytest.approx(numbers["cosine"], abs=5.1e-4)
            assert variance == pytest.approx(numbers["variance"], abs=0.051)
    for name in record["mismatch"]["1"]:
        found = [float(cell) for cell in rows[f"`{name}`"].split("|")]
        expected = [record["mismatch"][f"{size:g}"][name] for size in correction_bias.SIZES]
        assert found == pytest.approx(expected, rel=5.1e-3, abs=1e-12)
    assert f"{record['seeds']} pairs" in page
