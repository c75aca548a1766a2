"""Arithmetic that keeps its digits in float32: exp(x) - 1 - x, and sums carried as two floats.

Two engines in float32 differ by log-ratios near 1e-4, where ``exp(x) - 1 - x`` as written loses the signal. And a sum
that a loss or a rejection depends on must not change with the place of a sequence in its row; two floats make it so.
Every function takes the array namespace ``xp`` (``numpy`` or ``jax.numpy``) first: one text serves the host (float64)
and the device (float32).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

SERIES_BOUND = 0.5
"""Below this |x| the series of exp(x) - 1 - x is used; above it expm1(x) - x loses at most three bits."""
SERIES_TERMS = 13
"""Terms of the series, x^2 / 2! to x^14 / 14!: what is dropped at the bound is 2e-16 of the result."""

RATIO_BOUND = 20.0
"""Bound B of the exponent in importance ratios (nats): exp(20) is 4.9e8."""


def exponent_limit(dtype: Any) -> float:
    """Largest exponent given to exp: 60 in float32, 600 in float64, so that sums over 1e9 tokens stay finite."""
    return 60.0 if np.dtype(dtype).itemsize == 4 else 600.0


def probability_limit(dtype: Any) -> float:
    """Largest log-probability turned into a probability: 30 in float32, 300 in float64, so that squares stay finite.

    A true log-probability is at most 0; the limit only keeps a broken engine's numbers from overflowing.
    """
    return exponent_limit(dtype) / 2


def exp_minus_one_minus_x(xp: ModuleType, x: Any) -> Any:
    """exp(x) - 1 - x, the k3 estimator of a log-ratio, accurate from |x| = 1e-18 up (x is capped, see exponent_limit).

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3; the series is Taylor's.
    """
    x = xp.minimum(x, exponent_limit(x.dtype))
    near = xp.clip(x, -SERIES_BOUND, SERIES_BOUND)
    series = xp.ones_like(near)
    for n in range(SERIES_TERMS + 1, 2, -1):
        series = 1 + series * near / n
    return xp.where(xp.abs(x) < SERIES_BOUND, near * near * 0.5 * series, xp.expm1(x) - x)


class Total(NamedTuple):
    """A sum kept as the unevaluated sum of two floats, about twice the digits of one."""

    high: Any  # the sum rounded to its dtype; shape and dtype of what was summed
    low: Any  # what the rounding left over


def add_totals(a: Total, b: Total) -> Total:
    """The sum of two totals (Knuth's TwoSum on the high parts, then renormalised); shapes broadcast."""
    high = a.high + b.high
    from_b = high - a.high
    error = (a.high - (high - from_b)) + (b.high - from_b) + (a.low + b.low)
    rounded = high + error
    return Total(rounded, error - (rounded - high))


def total_over(xp: ModuleType, values: Any, axes: tuple[int, ...]) -> Total:
    """Sum of finite ``values`` over ``axes``: float64 pairwise on the host, two floats on the device."""
    if xp is np:
        summed = values.sum(axis=axes)
        return Total(summed, np.zeros_like(summed))
    zero = np.zeros((), values.dtype)
    high, low = lax.reduce(
        (values, jnp.zeros_like(values)),
        (zero, zero),
        lambda a, b: tuple(add_totals(Total(*a), Total(*b))),
        axes,
    )
    return Total(high, low)


def value_of(total: Total) -> Any:
    """The total as one float of its dtype."""
    return total.high + total.low
