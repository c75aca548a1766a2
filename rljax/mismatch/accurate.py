"""Arithmetic that keeps its digits in float32: exp(x) - 1 - x, and sums carried as two floats.

The log-ratios of two float32 engines are near 1e-4. There the plain formula ``exp(x) - 1 - x`` loses all digits. Losses
and rejections depend on sums over a sequence. With two floats, such a sum does not depend on the position of the
sequence in its row. Every function takes the array namespace ``xp`` (``numpy`` or ``jax.numpy``) first, so that one
text serves the host (float64) and the device (float32).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

SERIES_BOUND = 0.5
"""The series of exp(x) - 1 - x is used for |x| below this bound. Above it, expm1(x) - x loses at most three bits."""
SERIES_TERMS = 13
"""Number of terms, x^2 / 2! to x^14 / 14!. At the bound, the remaining terms are 2e-16 of the result."""

RATIO_BOUND = 20.0
"""Bound B of the exponent in importance ratios (nats): exp(20) is 4.9e8."""


def exponent_limit(dtype: Any) -> float:
    """Returns the largest exponent for exp: 60 in float32, 600 in float64. Sums over 1e9 tokens then stay finite."""
    return 60.0 if np.dtype(dtype).itemsize == 4 else 600.0


def exp_minus_one_minus_x(xp: ModuleType, x: Any) -> Any:
    """Computes exp(x) - 1 - x, accurately from abs(x) = 1e-18 up; x is capped at ``exponent_limit``.

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3. Small x use the Taylor series.
    """
    x = xp.minimum(x, exponent_limit(x.dtype))
    near = xp.clip(x, -SERIES_BOUND, SERIES_BOUND)
    series = xp.ones_like(near)
    for n in range(SERIES_TERMS + 1, 2, -1):
        series = 1 + series * near / n
    return xp.where(xp.abs(x) < SERIES_BOUND, near * near * 0.5 * series, xp.expm1(x) - x)


class Total(NamedTuple):
    """A sum stored as two floats, which together have about twice the digits of one."""

    high: Any  # the sum rounded to its dtype
    low: Any  # the rounding error of ``high``


def add_totals(a: Total, b: Total) -> Total:
    """Adds two totals with Knuth's TwoSum on the high parts, then renormalises. Shapes broadcast."""
    high = a.high + b.high
    from_b = high - a.high
    error = (a.high - (high - from_b)) + (b.high - from_b) + (a.low + b.low)
    rounded = high + error
    return Total(rounded, error - (rounded - high))


def total_over(xp: ModuleType, values: Any, axes: tuple[int, ...]) -> Total:
    """Sums finite ``values`` over ``axes``: pairwise in float64 on the host, in two floats on the device."""
    if xp is np:
        summed = values.sum(axis=axes)
        return Total(summed, np.zeros_like(summed))
    zero = np.zeros((), values.dtype)
    both = (values, jnp.zeros_like(values))
    return Total(*lax.reduce(both, (zero, zero), lambda a, b: tuple(add_totals(Total(*a), Total(*b))), axes))


def value_of(total: Total) -> Any:
    """Returns the total as one float of its dtype."""
    return total.high + total.low
