"""Draws when the trainer and the servers of runs worked: ``python experiments/timeline.py RUN... --out FILE``.

Each run has two lanes over the seconds since the first drawn step. One is the trainer (training, publishing,
evaluating, waiting), the other the engine (sampling, in two alternating shades, with the step of the samples). They
come from ``time/*`` of metrics.jsonl. The program prints numbers over all steps but the first ones, and --json writes
them: seconds per step, response tokens per second, and the shares of the time in which the trainer waited and the
engine did not sample.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.panel_style import save_figure
from rljax.record.rows import Row, read_rows

WORK = {"pack": "train", "train": "train", "prepare": "publish", "publish": "publish", "eval": "evaluate"}
"""The kind of work in each phase of a step in which the trainer works."""
ORDER = ("eval_at_start", "wait", "rollout", "pack", "train", "prepare", "drain", "publish", "eval")
COLORS = {"train": "#1f5fa8", "publish": "#d55e00", "evaluate": "#a8428c"}
SAMPLING = ("#00916e", "#8fd0bd")


@dataclass(frozen=True)
class Arguments:
    """The options of the program.

    Attributes:
      runs: The run directories.
      out: The PNG to write.
      first: The first step to draw.
      steps: The number of steps to draw.
      skip: The number of steps at the start that are not counted, because programs compile in them.
      json: The JSON file for the numbers.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path
    first: int = 20
    steps: int = 6
    skip: int = 5
    json: Path | None = None


@dataclass(frozen=True)
class Lane:
    """The times of a run, in seconds since the beginning of its first step.

    Attributes:
      starts: The start of each step, [n].
      ends: The end of each step, [n].
      work: The work of the trainer, each (start, end, kind).
      sampling: The sampling of the engine, each (start, end, step).
    """

    starts: np.ndarray
    ends: np.ndarray
    work: list[tuple[float, float, str]]
    sampling: list[tuple[float, float, int]]


def lane_of(rows: Sequence[Row]) -> Lane:
    """Computes the times of consecutive rows; a step begins at the end of the one before."""
    ends = np.cumsum([row["time/step_s"] for row in rows])
    starts = ends - [row["time/step_s"] for row in rows]
    work, sampling = [], []
    for row, start in zip(rows, starts, strict=True):
        now = start
        is_ahead = "time/ahead_s" in row
        begun = start - row["time/ahead_s"] if is_ahead else start + row.get("time/eval_at_start_s", 0.0)
        sampling.append((begun, begun + row["time/rollout_s"], row["step"]))
        for phase in ORDER:
            if phase == "rollout" and is_ahead:
                continue
            seconds = row.get(f"time/{phase}_s", 0.0)
            if phase in WORK:
                work.append((now, now + seconds, WORK[phase]))
            now += seconds
    return Lane(starts, ends, work, sampling)


def numbers(rows: Sequence[Row], skip: int) -> dict[str, float]:
    """Computes the numbers over the rows from ``skip`` on."""
    kept = rows[skip:]
    total = sum(row["time/step_s"] for row in kept)
    waited = sum(
        sum(row.get(f"time/{phase}_s", 0.0) for phase in ("wait", "drain"))
        + (0.0 if "time/ahead_s" in row else row["time/rollout_s"])
        for row in kept
    )
    tokens = sum(row["perf/response_tokens_per_s"] * row["time/rollout_s"] for row in kept)
    return {
        "seconds_per_step": total / len(kept),
        "response_tokens_per_second": tokens / total,
        "trainer_waits": waited / total,
        "engine_idle": 1.0 - min(1.0, sum(row["time/rollout_s"] for row in kept) / total),
    }


def draw(axis: Axes, lane: Lane, first: int, last: int) -> None:
    """Draws the steps of the row indices ``first`` to ``last``, exclusive."""
    origin, end = lane.starts[first], lane.ends[last - 1]
    for begun, ended, what in lane.work:
        if origin <= begun < end:
            axis.barh(1, ended - begun, left=begun - origin, height=0.7, color=COLORS[what])
    for begun, ended, step in lane.sampling:
        left, right = max(begun, origin), min(ended, end)
        if left < right:
            axis.barh(0, right - left, left=left - origin, height=0.7, color=SAMPLING[step % 2])
            if right - left > 0.03 * (end - origin):
                center = (left + right) / 2 - origin
                axis.text(center, 0, str(step), ha="center", va="center", fontsize=7, color="white")
    axis.set_yticks([1, 0], ["trainer", "engine"])
    axis.set_xlim(0, end - origin)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def main(argv: Sequence[str]) -> int:
    """Draws the figure, prints the numbers, and returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    with caller_errors():
        runs = {run.name: read_rows(run / "metrics.jsonl") for run in arguments.runs}
    first, last = arguments.first - 1, arguments.first - 1 + arguments.steps
    short = [name for name, rows in runs.items() if len(rows) < max(last, arguments.skip + 1)]
    if short or not 0 <= first < last:
        raise ConfigError(f"steps {arguments.first} to {last} are not in {', '.join(short) or 'any run'}")
    figure = Figure(figsize=(11, 0.6 + 1.25 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    lanes = {name: lane_of(rows) for name, rows in runs.items()}
    longest = max(lane.ends[last - 1] - lane.starts[first] for lane in lanes.values())
    results: dict[str, Any] = {}
    for axis, (name, rows) in zip(axes, runs.items(), strict=True):
        results[name] = counted = numbers(rows, arguments.skip)
        draw(axis, lanes[name], first, last)
        axis.set_xlim(0, longest)
        idle = f"trainer waits {counted['trainer_waits']:.0%}, engine idle {counted['engine_idle']:.0%}"
        axis.set_title(f"{name}: {counted['seconds_per_step']:.2f} s a step, {idle}", fontsize=9, loc="left")
        print(name, *(f"{key} {value:.3g}" for key, value in counted.items()))
    axes[-1].set_xlabel("seconds", fontsize=8)
    patches = [Patch(color=color, label=what) for what, color in COLORS.items()]
    patches.append(Patch(color=SAMPLING[0], label="sample (for step)"))
    figure.legend(handles=patches, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, arguments.out)
    if arguments.json:
        record = {"command": "python experiments/timeline.py " + " ".join(argv), "runs": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
