"""Computes terms A, B and C of a step (arXiv 2602.01826, appendix A, inequality 13) from gradients of batches.

The step is an ascent on J in a metric: coordinate i of it is ``rate * metric[i] * g[i]``. Inner products are therefore
between vectors ``sqrt(metric) * x`` for gradients x. ``metric`` is 1 for plain gradient ascent and 1 / (sqrt(v) + eps)
for Adam. Products of two means use pairs of different batches, so the noise of a batch adds nothing to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Products(NamedTuple):
    """The inner products [k, k] in the metric between gradients of batch i and batch j.

    Attributes:
      exact: The products of gradients whose batches the trained policy sampled; the mean of each gradient is grad J.
      cross: The products of these gradients with the estimates of the bias from the same batches.
      bias: The products of the estimates of the bias, E[g] - grad J.
      sampled: The products of the gradients g whose batches the engine sampled.
    """

    exact: np.ndarray
    cross: np.ndarray
    bias: np.ndarray
    sampled: np.ndarray


class Moments(NamedTuple):
    """The moments in the terms: |grad J|^2, <grad J, bias>, |bias|^2 and the variance E|g - E g|^2."""

    gradient: float
    cross: float
    bias: float
    variance: float


def products(exact: np.ndarray, bias: np.ndarray, sampled: np.ndarray, metric: np.ndarray) -> Products:
    """Computes the inner products of gradients [k, d] in the metric [d], in float64."""
    e, b, s = (np.asarray(x, np.float64) * np.sqrt(metric) for x in (exact, bias, sampled))
    return Products(e @ e.T, e @ b.T, b @ b.T, s @ s.T)


def moments(inner: Products) -> Moments:
    """Estimates the moments without bias; a square may be negative if it is smaller than its noise."""
    mean_square, spread = _between(inner.sampled), float(np.trace(inner.sampled)) / len(inner.sampled)
    return Moments(_between(inner.exact), _between(inner.cross), _between(inner.bias), spread - mean_square)


def terms(m: Moments, rate: float, smoothness: float) -> dict[str, float]:
    """Computes A, B and C for a rate and L, and A + B - C, the lower bound of the progress in inequality 13."""
    a = rate * (1.0 - smoothness * rate / 2.0) * m.gradient
    b = rate * (1.0 - smoothness * rate) * m.cross
    c = smoothness * rate**2 / 2.0 * (m.variance + m.bias)
    return {"A": a, "B": b, "C": c, "A+B-C": a + b - c}


def jackknife(inner: Products, of: Callable[[Products], float]) -> float:
    """Estimates the standard error of ``of(products)`` by leaving out one batch at a time."""
    k = len(inner.exact)
    without = [of(Products(*(np.delete(np.delete(x, i, 0), i, 1) for x in inner))) for i in range(k)]
    return float(np.sqrt((k - 1) * np.var(without)))


def growth_exponent(lengths: np.ndarray, values: np.ndarray) -> float:
    """Computes the slope of log values against log lengths: 1 for linear growth, 2 for T^2.

    Raises ValueError if a value is not positive, because it has no logarithm.
    """
    if len(lengths) < 2 or np.min(values) <= 0:
        raise ValueError(f"a growth exponent needs two lengths and positive values, got {list(values)}")
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def _between(inner: np.ndarray) -> float:
    """Computes the mean of the products of different batches."""
    k = len(inner)
    return float((inner.sum() - np.trace(inner)) / (k * (k - 1)))
