"""Panels of a run's record, plotted with matplotlib: the curve of one run in each, or the curves of several."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rljax.compare.dump import TokenDump, read_dump
from rljax.report.rows import Row, is_accuracy, last_value

INK, QUIET, GRID = "#22262b", "#6b7280", "#e6e8eb"
_MARKERS = "osD^v"
_MAX_PERIOD_LINES = 30  # more of them per run would hide the curve
_LEGEND = {"frameon": False, "fontsize": 8.5, "loc": "best"}
_EDGE_SHARE = 10  # one in so many rows is the beginning of a run, and one in so many its end
_BUCKET_KEY = re.compile(r"mismatch_position/((lt_|ge_)?([^/_]+)(?:_to_[^/]+)?)/k3_kl")  # name, kind, first edge


@dataclass(frozen=True)
class Run:
    """A run's record, and the color and line that stand for it.

    Attributes:
      label: its name in the legend.
      rows: of its metrics.jsonl, at least one.
      color, line: as matplotlib knows them.
      directory: the run directory, for its token dumps.
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


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
      plot: plots runs into an axis; the number is the decay per step of the mean over the raw curves, 0: no mean.
      needs: the metric that it shows, or a pattern of several; ``*.parquet``: files of the run directory.
    """

    plot: Callable[[Axes, Sequence[Run], float], None]
    needs: str


def head(axis: Axes, title: str, unit: str) -> None:
    """A panel's title, and what its y axis counts."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_ylabel(unit, fontsize=8.5, color=QUIET)


def note(axis: Axes, text: str) -> None:
    """Text in place of curves."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=QUIET)
    axis.set_yticks([])
    axis.grid(visible=False)


def curve_panel(key: str, title: str, unit: str, *, log: bool = False) -> Panel:
    """The raw and the smoothed curve of one metric; on a log axis a value of 0 cannot be shown."""

    def plot(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
        values = np.concatenate([run.series(key)[1] for run in runs])
        head(axis, title, unit)
        if log and np.isfinite(values).any() and not (values > 0).any():
            note(axis, f"{key} is 0 at every step")
        elif plot_curves(axis, runs, key, smooth, lambda found: found > 0 if log else np.isfinite(found)) and log:
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
    """Raw and smoothed curves of the values that are ``shown``; a note and False when there are none."""
    any_shown = False
    for run in runs:
        steps, values = run.series(key)
        values = np.where(shown(values), values, np.nan)
        if np.isnan(values).all():
            continue
        any_shown = True
        if smooth:
            axis.plot(steps, values, color=run.color, linewidth=0.9, alpha=0.35)
            values = exponential_mean(values, smooth**2)  # two sides: half the width each
        axis.plot(
            steps, values, color=run.color, linestyle=run.line, linewidth=1.9, marker=_dot(values), drawstyle=drawstyle
        )
    if not any_shown:
        note(axis, f"no {key} in the record")
    return any_shown


def _dot(values: np.ndarray) -> str:
    """The marker of a line: a line through a single point would be invisible."""
    return "o" if np.isfinite(values).sum() == 1 else ""


def exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Mean with weights decay ** distance; NaN stays NaN and has no weight."""
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    decays = decay ** np.abs(np.arange(1 - len(values), len(values)), dtype=np.float64)
    weights, totals = (np.convolve(item, decays, "valid") for item in (finite.astype(np.float64), known))
    return np.where(finite, totals / np.maximum(weights, 1.0), np.nan)


