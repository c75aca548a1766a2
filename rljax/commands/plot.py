"""Plots one run, or several in the same panels: ``rljax plot RUN [RUN...] [--metrics KEY,KEY...] [--out FILE]``.

The plot of one run goes into its own directory unless ``--out`` names another file. The plot of several runs goes into
``report.png`` in the current directory. ``--metrics`` plots a panel for each of these keys of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rljax.errors import ConfigError, caller_errors
from rljax.record.figure import SMOOTH, plot_report
from rljax.record.training_logs import foreign_kind
from rljax.run.options import Positional, parse_arguments


@dataclass(frozen=True)
class PlotArguments:
    """The arguments of the plot."""

    runs: Positional[tuple[Path, ...]]
    """The directories of the runs."""
    metrics: str | None = None
    """The keys to plot, such as reward/mean,policy/entropy, a panel each; without it the panels of a report."""
    out: str | None = None
    """The PNG (or .svg) to write, instead of report.png."""
    smooth: float = SMOOTH
    """The decay per step of the mean over the raw curves; 0 plots the raw curves alone."""


def main(argv: Sequence[str]) -> int:
    """Plots the runs, prints the path of the picture, and returns the exit status."""
    given = parse_arguments(PlotArguments, argv, prog="rljax plot", description=__doc__ or "")
    runs = given.runs
    out = Path(given.out) if given.out else runs[0] / "report.png" if len(runs) == 1 else Path("report.png")
    with caller_errors(RuntimeError):  # a damaged record means that the argument is not a run
        for path in runs:
            if path.is_file():
                kind = foreign_kind(path) or "a file: give the directory of a run, which has a metrics.jsonl"
                raise ConfigError(f"{path} is {kind}; rljax replay LOG --picture FILE draws other logs")
        plot_report(runs, out, smooth=given.smooth, metrics=given.metrics.split(",") if given.metrics else ())
    print(out)
    return 0
