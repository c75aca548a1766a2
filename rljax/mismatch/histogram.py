"""A log-spaced histogram of |log-ratio|, from which quantiles follow within one bin, and which merges by addition."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

SMALLEST = 1e-9
"""|log-ratio| below this (nats) counts as 0."""
GROWTH = 1.02
"""Ratio of a bin's upper to its lower edge: the value reported, the middle, is within 1% of any value inside."""
LARGEST = 1e3
"""|log-ratio| above this (nats) falls into the last bin, reported as the largest value seen."""
NUM_BINS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH)) + 2
"""The zero bin, the log-spaced bins, and the overflow bin."""


def bin_edges() -> np.ndarray:
    """Edges of the log-spaced bins, float64 [NUM_BINS - 1], in nats; bin i holds edges[i - 1] <= x < edges[i]."""
    return SMALLEST * GROWTH ** np.arange(NUM_BINS - 1)


def magnitude_histogram(xp: ModuleType, magnitudes: Any, valid: Any) -> Any:
    """Count the valid magnitudes.

    Args:
      xp: numpy or jax.numpy.
      magnitudes: [b, t] float, finite and not negative.
      valid: [b, t] bool.

    Returns:
      [NUM_BINS] counts, int64 on the host, int32 on the device.
    """
    above = xp.log(xp.maximum(magnitudes, SMALLEST) / SMALLEST) / math.log(GROWTH)
    index = xp.where(magnitudes < SMALLEST, 0, xp.clip(xp.floor(above).astype(np.int32) + 1, 1, NUM_BINS - 1))
    if xp is np:
        return np.bincount(index[valid], minlength=NUM_BINS)
    return jnp.zeros(NUM_BINS, jnp.int32).at[index].add(valid.astype(jnp.int32))


def histogram_quantile(xp: ModuleType, counts: Any, largest: Any, q: float) -> Any:
    """Quantile q of what was counted, interpolated between order statistics as ``numpy.quantile`` does.

    Args:
      xp: numpy or jax.numpy.
      counts: [NUM_BINS] counts.
      largest: scalar float, the largest magnitude counted.
      q: in 0 .. 1.

    Returns:
      Scalar of the dtype of ``largest``, within half a bin of the exact quantile; 0 when nothing was counted.
    """
    edges = bin_edges()
    middles = np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:]), [np.inf]])
    values = xp.minimum(xp.asarray(middles, dtype=largest.dtype), largest)
    cumulative = xp.cumsum(counts)
    last = xp.maximum(cumulative[-1] - 1, 0)
    # Ranks in integers: a float32 product loses whole ranks above 2^24 counts.
    rank, fraction = _rank(xp, last, q)
    below = values[xp.searchsorted(cumulative, rank, side="right").clip(0, NUM_BINS - 1)]
    above = values[xp.searchsorted(cumulative, xp.minimum(rank + 1, last), side="right").clip(0, NUM_BINS - 1)]
    return xp.where(cumulative[-1] > 0, below + (above - below) * fraction, 0)


def _rank(xp: ModuleType, last: Any, q: float) -> tuple[Any, Any]:
    """Whole and fractional part of q * last, for q a multiple of 1/1000, without a product beyond the integer range."""
    thousandths = round(q * 1000)
    whole, rest = last // 1000, last % 1000
    scaled = rest * thousandths
    return whole * thousandths + scaled // 1000, (scaled % 1000) / 1000
