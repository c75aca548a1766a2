"""Keeps the rows of runs of a real model in one file, and prints a table of their first and last steps.

    python experiments/real_runs.py runs/delta --rows benchmarks/real_qwen.parquet    # writes and prints
    python experiments/real_runs.py --rows benchmarks/real_qwen.parquet               # prints

An arm has the name of its run directory. The other arms of the file stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from study_rows import Runs, read_table, write_table

from rljax.errors import run_cli
from rljax.record.rows import Row, read_rows

WINDOW = 5  # the steps of a window
SHOWN = {
    "reward": ("reward/mean", ".2f"),
    "length": ("response_length/mean", ".1f"),
    "truncated": ("response_length/truncated_fraction", ".0%"),
    "entropy": ("policy/entropy", ".2f"),
    "log_ppl_abs_diff": ("mismatch/log_ppl_abs_diff", ".4f"),
    "mean gap": ("mismatch/logprob_abs_diff_mean", ".4f"),
    "k3": ("mismatch/k3_kl", ".1e"),
}
"""The columns of the table: the metric of each, and how its mean over a window is written."""


def windows(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    """Yields the first and the last steps with their names, as far as windows do not overlap."""
    for start in [0, len(rows) - WINDOW][: 1 + (len(rows) >= 2 * WINDOW)]:
        taken = rows[start : start + WINDOW]
        yield f"{taken[0]['step']} to {taken[-1]['step']}", taken


def table(runs: Runs) -> str:
    """Returns the Markdown table of all runs."""
    lines = ["| run | steps | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 2) + "|"]
    for (arm, _), rows in runs.items():
        for name, taken in windows(rows):
            means = (format(np.mean([row[key] for row in taken]), form) for key, form in SHOWN.values())
            lines.append(f"| {arm} | {name} | {' | '.join(means)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="run directories, whose rows are written")
    parser.add_argument("--rows", type=Path, required=True, help="file of the rows")
    options = parser.parse_args(argv)
    if options.runs:
        known = read_table(options.rows) if options.rows.exists() else {}
        new = {(run.name, 0): read_rows(run / "metrics.jsonl") for run in options.runs}
        write_table(options.rows, {**known, **new})
    print(table(read_table(options.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main, sys.argv[1:]))
