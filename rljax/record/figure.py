"""Figures of one run, or of several runs in the same panels: the report of a run, and any other grid of panels.

All figures share their colors, the style of their axes and the way to write files. They need matplotlib and numpy.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from rljax.record.rows import Row, is_accuracy, last_value, read_rows

SMOOTH = 0.9
"""The decay per step of the smoothed curves of a report."""

_MAX_PERIOD_LINES = 30  # more lines per run would hide the curve

# Readers with any colour vision can tell these apart. In this order a grey print shows them, too.
COLORS = ("#1f5fa8", "#d55e00", "#00916e", "#a8428c", "#b8860b", "#555555")
LINES = tuple(itertools.product(("-", "--", ":"), COLORS))
"""The line style and the color of each curve, in the order in which curves take them."""

INK, QUIET, GRID = "#22262b", "#6b7280", "#e6e8eb"
_EDGE = "#b6bac0"
# The colors of a figure that become CSS variables in an SVG, so that a page can show it dark and light.
_VARIABLES = {INK: "ink", QUIET: "quiet", GRID: "grid", _EDGE: "line", "#ffffff": "paper", COLORS[0]: "run"}


@dataclass(frozen=True)
class Run:
    """The record of a run, with the color and line style of its curves."""

    label: str  # the name in the legend
    rows: list[Row]  # the rows of its metrics.jsonl, at least one
    color: str
    line: str
    directory: Path = Path()

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of the rows that have the key, float64 [n] each; NaN means not finite."""
        points = [(row["step"], math.nan if row[key] is None else row[key]) for row in self.rows if key in row]
        if text := next((repr(value) for _, value in points if isinstance(value, str)), None):
            raise ValueError(f"{self.directory}: {key} must be a number, got {text:.60}")
        steps, values = np.asarray(points, np.float64).reshape(-1, 2).T
        return steps, values

    def last(self, key: str) -> int | None:
        """Returns the last value under a key that has a step or a number of steps; None if no row has one."""
        value = last_value(self.rows, key)
        if value is not None and (type(value) is not int or not 0 < value < 2**31):
            raise ValueError(f"{self.directory}: {key} must be a step, got {value!r:.60}")
        return value


@dataclass(frozen=True)
class Panel:
    """One plot of a figure."""

    plot: Callable[[Axes, Sequence[Run], float], None]  # draws runs; the number is the decay of smoothed curves, or 0
    needs: str  # the metric key that it shows, a pattern of keys, or a pattern of token dumps (*.parquet)


