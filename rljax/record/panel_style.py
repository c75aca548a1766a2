"""The style of all figures (colors, titles, axes) and the files of figures. It needs matplotlib and numpy."""

from __future__ import annotations

import io
import itertools
import os
import re
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Readers with any colour vision can tell these apart. In this order a grey print shows them, too.
COLORS = ("#1f5fa8", "#d55e00", "#00916e", "#a8428c", "#b8860b", "#555555")
LINES = tuple(itertools.product(("-", "--", ":"), COLORS))
"""The line style and the color of each curve, in the order in which curves take them."""

INK, QUIET, GRID = "#22262b", "#6b7280", "#e6e8eb"
_EDGE = "#b6bac0"
# The colors of a figure that become CSS variables in an SVG, so that a page can show it dark and light.
_VARIABLES = {INK: "ink", QUIET: "quiet", GRID: "grid", _EDGE: "line", "#ffffff": "paper", COLORS[0]: "run"}


def head(axis: Axes, title: str, unit: str) -> None:
    """Sets a panel's title and the unit of its y axis."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axis.set_ylabel(unit, fontsize=8.5, color=QUIET)


def note(axis: Axes, text: str) -> None:
    """Writes a text in place of curves."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=9, color=QUIET)
    axis.set_yticks([])
    axis.grid(visible=False)


def log_axis(axis: Axes, values: np.ndarray) -> None:
    """Sets a log scale with limits around the positive values, of which there must be one.

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
