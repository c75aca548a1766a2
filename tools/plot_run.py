"""Draws the panels of one run, or of several overlaid: ``python tools/plot_run.py RUN [RUN...] [--out report.png]``.

One run is drawn into its own directory unless ``--out`` says otherwise, several into ``report.png`` here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rljax.config_loader import ConfigError, caller_errors, run_cli
from rljax.report_figure import draw_report


class Parser(argparse.ArgumentParser):
    """Leaves mistakes to ``run_cli``, which says them in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python tools/plot_run.py", description=__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory, the one with metrics.jsonl")
    parser.add_argument("--out", type=Path, help="PNG to write (default: RUN/report.png, or report.png for several)")
    parser.add_argument(
        "--smooth", type=float, default=0.9, help="decay per step of the mean drawn over the raw curves (default: 0.9)"
    )
    options = parser.parse_args(argv)
    out = options.out or (options.runs[0] / "report.png" if len(options.runs) == 1 else Path("report.png"))
    try:
        with caller_errors():
            path = draw_report(options.runs, out, smooth=options.smooth)
    except RuntimeError as error:  # a damaged record: for this program, an argument that is no run
        raise ConfigError(error) from error
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
