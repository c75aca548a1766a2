"""Compares the mismatch of turns after a tool's text with the mismatch of turns before it, from run directories.

    python tools/make_toy_base.py runs/calculator-base --task calculator
    python -m rljax.train experiments/calculator.yaml --run.dir runs/calculator-0 --run.seed 0
    python experiments/calculator_turns.py runs/calculator-* --json benchmarks/calculator_turns.json

The steps of a run are divided by their mean reward. "learning" ends where the trailing mean over ten steps first
reaches 0.9, and "learned" follows. Each number is a mean of |trainer - rollout| per token (nats), over all tokens of a
turn in these steps. The figure shows the reward, the share of trajectories with a call, and the mismatch of both turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rljax.errors import ConfigError, run_cli
from rljax.record.panel_style import COLORS, head, log_axis, save_figure, style_axis
from rljax.record.rows import Row, read_rows, trailing_mean
from rljax.record.text_tables import text_table

PLACES = ("turn_1", "turn_2", "after_1", "after_2_to_4")
LEARNED, WINDOW = 0.9, 10


def learned_step(rows: Sequence[Row]) -> int:
    """Returns the number of steps before the trailing mean reward is first ``LEARNED``; all steps if it never is."""
    mean = trailing_mean([row["reward/mean"] for row in rows], WINDOW)
    reached = np.flatnonzero(np.asarray(mean) >= LEARNED)
    return int(reached[0]) if len(reached) else len(rows)


def pooled(rows: Sequence[Row], place: str) -> tuple[float | None, int]:
    """Returns the mean |trainer - rollout| over all tokens of a place (nats; None without tokens) and their number."""
    pairs = [
        (row[f"turns/{place}/logprob_abs_diff_mean"], row[f"turns/{place}/token_count"])
        for row in rows
        if f"turns/{place}/token_count" in row
    ]
    tokens = int(sum(count for _, count in pairs))
    return (sum(mean * count for mean, count in pairs) / tokens if tokens else None), tokens


def turns_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Computes the numbers of one run."""
    step = learned_step(rows)
    found: dict[str, Any] = {"steps": len(rows), "learned_at": step if step < len(rows) else None}
    for name, part in (("first", rows[:WINDOW]), ("last", rows[-WINDOW:])):
        found[f"reward_{name}"] = float(np.mean([row["reward/mean"] for row in part]))
        found[f"calls_{name}"] = float(np.mean([row["turns/tool_calls"] for row in part]))
    for name, part in (("learning", rows[:step]), ("learned", rows[step:])):
        values = {place: pooled(part, place) for place in PLACES}
        found[name] = {place: {"mean": mean, "tokens": tokens} for place, (mean, tokens) in values.items()}
        first, second = values["turn_1"][0], values["turn_2"][0]
        found[name]["ratio"] = second / first if first and second else None
    return found


def plot(runs: dict[str, Sequence[Row]], out: Path) -> None:
    """Draws a column of three panels for each run."""
    figure = Figure(figsize=(5 * len(runs), 7.5), layout="constrained")
    axes = figure.subplots(3, len(runs), squeeze=False)
    for column, (name, rows) in enumerate(runs.items()):
        steps = [row["step"] for row in rows]
        for axis in axes[:, column]:
            style_axis(axis, steps[0], steps[-1])
        head(axes[0, column], f"{name}: reward", "mean reward")
        axes[0, column].plot(steps, [row["reward/mean"] for row in rows], color=COLORS[0])
        head(axes[1, column], "calls", "calls of a step")
        axes[1, column].plot(steps, [row["turns/tool_calls"] for row in rows], color=COLORS[2])
        head(axes[2, column], "mismatch by turn", "mean |trainer - rollout| (nats)")
        every = []
        for color, place in zip((COLORS[0], COLORS[1]), ("turn_1", "turn_2"), strict=True):
            values = [row.get(f"turns/{place}/logprob_abs_diff_mean", math.nan) for row in rows]
            axes[2, column].plot(steps, values, color=color, label=place.replace("_", " "))
            every += values
        log_axis(axes[2, column], np.asarray(every))
        axes[2, column].legend(frameon=False, fontsize=9)
    save_figure(figure, out)


def main(argv: Sequence[str]) -> int:
    """Prints a table with a row for each run, and writes the JSON file and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--figure", type=Path, help="file for the figure of the runs in --shown")
    parser.add_argument("--shown", nargs="*", default=[], metavar="NAME=RUN", help="the runs of the figure")
    options = parser.parse_args(argv)
    found = {}
    for run in options.runs:
        rows = read_rows(run / "metrics.jsonl")
        if not rows or "turns/tool_calls" not in rows[0]:
            raise ConfigError(f"{run} has no rows of a run with an environment")
        found[run.name] = turns_of(rows)
    cells = [["run", "reward", "calls a step", "learned at", "part", *PLACES, "turn 2 / turn 1"]]
    for name, run in found.items():
        for part in ("learning", "learned"):
            if not run[part]["turn_1"]["tokens"]:
                continue
            means = [f"{run[part][place]['mean'] or math.nan:.2e}" for place in PLACES]
            told = [f"{run['reward_first']:.2f} -> {run['reward_last']:.2f}"]
            told += [f"{run['calls_first']:.0f} -> {run['calls_last']:.0f}", str(run["learned_at"])]
            cells.append([name, *told, part, *means, f"{run[part]['ratio'] or math.nan:.2f}"])
    print(text_table(cells))
    if options.json:
        options.json.write_text(json.dumps({"runs": found}, indent=1) + "\n")
    if options.figure:
        plot(
            {
                name: read_rows(Path(run) / "metrics.jsonl")
                for name, _, run in (s.partition("=") for s in options.shown)
            },
            options.figure,
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
