"""The figure of a run, or of several overlaid: the panels in which a training-inference mismatch shows itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rljax.report import panels

REPORT: tuple[tuple[panels.Panel, ...], ...] = (
    (panels.reward, panels.accuracy),
    (panels.length, panels.learning_rate),
    (panels.grad_norm, panels.entropy),
    (panels.mismatch,),
)
"""The panels of ``report.png``, row by row."""


def draw_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    smooth: float = 0.9,
    labels: Sequence[str] | None = None,
) -> Path:
    """Draws ``metrics.jsonl`` of each run directory into one PNG and returns its path.

    Args:
      run_dirs: at least one run directory.
      out: the file to write; its directory is made.
      smooth: in [0, 1); over the raw curves goes an exponential mean towards both sides, so that it does not lag, about
        as wide as a running one that decays by ``smooth`` per step; 0 draws the raw curves only. The response length
        is drawn raw: the surge is called on it.
      labels: one per run; by default the directories' names, as long as it takes to tell them apart.

    Raises:
      ValueError: no runs, a run without rows, or arguments out of range.
      FileNotFoundError: a run without metrics.jsonl.
      RuntimeError: a damaged metrics.jsonl.
    """
    panels.check_smooth(smooth)
    runs = panels.read_runs(run_dirs, labels)
    return panels.save_figure(panels.draw_grid(REPORT, runs, smooth), out)