def plot_length(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The response length with each run's surge; never smoothed, because the surge is called on the raw values."""
    del smooth
    head(axis, "Response length", "mean, tokens")
    if plot_curves(axis, runs, "response_length/mean", 0.0):
        called = sum(run.last("schedule/surge_step") is not None for run in runs)
        axis.set_ylim(0, axis.get_ylim()[1] * (1 + 0.1 * min(called, 5)))  # room for the labels of the surges
    _surges(axis, runs, labels=True)


def plot_accuracy(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The accuracy on each evaluation dataset; as recorded, not smoothed."""
    del smooth
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


def plot_learning_rate(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """The rate of each update as a step function, with each run's surge and decay periods; not smoothed."""
    del smooth
    head(axis, "Learning rate", "per update")
    if plot_curves(axis, runs, "schedule/learning_rate", 0.0, drawstyle="steps-mid"):
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(_scientific))
    _surges(axis, runs, labels=False)


def _scientific(value: float, _: object) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _surges(axis: Axes, runs: Sequence[Run], *, labels: bool) -> None:
    """A dashed line at the step of each run's surge and light ones at the multiples of its decay period after it."""
    for index, run in enumerate(runs):
        surge, period = run.last("schedule/surge_step"), run.last("schedule/decay_period")
        last_step = run.rows[-1]["step"]
        multiples = [step for step in range(period, last_step + 1, period) if step >= (surge or 1)] if period else []
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
    """A log scale around the positive values; the limits are set here, because autoscaling fails on equal values."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = positive.min(), positive.max()
    margin = max((high / low) ** 0.05, 1.1)
    axis.set_ylim(low / margin, high * margin)
    axis.set_yscale("log")
    axis.grid(which="minor", color=GRID, linewidth=0.4)
    axis.tick_params(which="minor", labelsize=7.5, colors=QUIET)


def slope_of_ratio(lengths: np.ndarray, ratios: np.ndarray) -> float:
    """Least-squares slope through the origin of log-ratios [n] (nats) over lengths [n] (tokens), per 1000 tokens."""
    return float(1000 * (lengths * ratios).sum() / (lengths * lengths).sum())


def plot_kl_by_position(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """k3_kl of each bucket of positions: thick over the last tenth of a run's rows, thin over the first."""
    del smooth
    head(axis, "KL by position in the response", "k3_kl, nats per token")
    axis.set_xlabel("position, tokens from 1; thick: last tenth of the steps, thin: first")
    found = [(run, bucket_means(run.rows, last=False), bucket_means(run.rows, last=True)) for run in runs]
    buckets = sorted({bucket for _, *both in found for means in both for bucket in means})
    values = np.asarray([value for _, *both in found for means in both for value in means.values()], np.float64)
    if not buckets or not (values > 0).any():
        note(axis, "no mismatch_position/*/k3_kl above 0 in the record")
        return
    for run, first, last in found:
        for means, width, alpha in ((first, 0.9, 0.5), (last, 1.9, 1.0)):
            heights = [means.get(bucket, np.nan) or np.nan for bucket in buckets]
            style = {"color": run.color, "linestyle": run.line, "marker": "o", "markersize": 3 * width**0.5}
            axis.plot(range(len(buckets)), heights, linewidth=width, alpha=alpha, **style)
    axis.set_xlim(-0.4, len(buckets) - 0.6)
    axis.set_xticks(range(len(buckets)), [name for _, _, name in buckets], rotation=20 if len(buckets) > 6 else 0)
    log_axis(axis, values)


def bucket_means(rows: Sequence[Row], *, last: bool) -> dict[tuple[float, bool, str], float]:
    """Mean k3_kl of the tokens of each bucket over the first or last tenth of the rows, at least one.

    Returns:
      (edge, whether it is a lower one, name) -> mean; sorted, the keys go up the response.
    """
    count = max(1, len(rows) // _EDGE_SHARE)
    totals: dict[tuple[float, bool, str], list[float]] = {}
    for row in rows[-count:] if last else rows[:count]:
        for key, value in row.items():
            match = _BUCKET_KEY.fullmatch(key)
            if match is None or value is None:
                continue
            name, kind, edge = match.groups()
            shown = name.replace("lt_", "below ").replace("ge_", "from ").replace("_to_", " to ")
            tokens = row[key.removesuffix("k3_kl") + "token_count"]
            total = totals.setdefault((float(edge), kind != "lt_", shown), [0.0, 0.0])
            total[0] += tokens * value
            total[1] += tokens
    return {bucket: total / tokens for bucket, (total, tokens) in totals.items()}


def plot_ratio_by_length(axis: Axes, runs: Sequence[Run], smooth: float) -> None:
    """log of trainer / rollout probability of whole responses against their length, from each run's newest dump."""
    del smooth
    head(axis, "Sequence log-ratio by length", "sum of trainer - rollout, nats")
    axis.set_xlabel("response length, tokens")
    longest = 1.0
    for run in runs:
        paths = sorted(run.directory.glob("rollouts/step_*.parquet"))
        if not paths:
            continue
        lengths, ratios = sequence_ratios(read_dump(paths[-1]))
        slope = slope_of_ratio(lengths, ratios)
        longest = max(longest, lengths.max())
        label = f"{run.label}: {slope:.3g} per 1000 tokens"
        axis.scatter(lengths, ratios, s=9, color=run.color, alpha=0.5, linewidths=0, label=label)
        axis.plot([0, lengths.max()], [0, slope * lengths.max() / 1000], color=run.color, linestyle=run.line)
    if not axis.collections:
        note(axis, "no rollouts/step_*.parquet in the run")
        return
    axis.axhline(0, color="black", linewidth=0.9, linestyle="--")
    axis.set_xlim(0, 1.03 * longest)
    axis.legend(**_LEGEND)


def sequence_ratios(dump: TokenDump) -> tuple[np.ndarray, np.ndarray]:
    """Response tokens, and sum of trainer - rollout over them (nats), of each sequence [n] of a run's dump.

    Tokens that are not finite on either side are left out of both.
    """
    lengths, ratios = [], []
    for mask, trainer, rollout in zip(
        dump.response_mask, dump.logprobs["trainer"], dump.logprobs["rollout"], strict=True
    ):
        ratio = (trainer.astype(np.float64) - rollout)[mask]
        lengths.append(np.isfinite(ratio).sum())
        ratios.append(ratio[np.isfinite(ratio)].sum())
    return np.asarray(lengths, np.float64), np.asarray(ratios)


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
    "kl_by_position": Panel(plot_kl_by_position, "mismatch_position/*/k3_kl"),
    "ratio_by_length": Panel(plot_ratio_by_length, "rollouts/step_*.parquet"),
}
"""Name -> panel."""
