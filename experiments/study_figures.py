"""Draws a figure for each claim of a study: ``python experiments/study_figures.py STUDY ROWS --out docs``.

The study's file has the ``claims``, each with a title, ``arms`` and ``metrics``. A figure has a panel over the steps
for each metric, with a thin line for each run and a thick line for the median of an arm's seeds. Both are trailing
means of ten steps. The last panel has the final accuracy of each seed and the mean over the seeds. With ``signals``
another figure shows how many steps before a fall each signal changes, by the rule of experiments/study_signals.py. The
program reads only ROWS, the study's rows.parquet.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import Study, read_study
from study_outcome import outcome_of, trailing_mean
from study_rows import Runs, read_table
from study_signals import filled, signal_rows

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.figure import COLORS, INK, QUIET, log_axis, save_figure, style_axis
from rljax.record.rows import Row
from rljax.run.options import Positional, parse_arguments


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    study: Positional[Path]
    """The YAML file of the study."""
    rows: Positional[Path]
    """The rows.parquet of the study."""
    out: Path
    """The directory of the figures study_NAME_CLAIM.png, where NAME is the study's file without its suffix."""
    signals: tuple[str, ...] = ()
    """The arms whose signals are compared with the fall."""


def plot_metric(axis: Axes, runs: Runs, arms: Sequence[str], metric: str) -> None:
    """Draws a metric of each run, and the median over the seeds at the steps that all runs of an arm have."""
    last = max((rows[-1]["step"] for (arm, _), rows in runs.items() if arm in arms), default=1)
    style_axis(axis, 1, last)
    axis.set_title(metric, loc="left", fontsize=10, fontweight="bold", color=INK)
    drawn = []
    for color, arm in zip(COLORS, arms, strict=False):
        curves = [_curve(rows, metric) for (name, _), rows in runs.items() if name == arm]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.7, alpha=0.35)
        if curves:
            common = min(map(len, curves))
            median = np.median([curve[:common] for curve in curves], axis=0)
            axis.plot(range(1, common + 1), median, color=color, linewidth=2.2, label=arm)
            drawn += curves
    if drawn and (metric.startswith("mismatch/") or metric == "optimizer/grad_noise"):
        log_axis(axis, np.concatenate(drawn))


def plot_finals(axis: Axes, runs: Runs, arms: Sequence[str]) -> None:
    """Draws the final accuracy of each run, and the mean of each arm."""
    style_axis(axis, 0, 1)
    axis.set_xlim(-0.03, 1.03)
    axis.set_xticks(np.linspace(0, 1, 6))
    axis.set_xlabel("final accuracy", fontsize=8.5, color=QUIET)
    axis.set_title("each seed, and the mean", loc="left", fontsize=10, fontweight="bold", color=INK)
    for place, (color, arm) in enumerate(zip(COLORS, arms, strict=False)):
        finals = np.array([outcome_of(rows).final for (name, _), rows in runs.items() if name == arm])
        if len(finals):
            axis.plot(finals, [place - 0.15] * len(finals), "o", color=color, alpha=0.45, markersize=5)
            axis.plot(finals.mean(), place + 0.15, "D", color=color, markersize=6)
    axis.set_yticks(range(len(arms)), arms)
    axis.set_ylim(len(arms) - 0.5, -0.5)


def claim_figure(title: str, runs: Runs, arms: Sequence[str], metrics: Sequence[str]) -> Figure:
    """Draws a panel for each metric and a panel of final accuracies, for the arms that have runs.

    A line has at most three panels, and the names of the arms stand below all panels.
    """
    arms = [arm for arm in arms if any(name == arm for name, _ in runs)]
    count = len(metrics) + 1
    lines = math.ceil(count / 3)
    columns = math.ceil(count / lines)
    figure = Figure(figsize=(3.9 * columns, 0.3 + 3.3 * lines), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    *panels, finals = [figure.add_subplot(lines, columns, place + 1) for place in range(count)]
    for axis, metric in zip(panels, metrics, strict=True):
        plot_metric(axis, runs, arms, metric)
    if panels:
        lines_and_names = panels[0].get_legend_handles_labels()
        place = "outside lower center"
        figure.legend(*lines_and_names, loc=place, ncols=len(arms), frameon=False, fontsize=9, labelcolor=INK)
    plot_finals(finals, runs, arms)
    return figure


def signals_figure(signals: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws how many steps before a fall each signal changes, with its misses and false alarms."""
    figure = Figure(figsize=(9, 0.9 + 0.5 * len(signals)), layout="constrained")
    axis = figure.subplots()
    longest = max((lead for row in signals.values() for lead in row["leads"]), default=1)
    style_axis(axis, 0, longest)
    axis.set_xlabel("steps before the fall", fontsize=8.5, color=QUIET)
    axis.set_title("Signals that change before a fall", loc="left", fontsize=12, fontweight="bold", color=INK)
    labels = []
    for place, (color, (name, row)) in enumerate(zip(itertools.cycle(COLORS), signals.items(), strict=False)):
        axis.plot(row["leads"], [place] * len(row["leads"]), "o", color=color, alpha=0.6)
        labels.append(f"{name}\nmissed {row['missed']}, false alarms {row['false_alarms']} of {row['healthy']}")
    axis.set_yticks(range(len(signals)), labels, fontsize=8)
    axis.set_ylim(len(signals) - 0.5, -0.5)
    return figure


def write_figures(study: Study, arguments: Arguments) -> list[Path]:
    """Writes the figures and returns their paths.

    Raises:
      ConfigError, ValueError: The files do not fit one another, or the study names no claims.
    """
    if not study.claims:
        raise ConfigError(f"{arguments.study} names no claims")
    runs, name = read_table(arguments.rows), arguments.study.stem
    paths = []
    for claim, what in study.claims.items():
        figure = claim_figure(what["title"], runs, what["arms"], what["metrics"])
        paths.append(save_figure(figure, arguments.out / f"study_{name}_{claim}.png"))
    if arguments.signals:
        figure = signals_figure(signal_rows(runs, arguments.signals))
        paths.append(save_figure(figure, arguments.out / f"study_{name}_signals.png"))
    return paths


def main(argv: Sequence[str]) -> int:
    """Prints the paths and returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/study_figures.py", description=__doc__ or "")
    with caller_errors():
        for path in write_figures(read_study(arguments.study), arguments):
            print(path)
    return 0


def _curve(rows: Sequence[Row], metric: str) -> np.ndarray:
    return trailing_mean(filled([row.get(metric) for row in rows]))


if __name__ == "__main__":
    sys.exit(run_cli(main))