def curve_panel(key: str, title: str, unit: str, *, log: bool = False) -> Panel:
    """Returns a panel with the raw and the smoothed curve of one metric; a log axis leaves values of 0 out."""

    def plot(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
        head(axis, title, unit)
        values = draw(axis, runs, key, smooth, positive=log)
        is_zero = np.isfinite(np.concatenate([run.series(key)[1] for run in runs])).any()
        if has_values(axis, values, f"{key} is 0 at every step" if is_zero else f"no {key} in the record") and log:
            log_axis(axis, values)

    return Panel(plot, key)


def draw(
    axis: Axes, runs: Sequence[Run], key: str, smooth: float = 0.0, *, positive: bool = False, **style: Any
) -> np.ndarray:
    """Draws a metric; with ``smooth`` the smoothed curve, over the raw one. Returns the values, NaN if not drawn.

    ``positive`` leaves out values of 0 and below. A single value has a marker, because its line would be invisible.
    """
    found = []
    for run in runs:
        steps, values = run.series(key)
        values = np.where(values > 0 if positive else np.isfinite(values), values, np.nan)
        found.append(values)
        if smooth and not style and len(values):
            axis.plot(steps, values, color=run.color, linewidth=0.9, alpha=0.35)
        if smooth and len(values):
            values = exponential_mean(values, smooth**2)  # the mean has two sides, each half as wide
        marker = "o" if np.isfinite(values).sum() == 1 else ""
        form: dict[str, Any] = {"linestyle": run.line, "linewidth": 1.9, "marker": marker} | style
        axis.plot(steps, values, color=run.color, **form)
    return np.concatenate(found)


def has_values(axis: Axes, values: np.ndarray, otherwise: str) -> bool:
    """Returns whether a value is finite. If none is, the text ``otherwise`` takes the place of the curves."""
    is_drawn = bool(np.isfinite(values).any())
    if not is_drawn:
        note(axis, otherwise)
    return is_drawn


def exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Computes the mean around each value with weights decay ** distance; NaN stays NaN and has no weight."""
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    decays = decay ** np.abs(np.arange(1 - len(values), len(values)), dtype=np.float64)
    weights, totals = (np.convolve(item, decays, "valid") for item in (finite.astype(np.float64), known))
    return np.where(finite, totals / np.maximum(weights, 1.0), np.nan)


def plot_length(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the response length, not smoothed, and each run's surge. The surge is found from raw values."""
    head(axis, "Response length", "mean, tokens")
    key = "response_length/mean"
    if has_values(axis, draw(axis, runs, key), f"no {key} in the record"):
        called = sum(run.last("schedule/surge_step") is not None for run in runs)
        axis.set_ylim(0, axis.get_ylim()[1] * (1 + 0.1 * min(called, 5)))  # room for the labels of the surges
    _surges(axis, runs, labels=True)


def plot_accuracy(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the accuracy on each evaluation dataset, not smoothed."""
    head(axis, "Evaluation accuracy", "accuracy")
    keys = sorted({key for run in runs for row in run.rows for key in row if is_accuracy(key)})
    names = [key[len("eval/") : -len("/accuracy")] for key in keys]
    for key, name, marker in zip(keys, names, itertools.cycle("osD^v"), strict=False):
        draw(axis, runs, key, linewidth=1.6, marker=marker, markersize=4.5)
        axis.plot([], [], color=QUIET, marker=marker, markersize=4.5, label=name)
    if not keys:
        note(axis, "no eval/*/accuracy in the record")
        return
    axis.set_ylim(bottom=0)
    if len(keys) == 1:
        axis.set_ylabel(f"accuracy, {names[0]}")
    else:
        axis.legend(frameon=False, fontsize=8.5, labelcolor=QUIET, loc="best")


def plot_learning_rate(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the rate of each update as a step function, with each run's surge and decay periods, not smoothed."""
    head(axis, "Learning rate", "per update")
    key = "schedule/learning_rate"
    if has_values(axis, draw(axis, runs, key, drawstyle="steps-mid"), f"no {key} in the record"):
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:g}")
    _surges(axis, runs, labels=False)


def _surges(axis: Axes, runs: Sequence[Run], *, labels: bool) -> None:
    """Draws a dashed line at each run's surge, and light lines at the multiples of its decay period after the surge."""
    for index, run in enumerate(runs):
        surge, period = run.last("schedule/surge_step"), run.last("schedule/decay_period")
        last_step = run.rows[-1]["step"]
        first = -(-(surge or 1) // period) * period if period else 0
        multiples = range(first, last_step + 1, period) if period else range(0)
        for step in multiples[:_MAX_PERIOD_LINES]:
            axis.axvline(step, color=run.color, linewidth=1.0, alpha=0.4, zorder=1)
        if surge is None:
            continue
        axis.axvline(surge, color=run.color, linewidth=1.3, linestyle=(0, (4, 2)), zorder=1.5)
        if labels:
            text = f"surge at {surge}" + (f", period {period}" if period else "")
            offset, side = (-5, "right") if surge > 0.6 * last_step else (5, "left")
            look: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
            look["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
            place = (surge, 0.98 - 0.08 * (index % 8))
            axis.annotate(text, place, (offset, 0), ha=side, fontsize=8.5, color=run.color, **look)


FLOORS = {
    "shape": ("mismatch_self/log_ppl_abs_diff", "o"),
    "mesh": ("mismatch_self/mesh/log_ppl_abs_diff", "s"),
    "remat": ("mismatch_self/remat/log_ppl_abs_diff", "^"),
}
"""The metric key and the marker of the trainer's difference from itself, by the cause of the difference."""


def plot_mismatch(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """Draws the mismatch, and the trainer's difference from itself in the steps that measured it.

    No remedy brings the mismatch below this difference.
    """
    _MISMATCH.plot(axis, runs, smooth)
    drawn = [run.series(_MISMATCH.needs)[1] for run in runs]
    for cause, (key, marker) in FLOORS.items():
        values = np.concatenate([run.series(key)[1] for run in runs])
        if np.isfinite(values).any():
            style: dict[str, Any] = {"linestyle": "", "marker": marker, "markersize": 4.5}
            draw(axis, runs, key, positive=True, alpha=0.7, **style)
            label = f"itself: {cause}" if (values > 0).any() else f"itself: {cause} (0)"
            axis.plot([], [], color=QUIET, label=label, **style)
            drawn.append(values)
    if len(drawn) > len(runs):
        values = np.concatenate(drawn)
        if (values > 0).any():
            log_axis(axis, values)
        axis.legend(frameon=False, fontsize=8.5, labelcolor=QUIET, loc="best")


_MISMATCH = curve_panel(
    "mismatch/log_ppl_abs_diff", "Training-inference mismatch", "log_ppl_abs_diff, nats per token", log=True
)

PANELS: dict[str, Panel] = {
    "reward": curve_panel("reward/mean", "Reward", "mean per response"),
    "accuracy": Panel(plot_accuracy, "eval/*/accuracy"),
    "length": Panel(plot_length, "response_length/mean"),
    "learning_rate": Panel(plot_learning_rate, "schedule/learning_rate"),
    "grad_norm": curve_panel("optimizer/grad_norm", "Gradient norm", "before clipping"),
    "entropy": curve_panel("policy/entropy", "Policy entropy", "nats per token"),
    "mismatch": Panel(plot_mismatch, _MISMATCH.needs),
}
"""The panels of a report by name."""

PanelGrid = Sequence[Sequence[str]]
"""Rows of panel names."""

REPORT: PanelGrid = (("reward", "accuracy"), ("length", "learning_rate"), ("grad_norm", "entropy"), ("mismatch",))
"""The panels of ``report.png``."""


def plot_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    smooth: float = SMOOTH,
    metrics: Sequence[str] = (),
) -> Path:
    """Plots ``metrics.jsonl`` of each run directory (at least one) into ``out``, SVG or PNG, and returns its path.

    Args:
      smooth: The decay per step of the smoothed curves, in [0, 1). A smoothed curve is an exponential mean over the
        steps before and after, so it does not lag. It is about as wide as a running mean with this decay. 0 plots the
        raw curves only. The response length is never smoothed: the surge is called on the raw values.
      metrics: The keys to plot, a panel each, two in a row. Without any: the panels of a report.

    Raises:
      ValueError: There are no runs, a run has no rows, no run has a metric, or ``smooth`` is out of range.
      RuntimeError: A metrics.jsonl is damaged.
    """
    runs = read_runs(run_dirs)
    if not metrics:
        return save_figure(plot_grid(REPORT, runs, smooth), out)
    for key in metrics:
        if not any(isinstance(row.get(key), int | float) for run in runs for row in run.rows):
            raise ValueError(f"no run has numbers under {key}; the keys are those of metrics.jsonl")
    panels = {key: curve_panel(key, key, "") for key in metrics}
    grid = [metrics[start : start + 2] for start in range(0, len(metrics), 2)]
    return save_figure(plot_grid(grid, runs, smooth, panels=panels), out)


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads the records of run directories, and gives each run a color and a line style.

    Raises ValueError if there are no runs, or a run has no rows. Raises RuntimeError if a metrics.jsonl is damaged, and
    FileNotFoundError if there is none.
    """
    directories = [Path(run_dir) for run_dir in run_dirs]
    if not directories:
        raise ValueError("expected at least one run directory, got none")
    names, runs = short_names(directories), []
    for directory, label, (line, color) in zip(directories, names, itertools.cycle(LINES), strict=False):
        rows = read_rows(directory / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{directory / 'metrics.jsonl'}: no rows to plot")
        runs.append(Run(label, rows, color, line, directory))
    return runs


def short_names(directories: Sequence[Path]) -> list[str]:
    """Returns a name for each directory: the last parts of its path, as few as make the names differ."""
    parts = [directory.resolve().parts for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def plot_grid(
    grid: PanelGrid, runs: Sequence[Run], smooth: float, *, title: str = "", panels: Mapping[str, Panel] = PANELS
) -> Figure:
    """Draws a figure of rows of panels, with all runs in each panel. A row of one panel takes the whole width.

    ``smooth`` is the decay per step of the smoothed curves; 0 draws the raw curves only. The default title is the run's
    label, or the number of runs. Raises ValueError if ``smooth`` is outside [0, 1).
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
    figure.suptitle(f"{name}\n", fontsize=15, fontweight="bold", color=INK, x=0.02, ha="left")
    below = 1 - 0.38 / figure.get_figheight()
    figure.text(0.02, below, "; ".join(parts), fontsize=9, color=QUIET, ha="left", va="top")
    if len(runs) > 1:
        lines = [Line2D([], [], color=run.color, ls=run.line, linewidth=2.2, label=run.label) for run in runs]
        style = {"frameon": False, "fontsize": 9.5, "labelcolor": INK}
        figure.legend(handles=lines, loc="outside upper right", ncols=min(len(runs), 4), **style)
    for panel, axis in axes.items():
        style_axis(axis, first_step, last_step)
        panels[panel].plot(axis, runs, smooth)
    return figure


def head(axis: Axes, title: str, unit: str) -> None:
    """Sets a panel's title and the unit of its y axis."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_ylabel(unit, fontsize=8.5, color=QUIET)


def note(axis: Axes, text: str) -> None:
    """Writes a text into a panel in place of curves."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=QUIET)
    axis.set_yticks([])
    axis.grid(visible=False)


def log_axis(axis: Axes, values: np.ndarray) -> None:
    """Sets a log scale with limits around the positive values. At least one value must be positive.

    The limits are explicit because autoscaling fails on equal values.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = positive.min(), positive.max()
    margin = max((high / low) ** 0.05, 1.1)
    axis.set_ylim(low / margin, high * margin)
    axis.set_yscale("log")
    axis.grid(which="minor", color=GRID, linewidth=0.4)
    axis.tick_params(which="minor", labelsize=7.5, colors=QUIET)


def save_figure(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Writes a figure and returns its path. A name that ends in .svg gets SVG, any other PNG.

    The directory is made if it does not exist.
    """
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    form = "svg" if path.suffix.lower() == ".svg" else "png"
    figure.savefig(path, dpi=150, facecolor="white", format=form)
    return path


def svg_text(figure: Figure) -> str:
    """Returns a figure as an SVG element for an HTML page. Its plain colors are CSS variables, such as ``--ink``."""
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rljax"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", file.getvalue())  # HTML knows both
    for color, name in _VARIABLES.items():
        text = text.replace(color, f"var(--{name})")
    return text[text.index("<svg") :]


def style_axis(axis: Axes, first_step: int, last_step: int) -> None:
    """Sets the style of a panel whose x axis has the steps."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_EDGE)
    axis.tick_params(labelsize=8.5, colors=QUIET, length=3)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    margin = max(1.0, 0.015 * (last_step - first_step))
    axis.set_xlim(first_step - margin, last_step + margin)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set_xlabel("step", fontsize=8.5, color=QUIET)
