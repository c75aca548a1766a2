"""Reads the tables of docs/studies.md, and computes outcomes and p values without the programs of experiments/."""

from fractions import Fraction
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parents[2] / "docs/studies.md").read_text(encoding="utf-8")


def section_of(heading):
    """Returns the text of a section, with one space for each run of white space."""
    return " ".join(PAGE[PAGE.index(f"## {heading}\n") :].split("\n## ")[0].split())


def table(head, section):
    """Returns the cells of the section's first table whose head begins with ``head``, as a list for each line."""
    lines = iter(PAGE.splitlines())
    next(line for line in lines if line.strip("# ") == section)
    next(line for line in lines if line.startswith(f"| {head} |"))
    next(lines)
    rows = []
    while (line := next(lines, "")).startswith("|"):
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def fate(series):
    """Returns the peak, the final accuracy and whether the run fell.

    They are computed from sums over ten steps.
    """
    sums = np.concatenate([[0.0], np.cumsum(series)])
    means = [(sums[i] - sums[max(0, i - 10)]) / min(i, 10) for i in range(1, len(sums))]
    # A run fell if it is under half of its peak at the end. It has no higher peak after the fall.
    return max(means), means[-1], means[-1] < max(means) / 2


def sign_p(differences):
    """Returns the exact p value from the distribution of all sums.

    The distribution grows pair by pair, in whole numbers.
    """
    whole = [round(difference * 2**40) for difference in differences]
    ways = {0: 1}
    for value in whole:
        ways = {
            total: ways.get(total - value, 0) + ways.get(total + value, 0)
            for total in {t + s * value for t in ways for s in (1, -1)}
        }
    far = sum(count for total, count in ways.items() if abs(total) >= abs(sum(whole)) - 2**10)
    return Fraction(far, 2 ** len(whole))
