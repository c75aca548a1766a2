"""Compares the arms of a study from its rows, with intervals over the seeds.

    python experiments/study_claims.py configs/study/slow.yaml benchmarks/study_slow.parquet --json benchmarks/slow.json

Reads only the Parquet file that experiments/study.py writes. There are four tables:

arms: The number of seeds that end well and that collapse (study_outcome.py), and the mean final accuracy of each arm.
comparisons: The mean difference of the final accuracy between two arms with the same seeds, for the pairs in the
  study's file. Intervals are percentiles of 10,000 bootstrap samples of the seeds. Each of m comparisons has the
  coverage 1 - 0.05 / m, so that all together have 95% (Bonferroni).
signals: The step at which a signal changes, against the step of the collapse, in each run of the arms of --signals.
runs: The final accuracy, the surge's step and the mismatch at the end of each arm, seed by seed.

A signal changes at the first step from which, for PERSISTENCE steps, its trailing mean is above FACTOR times (or below
1 / FACTOR of) its median over the REFERENCE steps from the surge on. A change in a run that does not collapse is a
false alarm. A step without a measurement has the value of the step before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from study import read_study
from study_outcome import Outcome, outcome_of
from study_rows import read_table

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.rows import EDGE_STEPS, Row, trailing_mean

ENDS_WELL = 0.3  # a run ends well if its final accuracy is above this
RESAMPLES = 10_000
FACTOR, PERSISTENCE, REFERENCE = 1.5, 5, 40
SIGNALS = {
    "gradient norm": "optimizer/grad_norm",
    "gradient noise": "optimizer/grad_noise",
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "k3_kl": "mismatch/k3_kl",
    "entropy": "policy/entropy",
    "length": "response_length/mean",
}
"""The metric of each signal, by name in the table."""

Outcomes = Mapping[str, Mapping[int, Outcome]]  # arm -> seed


def interval(values: np.ndarray, coverage: float) -> tuple[float, float]:
    """Returns the interval of the mean from bootstrap percentiles; for one value it is that value twice."""
    samples = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[samples].mean(1), [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def arm_row(outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """Computes the line of one arm."""
    finals = np.array([outcome.final for outcome in outcomes.values()])
    collapses = [outcome.collapse_step for outcome in outcomes.values() if outcome.collapse_step is not None]
    return {
        "seeds": len(outcomes),
        "end_well": int(np.sum(finals > ENDS_WELL)),
        "collapsed": len(collapses),
        "final_mean": float(finals.mean()),
        "final_interval": interval(finals, 0.95),
        "peak_mean": float(np.mean([outcome.peak for outcome in outcomes.values()])),
        "collapse_step_median": float(np.median(collapses)) if collapses else None,
    }


def comparison_row(one: Mapping[int, Outcome], other: Mapping[int, Outcome], count: int) -> dict[str, Any]:
    """Computes the line of one of ``count`` comparisons, over the seeds that both arms have.

    Raises:
      ValueError: The arms have no seed in common.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        raise ValueError("the arms have no seed in common")
    differences = np.array([one[seed].final - other[seed].final for seed in seeds])
    return {
        "seeds": len(seeds),
        "difference": float(differences.mean()),
        "interval": interval(differences, 1 - 0.05 / count),
        "better": int(np.sum(differences > 0)),
    }


def change_step(values: Sequence[float | None], surge: int) -> int | None:
    """Returns the 1-based step at which a signal changes, by the rule above; None if it does not.

    Args:
      values: The value of each step.
      surge: The 1-based step of the surge.
    """
    smooth = trailing_mean(values)
    reference = np.median(smooth[surge - 1 : surge - 1 + REFERENCE])
    after = smooth[surge - 1 + REFERENCE :]
    changed = (after > FACTOR * reference) | (after < reference / FACTOR)
    for i in range(len(changed) - PERSISTENCE + 1):
        if changed[i : i + PERSISTENCE].all():
            return surge + REFERENCE + i
    return None


def edges(rows: Sequence[Row]) -> dict[str, float | None]:
    """Computes the mean mismatch of the first and last ``EDGE_STEPS``, and the median of the gradient noise, if any."""
    mismatch = [row["mismatch/log_ppl_abs_diff"] for row in rows]
    noise = [value for row in rows if (value := row.get("optimizer/grad_noise")) is not None and np.isfinite(value)]
    return {
        "mismatch_first": float(np.mean(mismatch[:EDGE_STEPS])),
        "mismatch_last": float(np.mean(mismatch[-EDGE_STEPS:])),
        "grad_noise_median": float(np.median(noise)) if noise else None,
    }


def filled(values: Sequence[float | None]) -> list[float | None]:
    """Replaces each missing or infinite value by the last one before it; the values before the first stay."""
    full: list[float | None] = []
    for value in values:
        is_known = value is not None and np.isfinite(value)
        full.append(value if is_known or not full else full[-1])
    return full


