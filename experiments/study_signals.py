"""Tells how many steps before a fall each signal of a study's runs changes, from the rows.

    python experiments/study_signals.py benchmarks/study_slow.parquet --arms constant

A signal changes at the first step from which, for PERSISTENCE steps, its trailing mean is above FACTOR times (or below
1 / FACTOR of) its median over the REFERENCE steps from the surge on. A change in a run that does not fall
(study_outcome.py) is a false alarm. A step without a measurement has the value of the step before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from study_outcome import Outcome, outcome_of, trailing_mean
from study_rows import Runs, read_table

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.rows import Row
from rljax.run.options import Positional, parse_arguments

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


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    rows: Positional[Path]
    """The rows.parquet of a study."""
    arms: tuple[str, ...] = ()
    """The arms whose runs count; by default all."""


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


def signal_rows(runs: Runs, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Computes the line of each signal that some run of these arms has.

    Raises:
      ConfigError: An arm has no run.
    """
    if unknown := set(arms) - {arm for arm, _ in runs}:
        raise ConfigError(f"the rows have no run of the arms {', '.join(sorted(unknown))}")
    chosen = [(outcome_of(rows), rows) for (arm, _), rows in runs.items() if arm in arms]
    measured = {key for _, rows in chosen for row in rows for key, value in row.items() if value is not None}
    return {name: signal_row(metric, chosen) for name, metric in SIGNALS.items() if metric in measured}


def markdown(signals: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats the lines as a table in Markdown."""
    lines = ["| signal | median lead | leads | missed | false alarms |", "|---|---|---|---|---|"]
    for name, row in signals.items():
        lead = "-" if row["lead_median"] is None else f"{row['lead_median']:.0f}"
        leads, alarms = " ".join(map(str, row["leads"])), f"{row['false_alarms']} of {row['healthy']}"
        lines.append(f"| {name} | {lead} | {leads} | {row['missed']} | {alarms} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/study_signals.py", description=__doc__ or "")
    with caller_errors():
        runs = read_table(arguments.rows)
        print(markdown(signal_rows(runs, arguments.arms or [arm for arm, _ in runs])))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
