"""Plots runs as the figures of the papers show theirs: ``paper_figures.py FIGURE RUN [RUN...]``.

FIGURE is a name in ``FIGURES``: 1 to 13 are figures of arXiv 2602.01826, and the two by length are figure 2 of arXiv
2510.26788. ``FIGURES`` has the runs that each figure needs.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study_outcome import collapse_step, trailing_mean

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record import figure as style
from rljax.record.figure import PANELS, SMOOTH, Panel, PanelGrid, Run, plot_grid, read_runs
from rljax.record.rows import Row, run_dumps
from rljax.record.token_dumps import TokenDump, read_dump
from rljax.run.options import Positional, parse_arguments

_EDGE_SHARE = 10  # one in so many rows is the beginning of a run, and one in so many its end
_BUCKET_KEY = re.compile(r"mismatch_position/((lt_|ge_)?([^/_]+)(?:_to_[^/]+)?)/k3_kl")  # name, kind, first edge


def slope_of_ratio(lengths: np.ndarray, ratios: np.ndarray) -> float:
    """Returns the least-squares slope through the origin of log-ratios [n] (nats) over lengths [n], per 1000 tokens."""
    return float(1000 * (lengths * ratios).sum() / (lengths * lengths).sum())


def plot_kl_by_position(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Plots k3_kl of each bucket of positions: thick for the last tenth of a run's rows, thin for the first."""
    style.head(axis, "KL by position in the response", "k3_kl, nats per token")
    axis.set_xlabel("position, tokens from 1; thick: last tenth of the steps, thin: first")
    found = [(run, bucket_means(run.rows, last=False), bucket_means(run.rows, last=True)) for run in runs]
    buckets = sorted({bucket for _, *both in found for means in both for bucket in means})
    values = np.asarray([value for _, *both in found for means in both for value in means.values()], np.float64)
    if not buckets or not (values > 0).any():
        style.note(axis, "no mismatch_position/*/k3_kl above 0 in the record")
        return
    for run, first, last in found:
        for means, width, alpha in ((first, 0.9, 0.5), (last, 1.9, 1.0)):
            heights = [means.get(bucket, np.nan) or np.nan for bucket in buckets]
            look = {"color": run.color, "linestyle": run.line, "marker": "o", "markersize": 3 * width**0.5}
            axis.plot(range(len(buckets)), heights, linewidth=width, alpha=alpha, **look)
    axis.set_xlim(-0.4, len(buckets) - 0.6)
    axis.set_xticks(range(len(buckets)), [name for _, _, name in buckets], rotation=20 if len(buckets) > 6 else 0)
    style.log_axis(axis, values)