def signal_row(metric: str, runs: Sequence[tuple[Outcome, Sequence[Row]]]) -> dict[str, Any]:
    """Computes the line of one signal, over the runs that have a surge."""
    leads, missed, false_alarms, healthy = [], 0, 0, 0
    for outcome, rows in runs:
        if outcome.surge_step is None:
            continue
        step = change_step(filled([row.get(metric) for row in rows]), outcome.surge_step)
        if outcome.collapse_step is None:
            healthy += 1
            false_alarms += step is not None
        elif step is None or step > outcome.collapse_step:
            missed += 1
        else:
            leads.append(outcome.collapse_step - step)
    return {
        "leads": sorted(leads),
        "lead_median": float(np.median(leads)) if leads else None,
        "missed": missed,
        "false_alarms": false_alarms,
        "healthy": healthy,
    }


def claims(study_file: Path, table: Path, signal_arms: Sequence[str]) -> dict[str, Any]:
    """Computes the four tables.

    Raises:
      ConfigError, ValueError: The files do not fit one another.
    """
    study, runs = read_study(study_file), read_table(table)
    if unknown := {arm for arm, _ in runs} - set(study.arms) or set(signal_arms) - set(study.arms):
        raise ConfigError(f"{study_file} has no arm {', '.join(sorted(unknown))}")
    outcomes: dict[str, dict[int, Outcome]] = {arm: {} for arm in study.arms}
    for (arm, seed), rows in runs.items():
        outcomes[arm][seed] = outcome_of(rows)
    present = {arm: by_seed for arm, by_seed in outcomes.items() if by_seed}
    pairs = [(one, other) for one, other in study.comparisons if one in present and other in present]
    signals = [(outcomes[arm][seed], rows) for (arm, seed), rows in runs.items() if arm in signal_arms]
    return {
        "arms": {arm: arm_row(by_seed) for arm, by_seed in present.items()},
        "comparisons": [
            {"arms": list(pair), **comparison_row(present[pair[0]], present[pair[1]], len(study.comparisons))}
            for pair in pairs
        ],
        "signals": {name: signal_row(metric, signals) for name, metric in SIGNALS.items()} if signals else {},
        "runs": {
            arm: {str(seed): dataclasses.asdict(outcome) | edges(runs[arm, seed]) for seed, outcome in by_seed.items()}
            for arm, by_seed in present.items()
        },
    }


def markdown(tables: Mapping[str, Any]) -> str:
    """Formats the tables in Markdown, as in the documentation."""
    lines = [
        "| arm | seeds | end well | collapsed | at step | peak | final | 95% interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in tables["arms"].items():
        at = "-" if row["collapse_step_median"] is None else f"{row['collapse_step_median']:.0f}"
        cells = (arm, row["seeds"], row["end_well"], row["collapsed"], at, f"{row['peak_mean']:.2f}")
        lines.append(_line(*cells, f"{row['final_mean']:.2f}", _between(row["final_interval"])))
    lines += ["", "| compared | seeds | difference | interval | better |", "|---|---|---|---|---|"]
    for row in tables["comparisons"]:
        cells = (" - ".join(row["arms"]), row["seeds"], f"{row['difference']:+.2f}")
        lines.append(_line(*cells, _between(row["interval"]), f"{row['better']} of {row['seeds']}"))
    lines += ["", "| signal | median lead | leads | missed | false alarms |", "|---|---|---|---|---|"]
    for name, row in tables["signals"].items():
        lead = "-" if row["lead_median"] is None else f"{row['lead_median']:.0f}"
        alarms = f"{row['false_alarms']} of {row['healthy']}"
        lines.append(_line(name, lead, " ".join(map(str, row["leads"])), row["missed"], alarms))
    lines += ["", f"| arm | final of each seed | surge | mismatch, last {EDGE_STEPS} steps |", "|---|---|---|---|"]
    for arm, runs in tables["runs"].items():
        finals = " ".join(f"{run['final']:.2f}" for run in runs.values())
        surges = " ".join(str(run["surge_step"] or "-") for run in runs.values())
        lines.append(_line(arm, finals, surges, " ".join(f"{run['mismatch_last']:.2g}" for run in runs.values())))
    return "\n".join(lines)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _between(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:+.2f} to {bounds[1]:+.2f}"


def main(argv: Sequence[str]) -> int:
    """Prints the tables and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("rows", type=Path, help="rows.parquet of the study")
    parser.add_argument("--signals", nargs="*", default=[], help="arms whose signals are compared with the collapse")
    parser.add_argument("--json", type=Path, help="JSON file for the tables, with the outcome of each run")
    options = parser.parse_args(argv)
    with caller_errors():
        tables = claims(options.study, options.rows, options.signals)
    print(markdown(tables))
    if options.json is not None:
        options.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
