"""The distribution of the importance ratios. It is recorded at every step, with or without a correction."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rljax.mismatch.accurate import RATIO_BOUND
from rljax.mismatch.arrays import count, scalars
from rljax.mismatch.statistics import Statistics
from rljax.mismatch.tokens import Tokens

LEVELS = ("token", "sequence", "geometric")
"""The levels in the order of the arrays of ``importance_statistics``."""


def importance_statistics(tokens: Tokens, threshold: float = 2.0) -> Statistics:
    """Computes statistics of the uncorrected ratios at the three levels, arrays [3]. Exponents are clipped at +-20.

    Ratios above the threshold C and below 1 / C are counted. Raises ValueError if C is below 1.
    """
    if not threshold >= 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}")
    xp, present = tokens.xp, tokens.sequences.present
    sums = tokens.sequences.sums(tokens.log_ratio)
    levels = ((tokens.log_ratio, tokens.valid), (sums, present), (tokens.sequences.per_token(sums), present))
    each = [_level(xp, log_ratio, counted, threshold) for log_ratio, counted in levels]
    return jax.tree.map(lambda *numbers: xp.stack(numbers), *each)


def _level(xp: Any, log_ratio: Any, counted: Any, threshold: float) -> Statistics:
    log_ratio = xp.where(counted, xp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND), 0)
    ratio = xp.exp(log_ratio)
    return Statistics(
        sums={
            "number": count(xp, counted),
            "above": count(xp, counted & (ratio > threshold)),
            "below": count(xp, counted & (ratio < 1 / threshold)),
            "ratio_minus_one": xp.sum(xp.expm1(log_ratio)),
            "ratio_squared_minus_one": xp.sum(xp.expm1(2 * log_ratio)),
        },
        maxima={"largest": xp.max(xp.where(counted, ratio, 0), initial=0)},
        minima={"smallest": xp.min(xp.where(counted, ratio, np.inf), initial=np.inf)},
    )


def finalize_importance(statistics: Statistics) -> dict[str, Any]:
    """Computes the ``is/<name>`` metrics: Python floats for numpy leaves, jax scalars for jax leaves.

    The metrics of each level L (token, sequence, geometric) are ``L_ratio_mean``, ``L_ratio_max``, ``L_ratio_min``,
    ``L_fraction_above`` (ratio > C), ``L_fraction_below`` (ratio < 1 / C), and ``L_effective_sample_size`` = <w>^2 /
    <w^2>, a share in 0 .. 1. All are 0 without a valid token.
    """
    xp, counted = statistics.xp, statistics["number"] > 0
    mean = 1 + statistics.mean("ratio_minus_one", "number")
    square = 1 + statistics.mean("ratio_squared_minus_one", "number")
    is_known = square > 0  # 1 + mean(rho^2 - 1) rounds to 0 if all ratios are tiny.
    size = xp.minimum(mean * mean / xp.where(is_known, square, 1), 1)
    columns = {
        "ratio_mean": xp.where(counted, mean, 0),
        "ratio_max": statistics.extreme("largest", "number"),
        "ratio_min": statistics.extreme("smallest", "number"),
        "fraction_above": statistics.mean("above", "number"),
        "fraction_below": statistics.mean("below", "number"),
        "effective_sample_size": xp.where(counted & is_known, size, 0),
    }
    each = {f"{level}_{name}": column[i] for name, column in columns.items() for i, level in enumerate(LEVELS)}
    return scalars(xp, each)
