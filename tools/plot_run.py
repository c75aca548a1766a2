"""Draws the panels of one run, or of several overlaid: ``python tools/plot_run.py RUN [RUN...] [--out report.png]``.

One run is drawn into its own directory unless ``--out`` says otherwise, several into ``report.png`` here. ``--figure``
arranges the panels as a figure of the papers instead, in ``figure_NAME.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.report.figure import draw_report
from rljax.report.paper_figures import FIGURES, draw_paper_figure, figures_table


class Parser(argparse.ArgumentParser):
    """Leaves mistakes to ``run_cli``, which says them in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="python tools/plot_run.py",
        description=__doc__,
        epilog=f"figures, the runs to give (configs/paper/*.yaml), the metrics each must have:\n\n{figures_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory, the one with metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, help="PNG to write (default: report.png or figure_NAME.png, in RUN if there is one run)"
    )
    parser.add_argument(
        "--figure", metavar="NAME", choices=FIGURES, help="one of the figures below (default: the report)"
    )
    parser.add_argument("--labels", metavar="A,B,...", help="names for the runs, in their order (default: directories)")
    parser.add_argument(
        "--smooth", type=float, default=0.9, help="decay per step of the mean drawn over the raw curves (default: 0.9)"
    )
    options = parser.parse_args(argv)
    name = f"figure_{options.figure}.png" if options.figure else "report.png"
    out = options.out or (options.runs[0] / name if len(options.runs) == 1 else Path(name))
    labels = options.labels.split(",") if options.labels else None
    try:
        with caller_errors():
            if options.figure:
                path = draw_paper_figure(options.figure, options.runs, out, smooth=options.smooth, labels=labels)
            else:
                path = draw_report(options.runs, out, smooth=options.smooth, labels=labels)
    except RuntimeError as error:  # a damaged record: for this program, an argument that is no run
        raise ConfigError(error) from error
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
