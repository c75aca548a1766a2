"""A log-spaced histogram of |log-ratio|. It merges by addition and gives quantiles within one bin."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

SMALLEST = 1e-9
"""A |log-ratio| below this (nats) counts as 0."""
GROWTH = 1.02
"""Ratio of a bin's upper edge to its lower edge. The reported middle is within 1% of every value in the bin."""
LARGEST = 1e3
"""A |log-ratio| above this (nats) falls into the last bin, which is reported as the largest counted value."""
NUM_BINS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH)) + 2
"""Number of bins: one for zeros, the log-spaced bins, and one for overflow."""


def bin_edges() -> np.ndarray:
    """Returns the edges of the bins, float64 [NUM_BINS - 1], in nats. Bin i holds edges[i - 1] <= x < edges[i]."""
    return SMALLEST * GROWTH ** np.arange(NUM_BINS - 1)


def magnitude_histogram(xp: ModuleType, magnitudes: Any, valid: Any) -> Any:
    """Counts the valid ([b, t] bool) magnitudes ([b, t] float, finite, not negative) in each bin, int [NUM_BINS]."""
    above = xp.log(xp.maximum(magnitudes, SMALLEST) / SMALLEST) / math.log(GROWTH)
    index = xp.where(magnitudes < SMALLEST, 0, xp.clip(xp.floor(above).astype(np.int32) + 1, 1, NUM_BINS - 1))
    if xp is np:
        return np.bincount(index[valid], minlength=NUM_BINS)
    return jnp.zeros(NUM_BINS, jnp.int32).at[index].add(valid.astype(jnp.int32))


def histogram_quantile(xp: ModuleType, counts: Any, largest: Any, q: float) -> Any:
    """Computes quantile q of the counted magnitudes, interpolated between order statistics as in ``numpy.quantile``.

    It is within half a bin of the exact one, and 0 if all ``counts``, [NUM_BINS], are 0. ``largest`` is the largest
    counted magnitude, a scalar float. q lies in 0 .. 1 and is a multiple of 1/1000.
    """
    edges = bin_edges()
    middles = np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:]), [np.inf]])
    values = xp.minimum(xp.asarray(middles, dtype=largest.dtype), largest)
    cumulative = xp.cumsum(counts)
    last = xp.maximum(cumulative[-1] - 1, 0)
    # Ranks are integers, because a float32 product loses whole ranks above 2^24 counts.
    rank, fraction = _rank(xp, last, q)
    below = values[xp.searchsorted(cumulative, rank, side="right").clip(0, NUM_BINS - 1)]
    above = values[xp.searchsorted(cumulative, xp.minimum(rank + 1, last), side="right").clip(0, NUM_BINS - 1)]
    return xp.where(cumulative[-1] > 0, below + (above - below) * fraction, 0)


def _rank(xp: ModuleType, last: Any, q: float) -> tuple[Any, Any]:
    """Computes the whole and fractional part of q * last without integer overflow, for q a multiple of 1/1000."""
    thousandths = round(q * 1000)
    whole, rest = last // 1000, last % 1000
    scaled = rest * thousandths
    return whole * thousandths + scaled // 1000, (scaled % 1000) / 1000
