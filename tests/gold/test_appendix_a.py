"""Inequality 13 of appendix A of arXiv 2602.01826: the progress of one step is at least A + B - C (docs/theory.md).

An estimator is given by its values [n, d] and their probabilities [n], so that every expectation is a finite sum.
"""

import numpy as np
import pytest
from tabular import every_response, free_features, probabilities, random_tables, shifted, token_logprobs, token_scores

from rljax.mismatch import importance_weights

RATES = (0.4, 0.1, 0.025)


def progress(objective, theta, rate, values, weights):
    return sum(w * objective(theta + rate * g) for g, w in zip(values, weights, strict=True)) - objective(theta)


def terms(gradient, values, weights, smoothness, rate):
    mean = weights @ values
    bias = mean - gradient
    variance = weights @ np.sum(values**2, axis=1) - mean @ mean
    return (
        rate * (1 - smoothness * rate / 2) * (gradient @ gradient),
        rate * (1 - smoothness * rate) * (gradient @ bias),
        smoothness * rate**2 / 2 * (variance + bias @ bias),
    )


def bound(*arguments):
    a, b, c = terms(*arguments)
    return a + b - c


def quadratic(rng, curvatures=(1.7,) * 4):
    """Returns J and its gradient, for J(theta) = -sum_i curvature_i (theta_i - peak_i)^2 / 2, and some theta."""
    curvatures, peak = np.array(curvatures), rng.standard_normal(4)
    objective, gradient = lambda x: -0.5 * np.sum(curvatures * (x - peak) ** 2), lambda x: -curvatures * (x - peak)
    return objective, gradient, rng.standard_normal(4)


def noisy(rng, mean, number=7):
    """Returns values [number, d] of unequal probabilities whose mean is ``mean``."""
    weights = rng.dirichlet(np.ones(number))
    noise = rng.standard_normal((number, mean.size))
    return mean + noise - weights @ noise, weights


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("curvatures", [[1.7, 1.7, 1.7, 1.7], [1.7, 0.6, 0.0, -0.4]], ids=["equal", "different"])
def test_the_slack_is_what_flatter_directions_lose_less(seed, rate, curvatures):
    """The inequality is an equality where every curvature is L. Too small an L must break it."""
    rng, curvatures = np.random.default_rng(seed), np.array(curvatures)
    objective, gradient, theta = quadratic(rng, curvatures)
    values, weights = noisy(rng, gradient(theta) + rng.standard_normal(4))
    measured = progress(objective, theta, rate, values, weights)
    slack = rate**2 / 2 * (weights @ (values**2 @ (1.7 - curvatures)))
    least = bound(gradient(theta), values, weights, 1.7, rate)
    if curvatures.min() == 1.7:
        assert measured == pytest.approx(least, rel=1e-11, abs=1e-13)
    else:
        assert slack > 0
        assert measured - least == pytest.approx(slack, rel=1e-9)
        assert measured < bound(gradient(theta), values, weights, curvatures.min(), rate)


@pytest.mark.parametrize("rate", RATES)
def test_each_term_measured_by_itself(rate):
    """From values of J alone, A uses the true gradient, B is the odd part in the bias, and C is the mean loss."""
    rng = np.random.default_rng(0)
    objective, gradient_at, theta = quadratic(rng)
    gradient, bias = gradient_at(theta), rng.standard_normal(4)
    noise, weights = noisy(rng, np.zeros(4))
    draws = [gradient + mean + spread * noise for mean, spread in ((0, 0), (bias, 0), (-bias, 0), (0, 1))]
    exact, up, down, spread = (progress(objective, theta, rate, values, weights) for values in draws)
    measured = [exact, (up - down) / 2, (exact - (up + down) / 2) + (exact - spread)]
    np.testing.assert_allclose(terms(gradient, gradient + bias + noise, weights, 1.7, rate), measured, rtol=1e-9)


def test_noise_sets_the_largest_rate_that_still_makes_progress():
    """For unbiased g the expected change becomes negative at the rate 2 |grad|^2 / (L (|grad|^2 + var))."""
    objective, gradient_at, theta = quadratic(np.random.default_rng(3))
    gradient = gradient_at(theta)
    noise, weights = noisy(np.random.default_rng(4), np.zeros(4))
    for spread in (0.0, 1.0, 4.0):
        square, variance = gradient @ gradient, spread**2 * (weights @ np.sum(noise**2, axis=1))
        limit = 2 * square / (1.7 * (square + variance))
        for share, sign in ((0.999, 1), (1.001, -1)):
            assert sign * progress(objective, theta, share * limit, gradient + spread * noise, weights) > 0


def test_the_objective_is_as_smooth_as_its_largest_advantage():
    """Differences of the exact gradient give the largest eigenvalue of the Hessian of 39 logits: at most max|A|."""
    rng, features, shares = np.random.default_rng(7), free_features(3, 3), []
    tokens, mask = every_response(3, 3)
    for _ in range(10):
        tables, advantages = random_tables(rng, 3, 3, scale=2.0), rng.choice([-1.0, 1.0], len(tokens))

        def gradient(step, tables=tables, advantages=advantages):
            moved = shifted(tables, [f @ step for f in features])
            drawn = probabilities(token_logprobs(moved, tokens), mask)
            return (drawn * advantages) @ token_scores(moved, features, tokens).sum(axis=1)

        hessian = np.stack([(gradient(e) - gradient(-e)) / 2e-5 for e in 1e-5 * np.eye(39)])
        np.testing.assert_allclose(hessian, hessian.T, atol=1e-9)
        shares.append(np.abs(np.linalg.eigvalsh(hessian)).max())
    assert 0.05 < max(shares) <= 1


CORRECTIONS = {
    "none": None,
    "token TIS": {"level": "token", "mode": "truncate", "threshold": 2.0},
    "sequence": {"level": "sequence", "mode": "truncate", "threshold": np.inf},
    "sequence TIS": {"level": "sequence", "mode": "truncate", "threshold": 2.0},
    "sequence MIS": {"level": "sequence", "mode": "mask", "threshold": 2.0},
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_inequality_for_a_tabular_policy_under_every_correction(correction):
    """J = E_pi[A] with a free logit for each prefix and token is max|A|-smooth; docs/theory.md has the derivation."""
    rng, features = np.random.default_rng(6), free_features(3, 3)
    tokens, mask = every_response(3, 3)
    for _ in range(5):
        tables = random_tables(rng, 3, 3)
        trainer = token_logprobs(tables, tokens)
        rollout = token_logprobs(shifted(tables, random_tables(rng, 3, 3)), tokens)
        advantages = rng.standard_normal(len(tokens))
        settings = CORRECTIONS[correction]
        weights = mask.astype(float) if settings is None else importance_weights(trainer, rollout, mask, **settings)[0]
        scores = token_scores(tables, features, tokens)
        values = np.einsum("nt,n,ntp->np", weights, advantages, scores)
        gradient = (probabilities(trainer, mask) * advantages) @ scores.sum(axis=1)

        def objective(step, tables=tables, advantages=advantages):
            moved = shifted(tables, [f @ step for f in features])
            return probabilities(token_logprobs(moved, tokens), mask) @ advantages

        at, drawn, smoothness = np.zeros(gradient.size), probabilities(rollout, mask), np.abs(advantages).max()
        for rate in (2.0, 0.5, 0.1):
            assert progress(objective, at, rate, values, drawn) >= bound(gradient, values, drawn, smoothness, rate)
        slope = progress(objective, at, 1e-5, values, drawn) / 1e-5
        assert slope == pytest.approx(gradient @ (drawn @ values), rel=1e-3, abs=1e-4)
