"""Exact tests and exact intervals for few runs. They use counts of all patterns, and no approximation.

sign_flip_p: Compares two arms by the differences of their paired runs.
shift_interval: Bounds the difference that such pairs have in common.
paired_test: Tests the differences of one of several planned comparisons.
fisher_p: Compares two shares of runs.
share_interval: Bounds one share of runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any


def sign_flip_p(differences: Sequence[float]) -> float:
    """Returns the two-sided p value of paired differences.

    Without an effect, the difference of each pair has either sign with the same probability. The value is the share of
    all patterns of signs whose sum is at least as far from 0 as the observed one. It is never under 2 / 2^n.

    Args:
      differences: The difference of each pair. Pairs without a difference do not count.
    """
    moved = [difference for difference in differences if difference != 0]
    least = abs(math.fsum(moved)) * (1 - 1e-12)
    patterns = itertools.product((1, -1), repeat=len(moved))
    far = sum(abs(math.fsum(map(math.prod, zip(signs, moved, strict=True)))) >= least for signs in patterns)
    return far / 2 ** len(moved)


def shift_interval(differences: Sequence[float], coverage: float) -> tuple[float, float] | None:
    """Returns the interval of shifts that ``sign_flip_p`` does not reject; None if so few pairs allow no interval.

    The means of all 2^n - 1 subsets of the differences cut the line into 2^n parts. The shift lies in each part with
    the same probability. So the interval leaves out the same number of parts at each end.

    Args:
      differences: The difference of each pair, at most 20.
      coverage: The least probability with which the interval has the shift, for example 0.95.

    Raises:
      ValueError: There are more than 20 pairs.
    """
    if len(differences) > 20:
        raise ValueError(f"got {len(differences)} pairs, expected at most 20: compare fewer at once")
    left_out = math.floor((1 - coverage) / 2 * 2 ** len(differences) + 1e-9)
    if left_out == 0:
        return None
    subsets = itertools.chain.from_iterable(
        itertools.combinations(differences, size) for size in range(1, len(differences) + 1)
    )
    means = sorted(math.fsum(subset) / len(subset) for subset in subsets)
    return means[left_out - 1], means[-left_out]


def paired_test(differences: Sequence[float], count: int) -> dict[str, Any]:
    """Returns the mean difference of one of ``count`` comparisons, with its p value and the interval of the shift.

    The p value is corrected and the interval widened by the number of comparisons (Bonferroni): the corrected value is
    ``count`` times the p value, and the interval covers 1 - 0.05 / ``count``.

    Args:
      differences: The difference of each pair, one for each seed.
      count: The number of planned comparisons.
    """
    p = sign_flip_p(differences)
    return {
        "seeds": len(differences),
        "difference": math.fsum(differences) / len(differences),
        "interval": shift_interval(differences, 1 - 0.05 / count),
        "better": sum(difference > 0 for difference in differences),
        "same": sum(difference == 0 for difference in differences),
        "p": p,
        "corrected_p": min(1.0, count * p),
    }


def fisher_p(well: int, runs: int, other_well: int, other_runs: int) -> float:
    """Returns the two-sided p value of two shares: tables that are no more probable than the observed one.

    Args:
      well: The number of runs of one arm that end well.
      runs: The number of runs of this arm.
      other_well: The number of runs of the other arm that end well.
      other_runs: The number of runs of the other arm.
    """
    both, total = well + other_well, runs + other_runs

    def ways(first: int) -> int:
        return math.comb(runs, first) * math.comb(other_runs, both - first)

    tables = [ways(first) for first in range(max(0, both - other_runs), min(runs, both) + 1)]
    return sum(count for count in tables if count <= ways(well)) / math.comb(total, both)


def share_interval(count: int, runs: int, coverage: float) -> tuple[float, float]:
    """Returns the interval of Clopper and Pearson for the probability behind ``count`` of ``runs``.

    Args:
      count: The number of runs that end well.
      runs: The number of all runs.
      coverage: The least probability with which the interval has the true value, for example 0.95.
    """
    tail = (1 - coverage) / 2

    def at_least(least: int, share: float) -> float:
        return math.fsum(math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(least, runs + 1))

    low = 0.0 if count == 0 else _crossing(count, at_least, tail)
    high = 1.0 if count == runs else _crossing(count + 1, at_least, 1 - tail)
    return low, high


def _crossing(least: int, at_least: Callable[[int, float], float], probability: float) -> float:
    """Returns the share at which ``at_least`` of a count reaches a probability, by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_least(least, middle) < probability else (low, middle)
    return (low + high) / 2
