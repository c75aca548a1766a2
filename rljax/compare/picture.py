"""Pictures of a comparison of columns: the matrix of the pairs, and the gap of each along the response."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from rljax.compare.report import GAP, Comparison


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Plots the mean absolute difference of each pair as a matrix, and its growth along the response."""
    side = max(5.5, 2.0 + 0.6 * len(comparison.columns))
    figure = Figure(figsize=(2 * side + 4.0, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_matrix(left, comparison)
    plot_growth(right, comparison)
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=100)


def plot_growth(axes: Axes, comparison: Comparison) -> None:
    """Plots one line for each pair. The line is dashed if the pair does not pass."""
    shades = colormaps["turbo"](np.linspace(0.05, 0.95, len(comparison.pairs)))
    for pair, shade in zip(comparison.pairs, shades, strict=True):
        gaps = [max(bucket[GAP], 1e-9) for bucket in pair.growth.values()]
        form = "o-" if pair.verdict.status == "pass" else "x--"
        axes.plot(list(pair.growth), gaps, form, color=shade, label=f"{pair}: {pair.verdict.status}")
    axes.set(yscale="log", xlabel="position in the response (tokens)", ylabel=f"{GAP} (nats)")
    axes.grid(alpha=0.3)


def plot_matrix(axes: Axes, comparison: Comparison) -> None:
    """Plots the difference of each pair, and on the diagonal the difference between the two runs of one scorer."""
    names = list(comparison.columns)
    grid = np.full((len(names), len(names)), np.nan)
    for pair in comparison.pairs:
        i, j = names.index(pair.trainer), names.index(pair.rollout)
        grid[i, j] = grid[j, i] = pair.metrics[GAP]
    for name, floor in comparison.noise_floor.items():
        grid[names.index(name), names.index(name)] = floor[GAP]
    axes.imshow(np.maximum(grid, 1e-8), norm=LogNorm(1e-8, 1.0), cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{value:.1e}".replace("e-0", "e-") if value else "0"
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="w" if value < 1e-2 else "k")
    axes.set_title(f"{GAP} (nats; diagonal: second run)", fontsize=10)
