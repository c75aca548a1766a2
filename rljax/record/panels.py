"""The panels of a run's report, plotted with matplotlib; each shows the curve of one run, or of several runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from rljax.record.rows import Row, is_accuracy, last_value

INK, QUIET, GRID = "#22262b", "#6b7280", "#e6e8eb"
_MARKERS = "osD^v"
_MAX_PERIOD_LINES = 30  # more lines per run would hide the curve


@dataclass(frozen=True)
class Run:
    """The record of a run, with the color and line style of its curves.

    Attributes:
      label: The run's name in the legend.
      rows: The rows of its metrics.jsonl, at least one.
      color, line: The color and the line style, in matplotlib's names.
      directory: The run directory, which holds the token dumps.
    """

    label: str
    rows: list[Row]
    color: str
    line: str
    directory: Path = Path()

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of the rows that have the key, float64 [n] each; NaN means not finite."""
        points = [(row["step"], math.nan if row[key] is None else row[key]) for row in self.rows if key in row]
        if text := next((repr(value) for _, value in points if isinstance(value, str)), None):
            raise ValueError(f"{self.directory}: {key} must be a number, got {text:.60}")
        array = np.asarray(points, np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def last(self, key: str) -> int | None:
        """Returns the last step, or number of steps, recorded under the key; None without one."""
        value = last_value(self.rows, key)
        if value is not None and (type(value) is not int or not 0 < value < 2**31):
            raise ValueError(f"{self.directory}: {key} must be a step, got {value!r:.60}")
        return value


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
      plot: A function that draws runs into an axis. Its number is the decay per step of the smoothed curves; 0 draws
        none.
      needs: The metric key that the panel shows, a pattern of keys, or a pattern of token dumps (``*.parquet``).
    """

    plot: Callable[[Axes, Sequence[Run], float], None]
    needs: str


def head(axis: Axes, title: str, unit: str) -> None:
    """Sets a panel's title and the unit of its y axis."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_ylabel(unit, fontsize=8.5, color=QUIET)


def note(axis: Axes, text: str) -> None:
    """Writes a text in place of curves."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=QUIET)
    axis.set_yticks([])
    axis.grid(visible=False)


def curve_panel(key: str, title: str, unit: str, *, log: bool = False) -> Panel:
    """Returns a panel with the raw and the smoothed curve of one metric; a log axis leaves values of 0 out."""

    def plot(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
        values = np.concatenate([run.series(key)[1] for run in runs])
        head(axis, title, unit)
        if log and np.isfinite(values).any() and not (values > 0).any():
            note(axis, f"{key} is 0 at every step")
        elif plot_curves(axis, runs, key, smooth, lambda raw: raw > 0 if log else np.isfinite(raw)) and log:
            log_axis(axis, values)

    return Panel(plot, key)


def plot_curves(
    axis: Axes,
    runs: Sequence[Run],
    key: str,
    smooth: float,
    shown: Callable[[np.ndarray], np.ndarray] = np.isfinite,
    drawstyle: str = "default",
) -> bool:
    """Draws raw and smoothed curves of the values that ``shown`` selects; without any, a note, and returns False."""
    any_shown = False
    for run in runs:
        steps, values = run.series(key)
        values = np.where(shown(values), values, np.nan)
        if np.isnan(values).all():
            continue
        any_shown = True
        if smooth:
            axis.plot(steps, values, color=run.color, linewidth=0.9, alpha=0.35)
            values = exponential_mean(values, smooth**2)  # the mean has two sides, each half as wide
        marker = "o" if np.isfinite(values).sum() == 1 else ""  # a line through a single point would be invisible
        axis.plot(steps, values, color=run.color, linestyle=run.line, linewidth=1.9, marker=marker, drawstyle=drawstyle)
    if not any_shown:
        note(axis, f"no {key} in the record")
    return any_shown


def exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Computes the mean around each value with weights decay ** distance; NaN stays NaN and has no weight."""
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    decays = decay ** np.abs(np.arange(1 - len(values), len(values)), dtype=np.float64)
    weights, totals = (np.convolve(item, decays, "valid") for item in (finite.astype(np.float64), known))
    return np.where(finite, totals / np.maximum(weights, 1.0), np.nan)


def plot_length(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the response length and each run's surge, not smoothed, because the surge is called on raw values."""
    head(axis, "Response length", "mean, tokens")
    if plot_curves(axis, runs, "response_length/mean", 0.0):
        called = sum(run.last("schedule/surge_step") is not None for run in runs)
        axis.set_ylim(0, axis.get_ylim()[1] * (1 + 0.1 * min(called, 5)))  # room for the labels of the surges
    _surges(axis, runs, labels=True)


def plot_accuracy(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the accuracy on each evaluation dataset, not smoothed."""
    head(axis, "Evaluation accuracy", "share right")
    keys = sorted({key for run in runs for row in run.rows for key in row if is_accuracy(key)})
    for index, key in enumerate(keys):
        marker = _MARKERS[index % len(_MARKERS)]
        for run in runs:
            steps, values = run.series(key)
            axis.plot(steps, values, color=run.color, linestyle=run.line, linewidth=1.6, marker=marker, markersize=4.5)
        axis.plot([], [], color=QUIET, marker=marker, markersize=4.5, label=key.split("/")[1])
    if not keys:
        note(axis, "no eval/*/accuracy in the record")
        return
    axis.set_ylim(bottom=0)
    if len(keys) == 1:
        axis.set_ylabel(f"share right, {keys[0].split('/')[1]}")
    else:
        axis.legend(frameon=False, fontsize=8.5, labelcolor=QUIET, loc="best")


def plot_learning_rate(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Draws the rate of each update as a step function, with each run's surge and decay periods, not smoothed."""
    head(axis, "Learning rate", "per update")
    if plot_curves(axis, runs, "schedule/learning_rate", 0.0, drawstyle="steps-mid"):
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
            is_late = surge > 0.6 * last_step
            axis.annotate(
                f"surge at {surge}" + (f", period {period}" if period else ""),
                xy=(surge, 0.98 - 0.08 * (index % 8)),
                xycoords=("data", "axes fraction"),
                xytext=(-5 if is_late else 5, 0),
                textcoords="offset points",
                ha="right" if is_late else "left",
                va="top",
                fontsize=8.5,
                color=run.color,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
            )


def log_axis(axis: Axes, values: np.ndarray) -> None:
    """Sets a log scale around the positive values, with limits, because autoscaling fails on equal values."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = positive.min(), positive.max()
    margin = max((high / low) ** 0.05, 1.1)
    axis.set_ylim(low / margin, high * margin)
    axis.set_yscale("log")
    axis.grid(which="minor", color=GRID, linewidth=0.4)
    axis.tick_params(which="minor", labelsize=7.5, colors=QUIET)


PANELS: dict[str, Panel] = {
    "reward": curve_panel("reward/mean", "Reward", "mean per response"),
    "accuracy": Panel(plot_accuracy, "eval/*/accuracy"),
    "length": Panel(plot_length, "response_length/mean"),
    "learning_rate": Panel(plot_learning_rate, "schedule/learning_rate"),
    "grad_norm": curve_panel("optimizer/grad_norm", "Gradient norm", "before clipping"),
    "entropy": curve_panel("policy/entropy", "Policy entropy", "nats per token"),
    "mismatch": curve_panel(
        "mismatch/log_ppl_abs_diff", "Training-inference mismatch", "log_ppl_abs_diff, nats per token", log=True
    ),
}
"""The panels of a report by name."""
