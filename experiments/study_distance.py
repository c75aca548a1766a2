"""Compares the arms of a study where they have moved equally far from the base, with exact tests over the seeds.

    python experiments/study_distance.py configs/study/distance.yaml benchmarks/study_distance.parquet --figure FILE

The distance of a step is the mean of ``policy/reference_kl`` (nats a token) over ten steps, and its accuracy the mean
reward over the same steps. The distance moved so far is the largest until then. Each planned pair is compared at the
smaller of its two distances at the end: each arm is read at its last step that has moved no further. The first planned
pair is tested alone, and the p values of the others are corrected for their number (exact_tests.py).

The second table has the same differences at the end of the runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from exact_tests import paired_test, table_cells
from matplotlib.figure import Figure
from study import Study, read_study
from study_outcome import trailing_mean
from study_rows import Runs, read_table

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.figure import COLORS, INK, QUIET, save_figure, style_axis
from rljax.record.rows import Row
from rljax.run.options import Positional, parse_arguments


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    study: Positional[Path]
    """The YAML file of the study."""
    rows: Positional[Path]
    """The Parquet file of the rows."""
    json: Path | None = None
    """The JSON file for the numbers."""
    figure: Path | None = None
    """The PNG file for the accuracy against the distance."""


@dataclass(frozen=True)
class Course:
    """The ``accuracy`` of a run and the distance ``moved`` so far at each step, float64 [steps]."""

    accuracy: np.ndarray
    moved: np.ndarray

    def step_at(self, distance: float) -> int:
        """Returns the last step, from 1, that has moved no further than ``distance``; 1 if there is none."""
        return max(int(np.searchsorted(self.moved, distance, side="right")), 1)


def course_of(rows: Sequence[Row]) -> Course:
    """Computes the course of a run. Raises ValueError if a step has no finite distance."""
    distances = [row.get("policy/reference_kl") for row in rows]
    if not all(distance is not None and np.isfinite(distance) for distance in distances):
        raise ValueError("a step has no finite policy/reference_kl: set loss.kl")
    accuracy = trailing_mean([row["reward/mean"] for row in rows])
    return Course(accuracy, np.maximum.accumulate(trailing_mean(distances)))


def compare(one: Mapping[int, Course], other: Mapping[int, Course], count: int) -> dict[str, Any]:
    """Compares two arms, each with its courses by seed, at equal distances and at their ends.

    ``count`` comparisons correct the p value. Raises ValueError if the arms have no seed in common.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        raise ValueError("the arms have no seed in common")
    read, equal, ends = {}, [], []
    for seed in seeds:
        pair = one[seed], other[seed]
        distance = min(float(course.moved[-1]) for course in pair)
        steps = [course.step_at(distance) for course in pair]
        read[str(seed)] = {"distance": distance, "steps": steps}
        first, second = (float(course.accuracy[step - 1]) for course, step in zip(pair, steps, strict=True))
        equal.append(first - second)
        ends.append(float(pair[0].accuracy[-1] - pair[1].accuracy[-1]))
    return {"read": read, "differences": equal, "equal": paired_test(equal, count), "ends": paired_test(ends, count)}


def tables(study: Study, runs: Runs) -> dict[str, Any]:
    """Compares each planned pair that was run, and gives the mean distance and accuracy of each arm at its end."""
    courses: dict[str, dict[int, Course]] = {arm: {} for arm in study.arms}
    for (arm, seed), rows in runs.items():
        courses[arm][seed] = course_of(rows)
    others = max(len(study.comparisons) - 1, 1)
    return {
        "arms": {
            arm: {
                "seeds": len(of_arm),
                "distance": float(np.mean([course.moved[-1] for course in of_arm.values()])),
                "accuracy": float(np.mean([course.accuracy[-1] for course in of_arm.values()])),
            }
            for arm, of_arm in courses.items()
            if of_arm
        },
        "comparisons": [
            {"arms": [one, other], **compare(courses[one], courses[other], others if place else 1)}
            for place, (one, other) in enumerate(study.comparisons)
            if courses[one] and courses[other]
        ],
    }


def markdown(found: Mapping[str, Any]) -> str:
    """Formats the tables as in the documentation."""
    lines = ["| arm | seeds | distance at the end | accuracy at the end |", "|---|---|---|---|"]
    for arm, row in found["arms"].items():
        lines.append(f"| {arm} | {row['seeds']} | {row['distance']:.2f} | {row['accuracy']:.2f} |")
    for key, head in (("equal", "at equal distance"), ("ends", "at the ends")):
        lines += ["", f"| {head} | seeds | difference | interval | better/same/worse | p | corrected p |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in found["comparisons"]:
            lines.append(f"| {' | '.join([' - '.join(row['arms']), *table_cells(row[key])])} |")
    return "\n".join(lines)


def figure_of(study: Study, runs: Runs) -> Figure:
    """Draws the accuracy against the distance moved so far: a line for each run, in the color of its arm."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    style_axis(axis, 0, 1)
    furthest = 0.0
    for arm, color in zip(study.arms, COLORS, strict=False):
        courses = [course_of(rows) for (name, _), rows in runs.items() if name == arm]
        for number, course in enumerate(courses):
            axis.plot(course.moved, course.accuracy, color=color, linewidth=0.9, label=None if number else arm)
            axis.plot(course.moved[-1], course.accuracy[-1], "o", color=color, markersize=4)
            furthest = max(furthest, float(course.moved[-1]))
    axis.set_xlim(0, furthest * 1.02)
    axis.set_xlabel("largest distance from the base so far (nats a token)", fontsize=8.5, color=QUIET)
    axis.set_title("Accuracy by distance; a dot is an end", loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.legend(fontsize=8.5, frameon=False)
    return figure


def main(argv: Sequence[str]) -> int:
    """Prints the tables and returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/study_distance.py", description=__doc__ or "")
    with caller_errors():
        study, runs = read_study(arguments.study), read_table(arguments.rows)
        if unknown := {arm for arm, _ in runs} - set(study.arms):
            raise ConfigError(f"{arguments.rows} has arms of another study: {', '.join(sorted(unknown))}")
        found = tables(study, runs)
    print(markdown(found))
    if arguments.figure is not None:
        save_figure(figure_of(study, runs), arguments.figure)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
