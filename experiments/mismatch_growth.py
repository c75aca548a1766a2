"""Measures how the mismatch of an engine grows while a policy is trained, from the run directories of a study.

    python experiments/study.py configs/study/engines.yaml
    python experiments/mismatch_growth.py runs/study-engines --json benchmarks/mismatch_growth.json

The table has a row for each run: ``log_ppl_abs_diff`` over ten steps at the beginning, at the peak of the accuracy and
at the end, the same of other series that may explain it, and rank correlations over the steps. "gap per entropy" is the
mean absolute difference of the log-probabilities divided by the policy's entropy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from study_outcome import late_collapse_step

from rljax.errors import ConfigError, run_cli
from rljax.record.rows import Row, read_rows, trailing_mean

WINDOW = 10
MISMATCH = "log_ppl_abs_diff"
BAND = (1e-2, 1e-1)
"""The range of ``log_ppl_abs_diff`` to count (nats): from above healthy engines to the values before collapses."""

SERIES = {
    MISMATCH: "mismatch/log_ppl_abs_diff",
    "log_ppl_abs_diff_sum": "mismatch/log_ppl_abs_diff_sum",
    "entropy": "policy/entropy",
    "response_length": "response_length/mean",
    "grad_norm": "optimizer/grad_norm",
}
"""The metric of each series, by name in the table."""


def series_of(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Returns each of ``SERIES`` and the gap per entropy, float64 [steps]."""
    series = {name: np.asarray([row[key] for row in rows], np.float64) for name, key in SERIES.items()}
    gap = np.asarray([row["mismatch/logprob_abs_diff_mean"] for row in rows], np.float64)
    return series | {"gap_per_entropy": gap / np.maximum(series["entropy"], 1e-9)}


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Computes Spearman's rank correlation, with the mean rank for equal values; 0 if one side is constant."""
    ranks = [np.mean([np.searchsorted(np.sort(v), v, side) for side in ("left", "right")], axis=0) for v in (x, y)]
    if min(np.ptp(r) for r in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def growth_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Computes the numbers of one run's row."""
    series = series_of(rows)
    accuracy = trailing_mean([row["reward/mean"] for row in rows], WINDOW)
    peak = max(int(np.argmax(accuracy)), WINDOW - 1)
    windows = {"first": slice(0, WINDOW), "peak": slice(peak - WINDOW + 1, peak + 1), "last": slice(-WINDOW, None)}
    return {
        "steps": len(rows),
        "accuracy_peak": float(accuracy[peak]),
        "accuracy_last": float(accuracy[-1]),
        "peak_step": peak + 1,
        "collapse_step": late_collapse_step(accuracy),
        "steps_in_band": int(np.sum((series[MISMATCH] >= BAND[0]) & (series[MISMATCH] <= BAND[1]))),
        "largest": float(series[MISMATCH].max()),
        "largest_step": int(np.argmax(series[MISMATCH])) + 1,
        "windows": {
            when: {name: float(values[part].mean()) for name, values in series.items()}
            for when, part in windows.items()
        },
        "rank_correlation_of_log_ppl_abs_diff": {
            name: rank_correlation(series[MISMATCH], values)
            for name, values in {"step": np.arange(len(rows), dtype=float), **series}.items()
            if name != MISMATCH
        },
    }


def to_markdown(runs: dict[str, dict[str, Any]]) -> str:
    """Formats one row for each run.

    A cell with three numbers has the first ten steps, the peak, and the last ten.
    """
    shown = (MISMATCH, "gap_per_entropy", "entropy", "response_length")
    related = ("step", "entropy", "response_length", "grad_norm")
    head = [
        "run",
        "accuracy peak -> last",
        *shown,
        "steps in 1e-2..1e-1",
        "largest (step)",
        *(f"rank correlation: {name}" for name in related),
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, growth in runs.items():
        cells = [name, f"{growth['accuracy_peak']:.2f} -> {growth['accuracy_last']:.2f}"]
        cells += [" -> ".join(f"{growth['windows'][w][key]:.2g}" for w in ("first", "peak", "last")) for key in shown]
        cells.append(str(growth["steps_in_band"]))
        cells.append(f"{growth['largest']:.2g} ({growth['largest_step']})")
        cells += [f"{growth['rank_correlation_of_log_ppl_abs_diff'][key]:+.2f}" for key in related]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of a study's runs")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    complete = [
        path.parent for path in sorted(options.out.glob("*/metrics.jsonl")) if (path.parent / "summary.json").exists()
    ]
    if not complete:
        raise ConfigError(f"{options.out} holds no complete run")
    runs = {path.name: growth_of(read_rows(path / "metrics.jsonl")) for path in complete}
    print(to_markdown(runs))
    if options.json is not None:
        document = {"command": f"python experiments/mismatch_growth.py {options.out}", "runs": runs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
