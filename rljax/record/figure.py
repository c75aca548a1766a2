"""Figures of one run, or of several runs in the same panels: the report of a run, and any other grid of panels."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from rljax.record.panels import GRID, INK, PANELS, QUIET, Panel, Run
from rljax.record.rows import read_rows

# Readers with any colour vision can tell these apart. In this order a grey print shows them, too.
COLORS = ("#1f5fa8", "#d55e00", "#00916e", "#a8428c", "#b8860b", "#555555")
_LINES = ("-", "--", ":")
_DPI = 150

PanelGrid = Sequence[Sequence[str]]
"""Rows of panel names."""

REPORT: PanelGrid = (("reward", "accuracy"), ("length", "learning_rate"), ("grad_norm", "entropy"), ("mismatch",))
"""The panels of ``report.png``."""


def plot_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    smooth: float = 0.9,
    labels: Sequence[str] | None = None,
) -> Path:
    """Plots ``metrics.jsonl`` of each run directory into one PNG and returns its path.

    Args:
      run_dirs: The run directories, at least one.
      out: The file to write; its directory is made.
      smooth: The decay per step of the smoothed curves, in [0, 1). A smoothed curve is an exponential mean over the
        steps before and after, so it does not lag. It is about as wide as a running mean with this decay. 0 plots the
        raw curves only. The response length is never smoothed: the surge is called on the raw values.
      labels: The names of the runs in the legend. By default they are the last parts of the directories' paths, as many
        as make the names differ.

    Raises:
      ValueError: There are no runs, a run has no rows, or an argument is out of range.
      FileNotFoundError: A run has no metrics.jsonl.
      RuntimeError: A metrics.jsonl is damaged.
    """
    return save_figure(plot_grid(REPORT, read_runs(run_dirs, labels), smooth), out)


def read_runs(run_dirs: Sequence[str | os.PathLike[str]], labels: Sequence[str] | None = None) -> list[Run]:
    """Reads the records of run directories and gives each a color and line style. Raises what ``plot_report`` does."""
    directories = [Path(run_dir) for run_dir in run_dirs]
    if not directories:
        raise ValueError("expected at least one run directory, got none")
    names = short_names(directories) if labels is None else list(labels)
    if len(names) != len(directories):
        raise ValueError(f"expected {len(directories)} labels, one per run, got {len(names)}")
    runs = []
    for index, (directory, label) in enumerate(zip(directories, names, strict=True)):
        rows = read_rows(directory / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{directory / 'metrics.jsonl'}: no rows to plot")
        line = _LINES[index // len(COLORS) % len(_LINES)]
        runs.append(Run(label, rows, COLORS[index % len(COLORS)], line, directory))
    return runs


def short_names(directories: Sequence[Path]) -> list[str]:
    """Returns the last parts of each directory's path, as many as make the names differ."""
    parts = [directory.resolve().parts for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def plot_grid(
    grid: PanelGrid, runs: Sequence[Run], smooth: float, *, title: str = "", panels: Mapping[str, Panel] = PANELS
) -> Figure:
    """Draws a figure of rows of panels with all runs in each; a row of one panel takes the whole width.

    Args:
      grid: The rows of panel names; each is a key of ``panels``.
      runs: The runs to draw, at least one.
      smooth: The decay per step of the smoothed curves, in [0, 1); 0 draws the raw curves only.
      title: The title of the figure; by default the run's label, or the number of runs.
      panels: The panels by name.

    Raises:
      ValueError: ``smooth`` is not in [0, 1).
    """
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth must be in the range [0, 1), got {smooth}")
    figure = Figure(figsize=(11, 0.7 + 2.7 * len(grid)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.12, hspace=0.03, wspace=0.03)  # type: ignore[union-attr, call-arg]
    width = math.lcm(*map(len, grid))
    axes = figure.subplot_mosaic([[name for name in row for _ in range(width // len(row))] for row in grid])
    first_step, last_step = min(run.rows[0]["step"] for run in runs), max(run.rows[-1]["step"] for run in runs)
    parts = [f"steps {first_step} to {last_step}"] + [f"thin as recorded, thick smoothed ({smooth:g})"] * bool(smooth)
    is_marked = "length" in axes or "learning_rate" in axes
    if is_marked and any(run.last("schedule/surge_step") or run.last("schedule/decay_period") for run in runs):
        parts.append("vertical lines: surge call dashed, multiples of the decay period light")
    name = title or (runs[0].label if len(runs) == 1 else f"{len(runs)} runs")
    _title_figure(figure, runs, name, "; ".join(parts))
    for panel, axis in axes.items():
        style_axis(axis, first_step, last_step)
        panels[panel].plot(axis, runs, smooth)
    return figure


def save_figure(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Writes a figure as a PNG and returns its path; the directory is made."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white", format="png")
    return path


def _title_figure(figure: Figure, runs: Sequence[Run], name: str, below: str) -> None:
    figure.suptitle(f"{name}\n", fontsize=15, fontweight="bold", color=INK, x=0.02, ha="left")
    subtitle = 1 - 0.38 / figure.get_figheight()
    figure.text(0.02, subtitle, below, fontsize=9, color=QUIET, ha="left", va="top")
    if len(runs) > 1:
        figure.legend(
            handles=[Line2D([], [], color=run.color, ls=run.line, linewidth=2.2, label=run.label) for run in runs],
            loc="outside upper right",
            ncols=min(len(runs), 4),
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
        )


def style_axis(axis: Axes, first_step: int, last_step: int) -> None:
    """Sets the look of a panel over steps."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b6bac0")
    axis.tick_params(labelsize=8.5, colors=QUIET, length=3)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    margin = max(1.0, 0.015 * (last_step - first_step))
    axis.set_xlim(first_step - margin, last_step + margin)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set_xlabel("step", fontsize=8.5, color=QUIET)