def bucket_means(rows: Sequence[Row], *, last: bool) -> dict[tuple[float, bool, str], float]:
    """Computes the mean k3_kl of the tokens of each bucket over the first or last tenth of the rows, at least one row.

    The keys are (edge, whether it is a lower edge, name). Sorted keys go up the response.
    """
    tenth = max(1, len(rows) // _EDGE_SHARE)
    totals: dict[tuple[float, bool, str], list[float]] = {}
    for row in rows[-tenth:] if last else rows[:tenth]:
        for key, value in row.items():
            match = _BUCKET_KEY.fullmatch(key)
            if match and value is not None:
                name, kind, edge = match.groups()
                shown = name.replace("lt_", "below ").replace("ge_", "from ").replace("_to_", " to ")
                tokens = row[key.removesuffix("k3_kl") + "token_count"]
                total = totals.setdefault((float(edge), kind != "lt_", shown), [0.0, 0.0])
                total[0] += tokens * value
                total[1] += tokens
    return {bucket: total / tokens for bucket, (total, tokens) in totals.items()}


def plot_ratio_by_length(axis: Axes, runs: Sequence[Run], _: float) -> None:
    """Plots the log of trainer / rollout probability of whole responses by length, from each run's newest dump."""
    style.head(axis, "Sequence log-ratio by length", "sum of trainer - rollout, nats")
    axis.set_xlabel("response length, tokens")
    longest = 1.0
    for run in runs:
        paths = run_dumps(run.directory)
        if not paths:
            continue
        lengths, ratios = sequence_ratios(read_dump(paths[-1]))
        slope = slope_of_ratio(lengths, ratios)
        longest = max(longest, lengths.max())
        label = f"{run.label}: {slope:.3g} per 1000 tokens"
        axis.scatter(lengths, ratios, s=9, color=run.color, alpha=0.5, linewidths=0, label=label)
        axis.plot([0, lengths.max()], [0, slope * lengths.max() / 1000], color=run.color, linestyle=run.line)
    if not axis.collections:
        style.note(axis, "no rollouts/step_*.parquet in the run")
        return
    axis.axhline(0, color="black", linewidth=0.9, linestyle="--")
    axis.set_xlim(0, 1.03 * longest)
    axis.legend(frameon=False, fontsize=8.5, loc="best")


def sequence_ratios(dump: TokenDump) -> tuple[np.ndarray, np.ndarray]:
    """Returns the response tokens, and the sum of trainer - rollout over them (nats), of each sequence [n] of a dump.

    Tokens that are not finite on at least one side are left out of both.
    """
    lengths, ratios = [], []
    columns = (dump.response_mask, dump.logprobs["trainer"], dump.logprobs["rollout"])
    for mask, trainer, rollout in zip(*columns, strict=True):
        ratio = (trainer.astype(np.float64) - rollout)[mask]
        lengths.append(np.isfinite(ratio).sum())
        ratios.append(ratio[np.isfinite(ratio)].sum())
    return np.asarray(lengths, np.float64), np.asarray(ratios)


ALL_PANELS: Mapping[str, Panel] = {
    **PANELS,
    "kl_by_position": Panel(plot_kl_by_position, "mismatch_position/*/k3_kl"),
    "ratio_by_length": Panel(plot_ratio_by_length, "rollouts/step_*.parquet"),
}
"""All panels by name, those of the report included."""


def collapse_of(run: Run) -> int | None:
    """Returns the step at which the training accuracy of a run collapses, or None."""
    return collapse_step(trailing_mean([row.get("reward/mean") for row in run.rows]))


def decay_of(run: Run) -> int | None:
    """Returns the step at which the rate of a run is halved for the first time, or None."""
    return run.last("schedule/decay_period")


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper."""

    title: str
    runs: tuple[str, ...]  # the names of the paper's arms that it shows; it plots any other runs as well
    panels: PanelGrid  # keys of ALL_PANELS
    line: Callable[[Run], int | None] | None = None  # a function that returns the step of a dotted line in each panel

    @property
    def needs(self) -> list[str]:
        """The metrics that the panels show, as patterns of keys."""
        return [ALL_PANELS[name].needs for row in self.panels for name in row]


_CORRECTIONS = ("qwen3_4b_token_tis", "qwen3_4b_sequence_tis", "qwen3_4b_token_mis", "qwen3_4b_sequence_mis")
_BASE, _BASE_8B, _ACCURACY = "qwen3_4b_constant_1e-6", "qwen3_8b_constant_1e-6", (("accuracy",),)
_TRAINING = (("reward", "accuracy"), ("grad_norm", "mismatch"), ("entropy",))
_SANITY = ("deepseek_1.5b_sanity_bf16", "deepseek_1.5b_sanity_fp16")
FIGURES: dict[str, PaperFigure] = {
    "1": PaperFigure("Mismatch and validation accuracy", (_BASE,), (("mismatch", "accuracy"),), collapse_of),
    "2": PaperFigure("With and without importance sampling", (_BASE, *_CORRECTIONS), _ACCURACY),
    "3": PaperFigure("Smoothed gradient norm", (_BASE,), (("grad_norm",),), collapse_of),
    "6": PaperFigure("Response length", (_BASE, _BASE_8B), (("length",),)),
    "7": PaperFigure("With and without the schedule, 4B", (_BASE, "qwen3_4b_period_204"), _TRAINING, decay_of),
    "8": PaperFigure("With and without the schedule, 8B", (_BASE_8B, "qwen3_8b_period_160"), _TRAINING, decay_of),
    "9": PaperFigure("Decay periods, 4B", tuple(f"qwen3_4b_period_{n}" for n in (125, 204, 250)), _ACCURACY),
    "10": PaperFigure("Decay periods, 8B", tuple(f"qwen3_8b_period_{n}" for n in (100, 160, 204)), _ACCURACY),
    "11": PaperFigure("Token-level MIS", ("qwen3_4b_token_mis", "qwen3_4b_token_mis_schedule"), _ACCURACY),
    "12": PaperFigure(
        "Token-level TIS", ("qwen3_4b_token_tis", "qwen3_4b_token_tis_schedule"), (("accuracy", "mismatch"),)
    ),
    "13": PaperFigure("float16", ("qwen3_4b_fp16", "qwen3_4b_fp16_schedule"), _ACCURACY),
    "kl-by-length": PaperFigure("KL between engines by position in the response", _SANITY, (("kl_by_position",),)),
    "ratio-by-length": PaperFigure("Log-ratio of whole responses by their length", _SANITY, (("ratio_by_length",),)),
}
"""The figures by name. 1 to 13 are those of arXiv 2602.01826; the two by length are figure 2 of arXiv 2510.26788."""


def plot_figure(name: str, runs: Sequence[Run], smooth: float) -> Figure:
    """Plots a figure of ``FIGURES``. Raises ValueError when a run has no value of a metric that the figure shows."""
    paper = FIGURES[name]
    for needed in paper.needs:
        if missing := [str(run.directory) for run in runs if not has(run, needed)]:
            raise ValueError(f"figure {name} needs {needed}, which is not in {', '.join(missing)}")
    title = f"{paper.title} (as figure {name})"
    figure = plot_grid(paper.panels, runs, smooth, title=title, panels=ALL_PANELS)
    for run in runs:
        if paper.line and (step := paper.line(run)) is not None:
            for axis in figure.axes:
                axis.axvline(step, color=run.color, linestyle=":")
    return figure


def has(run: Run, needed: str) -> bool:
    """Returns whether the run has a value of a metric, or a file, that matches the pattern."""
    if needed.endswith(".parquet"):
        return any(run.directory.glob(needed))
    return any(fnmatch.fnmatch(key, needed) and value is not None for row in run.rows for key, value in row.items())


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    figure: Positional[str]
    """The name of the figure."""
    runs: Positional[tuple[Path, ...]]
    """The directories of the runs."""
    out: str | None = None
    """The PNG (or .svg) to write; by default figure_FIGURE.png in the current directory."""
    labels: str | None = None
    """Names for the runs, in their order, with commas between them; by default their directories."""


def main(argv: Sequence[str]) -> int:
    """Plots the runs, prints the path of the picture, and returns the exit status."""
    given = parse_arguments(Arguments, argv, prog="paper_figures.py", description=__doc__ or "")
    name, runs = given.figure, given.runs
    if name not in FIGURES:
        raise ConfigError(f"expected one of {', '.join(FIGURES)}, got {name}")
    with caller_errors():
        read = read_runs(runs)
        labels = given.labels.split(",") if given.labels else [run.label for run in read]
        if len(labels) != len(read):
            raise ConfigError(f"expected {len(read)} labels, one per run, got {len(labels)}")
        read = [replace(run, label=label) for run, label in zip(read, labels, strict=True)]
        print(style.save_figure(plot_figure(name, read, SMOOTH), given.out or f"figure_{name}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
