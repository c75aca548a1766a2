"""Judges the runs of a study: which learn to above 0.6 and then collapse, and what grows before.

    python experiments/subject_search.py configs/study/collapse.yaml benchmarks/study_collapse.parquet --arms constant

It prints a line for each run. docs/studies.md defines accuracy, fall and collapse. The plateau of a run begins at the
first step whose accuracy is at least 0.9 of the peak, and ends at the last one. A value "at" a step is the mean of the
ten steps up to it. A fork counts from its first own step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from study import read_study
from study_outcome import LEARNED, outcome_of, trailing_mean
from study_rows import read_table
from study_signals import filled

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.rows import Row
from rljax.run.options import Positional, parse_arguments

WELL = 0.6  # the search looks for a collapse from a peak above this
PLATEAU = 0.9  # the share of the peak that bounds the plateau
WANTED = "collapsed from above 0.6"

SERIES = {
    "mismatch": "mismatch/log_ppl_abs_diff",
    "k3": "mismatch/k3_kl",
    "gradient norm": "optimizer/grad_norm",
    "entropy": "policy/entropy",
    "length": "response_length/mean",
    "tokens above 2": "is/token_fraction_above",
    "self-mismatch": "mismatch_self/log_ppl_abs_diff",
}
"""The metric of each series, by its name in the tables. Runs need not have the last one."""


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    study: Positional[Path]
    """The YAML file of the runs."""
    rows: Positional[Path]
    """The Parquet file of their rows."""
    arms: tuple[str, ...] = ()
    """The arms to judge; by default all."""


def verdict(peak: float, collapse: int | None) -> str:
    """Names the result of a run."""
    if peak < LEARNED:
        return "never learned"
    if collapse is not None:
        return WANTED if peak > WELL else "collapsed"
    return "learned above 0.6" if peak > WELL else "learned"


def fork_step(settings: Mapping[str, Any]) -> int:
    """Returns the step up to which the rows belong to another run; 0 for a run from the start."""
    return int(Path(settings.get("run.fork", "0")).name)


def judge(rows: Sequence[Row], fork: int = 0) -> dict[str, Any]:
    """Computes the numbers of one run.

    Args:
      rows: The rows of all steps, including the ones up to the fork.
      fork: The result of ``fork_step``.

    Returns:
      The peak, the fall and the verdict over all rows, and ``at``: the series at the beginning and the end of the
      plateau, and at the fall or the end. They are from the run's own rows.
    """
    outcome = outcome_of(rows)
    accuracy = trailing_mean([row["reward/mean"] for row in rows])
    high = np.flatnonzero(accuracy >= PLATEAU * outcome.peak) + 1
    stops = {"plateau": int(high[0]), "onset": int(high[-1]), "end": outcome.fall_step or len(rows)}
    stops = {when: max(stop, fork + 1) for when, stop in stops.items()}
    return {
        "steps": outcome.steps,
        "fork": fork,
        "peak": outcome.peak,
        "peak_step": outcome.peak_step,
        "lowest_after": float(accuracy[outcome.peak_step - 1 :].min()),
        "final": outcome.final,
        "fall_step": outcome.fall_step,
        "verdict": verdict(outcome.peak, outcome.collapse_step),
        "stops": stops,
        "at": {
            when: {
                name: float(trailing_mean(filled([row.get(key) for row in rows[fork:stop]]))[-1])
                for name, key in SERIES.items()
                if any(row.get(key) is not None for row in rows)
            }
            for when, stop in stops.items()
        },
        "seconds": outcome.wall_seconds,
    }


def to_markdown(settings: Mapping[str, str], runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats a line for each run; three numbers with arrows are the two ends of the plateau, and the fall or end."""
    shown = ("mismatch", "gradient norm", "entropy", "length")
    head = ["run", "changed", "steps", "peak (step)", "lowest after", "final", "fell at", "verdict", *shown]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, run in runs.items():
        cells = [name, settings[name], str(run["steps"]), f"{run['peak']:.2f} ({run['peak_step']})"]
        cells += [f"{run['lowest_after']:.2f}", f"{run['final']:.2f}", str(run["fall_step"] or "-"), run["verdict"]]
        cells += [" → ".join(f"{run['at'][when][key]:.2g}" for when in ("plateau", "onset", "end")) for key in shown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/subject_search.py", description=__doc__ or "")
    study = read_study(arguments.study)
    with caller_errors():
        table = read_table(arguments.rows)
    table = {run: rows for run, rows in table.items() if not arguments.arms or run[0] in arguments.arms}
    if not table:
        raise ConfigError(f"{arguments.rows} has no run of the arms {', '.join(arguments.arms)}")
    arms = {f"{arm}-{seed}": study.arms[arm] for arm, seed in table}
    judged = {f"{arm}-{seed}": judge(rows, fork_step(study.arms[arm])) for (arm, seed), rows in table.items()}
    changed = {
        name: ", ".join(f"{key.partition('.')[2]} {Path(str(value)).name}" for key, value in arm.items())
        for name, arm in arms.items()
    }
    print(to_markdown(changed, judged))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
