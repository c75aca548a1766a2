"""Panels of a run's record, drawn with matplotlib: one run's curve in each, or several overlaid."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rljax.report.rows import Row, is_accuracy, last_value, read_rows

# Told apart by readers with any colour vision, and in this order also when printed grey.
_COLORS = ("#1f5fa8", "#d55e00", "#00916e", "#a8428c", "#b8860b", "#555555")
_LINES = ("-", "--", ":")
_MARKERS = "osD^v"
_INK, _QUIET, _GRID = "#22262b", "#6b7280", "#e6e8eb"
_MAX_PERIOD_LINES = 30  # more of them per run would hide the curve
_DPI = 150


@dataclass(frozen=True)
class Run:
    """A run's record and how it is drawn.

    Attributes:
      label: its name in the legend.
      rows: of its metrics.jsonl, at least one.
      color, line: as matplotlib knows them.
      directory: where it lies, for its token dumps.
    """

    label: str
    rows: list[Row]
    color: str
    line: str
    directory: Path = Path()

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the rows that have the key; NaN where it was not finite."""
        points = [(row["step"], math.nan if row[key] is None else row[key]) for row in self.rows if key in row]
        array = np.asarray(points, np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def last(self, key: str) -> int | None:
        """The last value recorded under the key."""
        return last_value(self.rows, key)


def read_runs(run_dirs: Sequence[str | os.PathLike[str]], labels: Sequence[str] | None = None) -> list[Run]:
    """The records of run directories, each in a color or line of its own.

    Raises:
      ValueError: no runs, a run without rows, or as many labels as runs are not given.
      FileNotFoundError: a run without metrics.jsonl.
      RuntimeError: a damaged metrics.jsonl.
    """
    directories = [Path(run_dir) for run_dir in run_dirs]
    if not directories:
        raise ValueError("expected at least one run directory, got none")
    names = short_names(directories) if labels is None else list(labels)
    if len(names) != len(directories):
        raise ValueError(f"expected {len(directories)} labels, one per run, got {len(names)}")
    return [_read_run(*item) for item in zip(range(len(names)), directories, names, strict=True)]


def _read_run(index: int, directory: Path, label: str) -> Run:
    rows = read_rows(directory / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{directory / 'metrics.jsonl'}: no rows to draw")
    line = _LINES[index // len(_COLORS) % len(_LINES)]
    return Run(label, rows, _COLORS[index % len(_COLORS)], line, directory)


Panel = Callable[[Axes, Sequence[Run], float], None]
"""Draws runs into an axis; the number is ``smooth`` of ``check_smooth``."""


def check_smooth(smooth: float) -> None:
    """The decay per step of the mean drawn over the raw curves; 0: none. Raises ValueError unless it is in [0, 1)."""
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth must be in the range [0, 1), got {smooth}")


def draw_grid(panels: Sequence[Sequence[Panel]], runs: Sequence[Run], smooth: float, *, title: str = "") -> Figure:
    """A figure of rows of panels, overlaying the runs; a row of one panel spans the width."""
    figure = Figure(figsize=(11, 0.7 + 2.7 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.12, hspace=0.03, wspace=0.03)  # type: ignore[union-attr, call-arg]
    width = math.lcm(*map(len, panels))
    cells = [[f"{r} {c * len(row) // width}" for c in range(width)] for r, row in enumerate(panels)]
    axes = figure.subplot_mosaic(cells)  # type: ignore[arg-type]
    first_step, last_step = min(run.rows[0]["step"] for run in runs), max(run.rows[-1]["step"] for run in runs)
    for axis in axes.values():
        _style(axis, first_step, last_step)
    name = title or (runs[0].label if len(runs) == 1 else f"{len(runs)} runs")
    parts = [f"steps {first_step} to {last_step}"] + [f"thin as recorded, thick smoothed ({smooth:g})"] * bool(smooth)
    is_marked = any(panel in (length, learning_rate) for row in panels for panel in row)
    if is_marked and any(run.last("schedule/surge_step") or run.last("schedule/decay_period") for run in runs):
        parts.append("vertical lines: surge call dashed, multiples of the decay period light")
    _title_figure(figure, runs, name, "; ".join(parts))
    for r, row in enumerate(panels):
        for c, panel in enumerate(row):
            panel(axes[f"{r} {c}"], runs, smooth)
    return figure


def save_figure(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Writes a PNG, whose directory is made, and returns its path."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, facecolor="white", format="png")
    return path


def short_names(directories: Sequence[Path]) -> list[str]:
    """Each directory's last parts, as many as make the names differ."""
    parts = [directory.resolve().parts for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names


def _title_figure(figure: Figure, runs: Sequence[Run], name: str, below: str) -> None:
    figure.suptitle(f"{name}\n", fontsize=15, fontweight="bold", color=_INK, x=0.02, ha="left")
    subtitle = 1 - 0.38 / figure.get_figheight()
    figure.text(0.02, subtitle, below, fontsize=9, color=_QUIET, ha="left", va="top")
    if len(runs) > 1:
        axis = figure.axes[0]
        handles = [axis.plot([], [], color=run.color, linestyle=run.line, linewidth=2.2)[0] for run in runs]
        columns = min(len(runs), 4)
        figure.legend(
            handles,
            [run.label for run in runs],
            loc="outside upper right",
            ncols=columns,
            frameon=False,
            fontsize=9.5,
            labelcolor=_INK,
        )


def _style(axis: Axes, first_step: int, last_step: int) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b6bac0")
    axis.tick_params(labelsize=8.5, colors=_QUIET, length=3)
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    margin = max(1.0, 0.015 * (last_step - first_step))
    axis.set_xlim(first_step - margin, last_step + margin)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set_xlabel("step", fontsize=8.5, color=_QUIET)


def head(axis: Axes, title: str, unit: str) -> None:
    """A panel's title, and what its y axis counts."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=8)
    axis.set_ylabel(unit, fontsize=8.5, color=_QUIET)


def note(axis: Axes, text: str) -> None:
    """Words in the place of curves."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=_QUIET)
    axis.set_yticks([])
    axis.grid(visible=False)


def curves(
    axis: Axes,
    runs: Sequence[Run],
    key: str,
    title: str,
    unit: str,
    smooth: float,
    shown: Callable[[np.ndarray], np.ndarray] = np.isfinite,
) -> bool:
    """Raw and smoothed curves of the values that are ``shown``; a note and False when there are none."""
    head(axis, title, unit)
    is_drawn = False
    for run in runs:
        steps, values = run.series(key)
        values = np.where(shown(values), values, np.nan)
        if np.isnan(values).all():
            continue
        is_drawn = True
        if smooth:
            axis.plot(steps, values, color=run.color, linewidth=0.9, alpha=0.35)
            values = exponential_mean(values, smooth**2)  # two sides: half the width each
        axis.plot(steps, values, color=run.color, linestyle=run.line, linewidth=1.9, marker=_dot(values))
    if not is_drawn:
        note(axis, f"no {key} in the record")
    return is_drawn


def _dot(values: np.ndarray) -> str:
    """A line through one point is invisible."""
    return "o" if np.isfinite(values).sum() == 1 else ""


def exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Mean with weights decay ** distance; NaN stays NaN and has no weight."""
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    weights, totals = (_decayed_sum(item, decay) for item in (finite.astype(np.float64), known))
    return np.where(finite, totals / np.maximum(weights, 1.0), np.nan)


def _decayed_sum(items: np.ndarray, decay: float) -> np.ndarray:
    """Sum over all items with weights decay ** distance."""
    forward, backward = np.array(items), np.array(items)
    for index in range(1, len(items)):
        forward[index] += decay * forward[index - 1]
        backward[-1 - index] += decay * backward[-index]
    return forward + backward - items


def reward(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The training reward."""
    curves(axis, runs, "reward/mean", "Reward", "mean per response", smooth)


def grad_norm(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The gradient's norm."""
    curves(axis, runs, "optimizer/grad_norm", "Gradient norm", "before clipping", smooth)


def grad_noise(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The gradient's variance, on a log axis."""
    _log_curves(axis, runs, "optimizer/grad_noise", "Gradient noise", "trace of the covariance", smooth)


def entropy(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The policy's entropy."""
    curves(axis, runs, "policy/entropy", "Policy entropy", "nats per token", smooth)


def length(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The response length with each run's surge; drawn raw, because the surge is called on it."""
    if curves(axis, runs, "response_length/mean", "Response length", "mean, tokens", 0.0):
        called = sum(run.last("schedule/surge_step") is not None for run in runs)
        axis.set_ylim(0, axis.get_ylim()[1] * (1 + 0.1 * min(called, 5)))  # room for their names
    _surges(axis, runs, named=True)


def accuracy(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The accuracy on each evaluation set; as recorded, not smoothed."""
    del smooth
    head(axis, "Evaluation accuracy", "share right")
    keys = sorted({key for run in runs for row in run.rows for key in row if is_accuracy(key)})
    for index, key in enumerate(keys):
        marker = _MARKERS[index % len(_MARKERS)]
        for run in runs:
            steps, values = run.series(key)
            axis.plot(steps, values, color=run.color, linestyle=run.line, linewidth=1.6, marker=marker, markersize=4.5)
        axis.plot([], [], color=_QUIET, marker=marker, markersize=4.5, label=key.split("/")[1])
    if not keys:
        note(axis, "no eval/*/accuracy in the record")
        return
    axis.set_ylim(bottom=0)
    if len(keys) == 1:
        axis.set_ylabel(f"share right, {keys[0].split('/')[1]}")
    else:
        axis.legend(frameon=False, fontsize=8.5, labelcolor=_QUIET, loc="best")


def learning_rate(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The rate of each update, in steps, with each run's surge and decay periods; not smoothed."""
    del smooth
    key = "schedule/learning_rate"
    head(axis, "Learning rate", "per update")
    series = [(run, *run.series(key)) for run in runs]
    for run, steps, values in series:
        axis.step(steps, values, where="mid", color=run.color, linestyle=run.line, linewidth=1.9, marker=_dot(values))
    if any(np.isfinite(values).any() for _, _, values in series):
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(_scientific))
    else:
        note(axis, f"no {key} in the record")
    _surges(axis, runs, named=False)


def _scientific(value: float, _: object) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _surges(axis: Axes, runs: Sequence[Run], *, named: bool) -> None:
    """A dashed line at each run's surge call and light ones at the multiples of its decay period from then on."""
    for index, run in enumerate(runs):
        surge, period = run.last("schedule/surge_step"), run.last("schedule/decay_period")
        last_step = run.rows[-1]["step"]
        multiples = [step for step in range(period, last_step + 1, period) if step >= (surge or 1)] if period else []
        for step in multiples[:_MAX_PERIOD_LINES]:
            axis.axvline(step, color=run.color, linewidth=1.0, alpha=0.4, zorder=1)
        if surge is None:
            continue
        axis.axvline(surge, color=run.color, linewidth=1.3, linestyle=(0, (4, 2)), zorder=1.5)
        if named:
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


def mismatch(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The per-token mismatch that the paper plots, on a log axis."""
    unit = "log_ppl_abs_diff, nats per token"
    _log_curves(axis, runs, "mismatch/log_ppl_abs_diff", "Training-inference mismatch", unit, smooth)


def k3_kl(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The mismatch as a KL divergence, on a log axis."""
    _log_curves(axis, runs, "mismatch/k3_kl", "KL(rollout || trainer)", "k3 estimate, nats per token", smooth)


def _log_curves(axis: Axes, runs: Sequence[Run], key: str, title: str, unit: str, smooth: float) -> None:
    values = np.concatenate([run.series(key)[1] for run in runs])
    if np.isfinite(values).any() and not (values > 0).any():
        head(axis, title, unit)
        note(axis, f"{key} is 0 at every step")
        return
    if curves(axis, runs, key, title, unit, smooth, lambda values: values > 0):
        log_axis(axis, values)


def log_axis(axis: Axes, values: np.ndarray) -> None:
    """A log scale about the positive values: limits set by hand, because equal values give autoscaling none."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = positive.min(), positive.max()
    margin = max((high / low) ** 0.05, 1.1)
    axis.set_ylim(low / margin, high * margin)
    axis.set_yscale("log")
    axis.grid(which="minor", color=_GRID, linewidth=0.4)
    axis.tick_params(which="minor", labelsize=7.5, colors=_QUIET)
