"""Compares staleness in a study with real servers: ``python experiments/study_ahead.py runs/study-ahead``.

Reads the runs ARM-SEED of a study (``experiments/study.py``) and prints a Markdown table with a line for each arm: time
and tokens from ``time/*``, the age of batches, the parts of the mismatch, accuracy, surge and collapse. Seconds and
tokens leave out the first five steps, in which programs compile. All numbers but accuracies are medians over the seeds.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from study_outcome import outcome_of
from timeline import numbers

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.rows import Row, read_rows

COMPILING = 5  # steps in which programs compile
EARLY, LATE = slice(5, 15), slice(-10, None)  # steps 6 to 15, around the surge, and the last ten
HEADS = {
    "s a step": ("seconds_per_step", ".2f"),
    "tokens/s": ("response_tokens_per_second", ".0f"),
    "trainer waits": ("trainer_waits", ".0%"),
    "versions old": ("staleness", ".1f"),
    "numerics, steps 6-15": ("numerics_early", ".1e"),
    "drift, steps 6-15": ("drift_early", ".1e"),
    "drift, last ten": ("drift_late", ".1e"),
    "surge": ("surge_step", ".0f"),
}


@dataclass(frozen=True)
class Arguments:
    """The options of the program.

    Attributes:
      runs: The directory of the study's runs.
      json: The JSON file for the numbers of each run.
    """

    runs: Annotated[Path, tyro.conf.Positional]
    json: Path | None = None


def mean_of(rows: Sequence[Row], key: str) -> float | None:
    """Computes the mean of a metric over the rows that have it; None without any."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(np.mean(values)) if values else None


def counted(rows: Sequence[Row]) -> dict[str, Any]:
    """Computes the numbers of one run."""
    parts = {"numerics": "mismatch_numerics/log_ppl_abs_diff", "drift": "mismatch_drift/log_ppl_abs_diff"}
    return {
        **numbers(rows, COMPILING),
        "staleness": mean_of(rows[COMPILING:], "rollout/staleness"),
        **{f"{name}_early": mean_of(rows[EARLY], key) for name, key in parts.items()},
        **{f"{name}_late": mean_of(rows[LATE], key) for name, key in parts.items()},
        **dataclasses.asdict(outcome_of(rows)),
    }


def line(arm: str, runs: Sequence[dict[str, Any]]) -> str:
    """Formats an arm's line of the table."""
    cells = [arm, str(len(runs))]
    for name, form in HEADS.values():
        known = [run[name] for run in runs if run[name] is not None]
        cells.append(format(float(np.median(known)), form) if known else "")
    collapsed = sum(run["collapse_step"] is not None for run in runs)
    falls = [run["fall_step"] for run in runs if run["fall_step"] is not None]
    at = f" (step {', '.join(map(str, falls))})" if falls else ""
    cells += [" ".join(f"{run['final']:.2f}" for run in runs), str(collapsed), f"{len(falls)}{at}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), description=__doc__)
    arms: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(arguments.runs.glob("*-*/summary.json")):
        arm, _, seed = path.parent.name.rpartition("-")
        with caller_errors():
            arms.setdefault(arm, {})[seed] = counted(read_rows(path.parent / "metrics.jsonl"))
    if not arms:
        raise ConfigError(f"{arguments.runs} has no complete run")
    heads = ["arm", "seeds", *HEADS, "final accuracy of each seed", "collapsed", "fell"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for arm, runs in arms.items():
        print(line(arm, list(runs.values())))
    if arguments.json:
        command = f"python experiments/study_ahead.py {shlex.join(argv)}"
        arguments.json.write_text(json.dumps({"command": command, "arms": arms}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
