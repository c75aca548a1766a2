"""Exact tests and exact intervals for few runs. They use counts of all patterns, and no approximation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats


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


def table_cells(test: Mapping[str, Any]) -> list[str]:
    """Formats what ``paired_test`` found: seeds, difference, interval, better/same/worse, p, corrected p."""
    bounds = "-" if test["interval"] is None else "{:+.2f} to {:+.2f}".format(*test["interval"])
    signs = f"{test['better']}/{test['same']}/{test['seeds'] - test['better'] - test['same']}"
    numbers = f"{test['p']:.2g}", f"{test['corrected_p']:.2g}"
    return [str(test["seeds"]), f"{test['difference']:+.2f}", bounds, signs, *numbers]


def fisher_p(well: int, runs: int, other_well: int, other_runs: int) -> float:
    """Returns Fisher's two-sided p value of two shares: ``well`` of ``runs``, and the same of the other arm."""
    return float(stats.fisher_exact([[well, runs - well], [other_well, other_runs - other_well]]).pvalue)


def share_interval(count: int, runs: int, coverage: float) -> tuple[float, float]:
    """Returns the interval of Clopper and Pearson for the probability behind ``count`` of ``runs``.

    ``coverage`` is the least probability with which the interval has the true value, for example 0.95.
    """
    low, high = stats.binomtest(count, runs).proportion_ci(coverage, "exact")
    return float(low), float(high)
