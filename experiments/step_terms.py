"""Terms A, B and C of a step (arXiv 2602.01826, appendix A, inequality 13), from gradients of independent batches.

All are of an ascent on J in a metric: coordinate i of a step is ``rate * metric[i] * g[i]``, so that the space is that
of ``sqrt(metric) * x`` for a gradient x. ``metric`` is 1 for plain gradient ascent and 1 / (sqrt(v) + eps) for Adam's.
Products of two means are taken over pairs of different batches, so that the noise of a batch adds nothing to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Products(NamedTuple):
    """Inner products [k, k] in the metric between gradients of batch i and batch j.

    Attributes:
      exact: of gradients of batches that the trained policy sampled: each has the mean grad J.
      cross: of those with the estimates of the bias from the same batches.
      bias: of the estimates of the bias, E[g] - grad J.
      sampled: of gradients of batches that the engine sampled: g.
    """

    exact: np.ndarray
    cross: np.ndarray
    bias: np.ndarray
    sampled: np.ndarray


class Moments(NamedTuple):
    """What the terms are made of: |grad J|^2, <grad J, bias>, |bias|^2 and the variance E|g - E g|^2."""

    gradient: float
    cross: float
    bias: float
    variance: float


def products(exact: np.ndarray, bias: np.ndarray, sampled: np.ndarray, metric: np.ndarray) -> Products:
    """From gradients [k, d] and the metric [d]; all in float64."""
    e, b, s = (np.asarray(x, np.float64) * np.sqrt(metric) for x in (exact, bias, sampled))
    return Products(e @ e.T, e @ b.T, b @ b.T, s @ s.T)


def moments(found: Products) -> Moments:
    """Unbiased estimates; those of squares may be negative where there is less than their noise."""
    mean_square, spread = _between(found.sampled), float(np.trace(found.sampled)) / len(found.sampled)
    return Moments(_between(found.exact), _between(found.cross), _between(found.bias), spread - mean_square)


def terms(found: Moments, rate: float, smoothness: float) -> dict[str, float]:
    """A, B and C for a rate and L, and A + B - C: the least progress that inequality 13 promises."""
    a = rate * (1.0 - smoothness * rate / 2.0) * found.gradient
    b = rate * (1.0 - smoothness * rate) * found.cross
    c = smoothness * rate**2 / 2.0 * (found.variance + found.bias)
    return {"A": a, "B": b, "C": c, "A+B-C": a + b - c}


def jackknife(found: Products, of: Callable[[Products], float]) -> float:
    """Standard error of ``of(products)``, from leaving out one batch at a time."""
    k = len(found.exact)
    without = [of(Products(*(np.delete(np.delete(x, i, 0), i, 1) for x in found))) for i in range(k)]
    return float(np.sqrt((k - 1) * np.var(without)))


def growth_exponent(lengths: np.ndarray, values: np.ndarray) -> float:
    """Slope of log values against log lengths: 1 for linear growth, 2 for T^2.

    Raises ValueError where a value is not positive: it has no logarithm.
    """
    if len(lengths) < 2 or np.min(values) <= 0:
        raise ValueError(f"a growth exponent needs two lengths and positive values, got {list(values)}")
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def _between(inner: np.ndarray) -> float:
    """Mean of the products of different batches."""
    k = len(inner)
    return float((inner.sum() - np.trace(inner)) / (k * (k - 1)))
