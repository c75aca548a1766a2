"""Compares the arms of a study from its rows, with exact tests and intervals over the seeds (exact_tests.py).

    python experiments/study_claims.py configs/study/slow.yaml benchmarks/study_slow.parquet --json benchmarks/slow.json

Reads only the Parquet file that experiments/study.py writes. There are four tables:

arms: The number of seeds that end well, with its 95% interval, and the numbers that collapse, fall and never learn
  (study_outcome.py). Arms whose runs are the same, seed by seed, share one line.
comparisons: The mean difference of the final accuracy between two arms with the same seeds, for the pairs in the
  study's file. Each has the p value of its signs, and Fisher's of the runs that end well. With m comparisons the
  corrected p value is m times the first, and an interval has the coverage 1 - 0.05 / m (Bonferroni).
signals: The step at which a signal changes, against the step of the fall, in each run of the arms of --signals.
runs: The final accuracy, the surge's step and the mismatch at the end of each arm, seed by seed.

A signal changes at the first step from which, for PERSISTENCE steps, its trailing mean is above FACTOR times (or below
1 / FACTOR of) its median over the REFERENCE steps from the surge on. A change in a run that does not fall is a false
alarm. A step without a measurement has the value of the step before.
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
from exact_tests import fisher_p, paired_test, share_interval, table_cells
from study import read_study
from study_outcome import ENDS_WELL, LEARNED, Outcome, outcome_of, trailing_mean
from study_rows import Runs, read_table

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.rows import EDGE_STEPS, Row

FACTOR, PERSISTENCE, REFERENCE = 1.5, 5, 40
SIGNALS = {
    "gradient norm": "optimizer/grad_norm",
    "gradient noise": "optimizer/grad_noise",
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "k3_kl": "mismatch/k3_kl",
    "entropy": "policy/entropy",
    "length": "response_length/mean",
    "effective sample size": "is/sequence_effective_sample_size",
}
"""The metric of each signal, by name in the table."""

Outcomes = Mapping[str, Mapping[int, Outcome]]  # the outcome by arm and seed


def same_arms(runs: Runs) -> dict[str, str]:
    """Returns, for each arm, the first arm with the same runs: the same seeds, and rows that differ only in time."""
    rows_of: dict[str, dict[int, str]] = {}
    for (arm, seed), rows in runs.items():
        timeless = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
        rows_of.setdefault(arm, {})[seed] = repr(timeless)
    return {arm: next(first for first, other in rows_of.items() if other == rows) for arm, rows in rows_of.items()}


def arm_row(outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """Computes the line of one arm."""
    finals = np.array([outcome.final for outcome in outcomes.values()])
    falls = [outcome.fall_step for outcome in outcomes.values() if outcome.fall_step is not None]
    well = int(np.sum(finals > ENDS_WELL))
    return {
        "seeds": len(outcomes),
        "end_well": well,
        "end_well_interval": share_interval(well, len(outcomes), 0.95),
        "never_learned": sum(outcome.peak < LEARNED for outcome in outcomes.values()),
        "collapsed": sum(outcome.collapse_step is not None for outcome in outcomes.values()),
        "fell": len(falls),
        "final_mean": float(finals.mean()),
        "peak_mean": float(np.mean([outcome.peak for outcome in outcomes.values()])),
        "fall_step_median": float(np.median(falls)) if falls else None,
    }


def comparison_row(one: Mapping[int, Outcome], other: Mapping[int, Outcome], count: int) -> dict[str, Any]:
    """Computes the line of one of ``count`` comparisons, over the seeds that both arms have.

    Raises:
      ValueError: The arms have no seed in common.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        raise ValueError("the arms have no seed in common")
    differences = [one[seed].final - other[seed].final for seed in seeds]
    well, other_well = (sum(arm[seed].final > ENDS_WELL for seed in seeds) for arm in (one, other))
    return {
        **paired_test(differences, count),
        "end_well": [well, other_well],
        "fisher_p": fisher_p(well, len(seeds), other_well, len(seeds)),
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
        if outcome.fall_step is None:
            healthy += 1
            false_alarms += step is not None
        elif step is None or step > outcome.fall_step:
            missed += 1
        else:
            leads.append(outcome.fall_step - step)
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
    same = same_arms(runs)
    return {
        "arms": {arm: arm_row(by_seed) | {"same_as": same[arm]} for arm, by_seed in present.items()},
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
    names: dict[str, list[str]] = {}
    for arm, row in tables["arms"].items():
        names.setdefault(row["same_as"], []).append(arm)
    lines = [
        "| arm | seeds | end well | 95% interval | never learned | collapsed | fell | at step | peak | final |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, together in names.items():
        row = tables["arms"][arm]
        at = "-" if row["fall_step_median"] is None else f"{row['fall_step_median']:.0f}"
        well = "{:.2f} to {:.2f}".format(*row["end_well_interval"])
        cells = (", ".join(together), row["seeds"], row["end_well"], well, row["never_learned"], row["collapsed"])
        lines.append(_line(*cells, row["fell"], at, f"{row['peak_mean']:.2f}", f"{row['final_mean']:.2f}"))
    lines += ["", "| compared | difference | interval | better/same/worse | p | corrected p | end well | Fisher p |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in tables["comparisons"]:
        seeds, *cells = table_cells(row)
        well = "{}, {} of {}".format(*row["end_well"], seeds)
        lines.append(_line(" - ".join(row["arms"]), *cells, well, f"{row['fisher_p']:.2g}"))
    lines += ["", "| signal | median lead | leads | missed | false alarms |", "|---|---|---|---|---|"]
    for name, row in tables["signals"].items():
        lead = "-" if row["lead_median"] is None else f"{row['lead_median']:.0f}"
        alarms = f"{row['false_alarms']} of {row['healthy']}"
        lines.append(_line(name, lead, " ".join(map(str, row["leads"])), row["missed"], alarms))
    lines += ["", f"| arm | final of each seed | surge | mismatch, last {EDGE_STEPS} steps |", "|---|---|---|---|"]
    for arm, together in names.items():
        runs = tables["runs"][arm]
        finals = " ".join(f"{run['final']:.2f}" for run in runs.values())
        surges = " ".join(str(run["surge_step"] or "-") for run in runs.values())
        lines.append(
            _line(", ".join(together), finals, surges, " ".join(f"{run['mismatch_last']:.2g}" for run in runs.values()))
        )
    return "\n".join(lines)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str]) -> int:
    """Prints the tables and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("rows", type=Path, help="rows.parquet of the study")
    parser.add_argument("--signals", nargs="*", default=[], help="arms whose signals are compared with the fall")
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
