"""Plots one run, or several in the same panels: ``rljax plot RUN [RUN...] [--out FILE]``.

The plot of one run goes into its own directory unless ``--out`` names another file. The plot of several runs goes into
``report.png`` in the current directory. ``--figure`` plots the panels of a figure of the papers instead, into
``figure_NAME.png``.
"""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from rljax.commands.paper_panels import ALL_PANELS
from rljax.errors import ConfigError, caller_errors
from rljax.record.figure import PanelGrid, plot_grid, plot_report, read_runs, save_figure
from rljax.record.panels import Run
from rljax.record.summary import collapse_step, trailing_mean
from rljax.run.options import parse_arguments


def collapse_of(run: Run) -> int | None:
    """Returns the step at which the training accuracy of a run collapses, or None."""
    return collapse_step(trailing_mean([row.get("reward/mean") for row in run.rows]))


def decay_of(run: Run) -> int | None:
    """Returns the step at which the rate of a run is halved for the first time, or None."""
    return run.last("schedule/decay_period")


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
      title: The heading of the figure.
      runs: The names of the paper's arms that the figure shows; it plots any other runs as well.
      panels: The rows of panels, as keys of ``ALL_PANELS``.
      line: A function that returns the step of a run for a dotted vertical line in every panel; None: no line.
    """

    title: str
    runs: tuple[str, ...]
    panels: PanelGrid
    line: Callable[[Run], int | None] | None = None

    @property
    def needs(self) -> list[str]:
        """The metrics that the panels show, as patterns of keys."""
        return [ALL_PANELS[name].needs for row in self.panels for name in row]


_CORRECTIONS = ("qwen3_4b_token_tis", "qwen3_4b_sequence_tis", "qwen3_4b_token_mis", "qwen3_4b_sequence_mis")
_TRAINING = (("reward", "accuracy"), ("grad_norm", "mismatch"), ("entropy",))
_SANITY = ("deepseek_1.5b_sanity_bf16", "deepseek_1.5b_sanity_fp16")
FIGURES: dict[str, PaperFigure] = {
    "1": PaperFigure(
        "Mismatch and validation accuracy", ("qwen3_4b_constant_1e-6",), (("mismatch", "accuracy"),), collapse_of
    ),
    "2": PaperFigure(
        "With and without importance sampling", ("qwen3_4b_constant_1e-6", *_CORRECTIONS), (("accuracy",),)
    ),
    "3": PaperFigure("Smoothed gradient norm", ("qwen3_4b_constant_1e-6",), (("grad_norm",),), collapse_of),
    "6": PaperFigure("Response length", ("qwen3_4b_constant_1e-6", "qwen3_8b_constant_1e-6"), (("length",),)),
    "7": PaperFigure(
        "With and without the schedule, 4B", ("qwen3_4b_constant_1e-6", "qwen3_4b_period_204"), _TRAINING, decay_of
    ),
    "8": PaperFigure(
        "With and without the schedule, 8B", ("qwen3_8b_constant_1e-6", "qwen3_8b_period_160"), _TRAINING, decay_of
    ),
    "9": PaperFigure("Decay periods, 4B", tuple(f"qwen3_4b_period_{n}" for n in (125, 204, 250)), (("accuracy",),)),
    "10": PaperFigure("Decay periods, 8B", tuple(f"qwen3_8b_period_{n}" for n in (100, 160, 204)), (("accuracy",),)),
    "11": PaperFigure("Token-level MIS", ("qwen3_4b_token_mis", "qwen3_4b_token_mis_schedule"), (("accuracy",),)),
    "12": PaperFigure(
        "Token-level TIS", ("qwen3_4b_token_tis", "qwen3_4b_token_tis_schedule"), (("accuracy", "mismatch"),)
    ),
    "13": PaperFigure("float16", ("qwen3_4b_fp16", "qwen3_4b_fp16_schedule"), (("accuracy",),)),
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
    steps = [paper.line(run) for run in runs] if paper.line else []
    for run, step in zip(runs, steps, strict=False):
        if step is not None:
            for axis in figure.axes:
                axis.axvline(step, color=run.color, linestyle=":")
    return figure


def has(run: Run, needed: str) -> bool:
    """Returns whether the run has a value of a metric, or a file, that matches the pattern."""
    if needed.endswith(".parquet"):
        return any(run.directory.glob(needed))
    return any(fnmatch.fnmatch(key, needed) and value is not None for row in run.rows for key, value in row.items())


def figures_table(width: int = 78) -> str:
    """Returns the title, runs and metrics of each figure as text."""
    lines = []
    for name, paper in FIGURES.items():
        lines.append(f"  {name}: {paper.title}")  # the space keeps the line apart from the one above it in --help
        for head, text in (("runs", ", ".join(paper.runs)), ("metrics", ", ".join(paper.needs))):
            lines += textwrap.wrap(f"{head + ':':9}{text}", width, initial_indent="    ", subsequent_indent=" " * 13)
    return "\n".join(lines)


@dataclass(frozen=True)
class Arguments:
    """The arguments of the plot."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run directories, each with a metrics.jsonl."""
    out: Path | None = None
    """The PNG to write. None: report.png or figure_NAME.png, in the run's directory if there is one run."""
    figure: str | None = None
    """One of the figures of the papers (the list is above). None: the report."""
    labels: str | None = None
    """Names for the runs, in their order, with commas between them. None: their directories."""
    smooth: float = 0.9
    """The decay per step of the mean over the raw curves."""


def main(argv: Sequence[str]) -> int:
    """Plots; returns the exit status."""
    text = f"{__doc__}\nFigures, with the runs to give (arms of the paper) and the metrics that they must have:\n\n"
    given = parse_arguments(Arguments, argv, prog="rljax plot", description=text + figures_table())
    if not given.runs:
        raise ConfigError("expected at least one run directory")
    if given.figure is not None and given.figure not in FIGURES:
        raise ConfigError(f"--figure: expected one of {', '.join(FIGURES)}, got {given.figure}")
    name = f"figure_{given.figure}.png" if given.figure else "report.png"
    out = given.out or (given.runs[0] / name if len(given.runs) == 1 else Path(name))
    labels = given.labels.split(",") if given.labels else None
    try:
        with caller_errors():
            if given.figure:
                save_figure(plot_figure(given.figure, read_runs(given.runs, labels), given.smooth), out)
            else:
                plot_report(given.runs, out, smooth=given.smooth, labels=labels)
    except RuntimeError as error:  # a damaged record means that the argument is no run
        raise ConfigError(error) from error
    print(out)
    return 0
