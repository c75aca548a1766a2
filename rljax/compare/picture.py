"""Pictures of a comparison of columns, and of a comparison of operations, layer by layer.

The first picture has the gap of each pair of columns as a matrix and along the response. The second has the errors of
the operations as a map and along depth, and their effects on log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure

from rljax.compare.layers.differences import LayerComparison
from rljax.compare.layers.findings import Judged
from rljax.compare.layers.operations import IN_BLOCK
from rljax.compare.report import GAP, Comparison
from rljax.record.figure import COLORS, GRID, head, note, save_figure

_LOWEST, _HIGHEST = 1e-2, 1e2  # the range of the map, as multiples of the limit
_SMALLEST = 1e-9  # an error of 0 is drawn here on a log axis
_SHADES = [(0.0, "#f4f4f4"), (0.499, "#6fa8dc"), (0.501, "#fdb863"), (1.0, "#7f2704")]
_MAP = LinearSegmentedColormap.from_list("ratio", _SHADES)
"""Shades of blue below the limit and of orange above it."""


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Plots each pair's mean absolute difference as a matrix and along the response, into the file ``path``."""
    side = max(5.5, 2.0 + 0.6 * len(comparison.columns))
    figure = Figure(figsize=(2 * side + 4.0, side), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_matrix(left, comparison)
    plot_growth(right, comparison)
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=100)


def plot_growth(axes: Axes, comparison: Comparison) -> None:
    """Plots the mean absolute difference of each pair by position. The line is dashed if the pair does not pass."""
    shades = colormaps["turbo"](np.linspace(0.05, 0.95, len(comparison.pairs)))
    for pair, shade in zip(comparison.pairs, shades, strict=True):
        gaps = [max(bucket[GAP], 1e-9) for bucket in pair.growth.values()]
        form = "o-" if pair.verdict.status == "pass" else "x--"
        axes.plot(list(pair.growth), gaps, form, color=shade, label=f"{pair}: {pair.verdict.status}")
    axes.set(yscale="log", xlabel="position in the response (tokens)", ylabel=f"{GAP} (nats)")
    axes.grid(alpha=0.3)


def plot_matrix(axes: Axes, comparison: Comparison) -> None:
    """Plots the mean absolute difference of each pair, and on the diagonal that of two runs of one scorer."""
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


def plot_layers(judged: Sequence[Judged], path: Path) -> None:
    """Plots each comparison as a row of three panels (map, depth, effects) into the file ``path``."""
    figure = Figure(figsize=(17, 5.2 * len(judged)), layout="constrained")
    grid = figure.subplots(len(judged), 3, squeeze=False)
    for (left, middle, right), (comparison, verdict) in zip(grid, judged, strict=True):
        plot_map(left, comparison)
        plot_depth(middle, comparison)
        plot_effects(right, comparison)
        place = verdict.findings[0].place if verdict.findings else verdict.sentence
        left.set_xlabel(f"layer\n\n{comparison.tested} against {comparison.reference}:\n{place:.100}", loc="left")
    save_figure(figure, path)


def plot_map(axis: Axes, comparison: LayerComparison) -> None:
    """Plots the largest error of each operation in a block as a multiple of its limit. A cross marks those above 1."""
    head(axis, "Largest error as a multiple of its limit", "")
    kinds = [kind for kind in IN_BLOCK if any(each.operation.kind == kind for each in comparison.differences)]
    layers = 1 + max((each.operation.layer or 0 for each in comparison.differences), default=0)
    grid = np.full((len(kinds), layers), np.nan)
    for each in comparison.differences:
        if each.operation.layer is not None:
            grid[kinds.index(each.operation.kind), each.operation.layer] = each.ratio
    shown = np.log10(np.clip(grid, _LOWEST, _HIGHEST))
    norm = TwoSlopeNorm(0.0, np.log10(_LOWEST), np.log10(_HIGHEST))
    drawn = axis.imshow(shown, norm=norm, cmap=_MAP, aspect="auto", interpolation="nearest")
    rows, columns = np.nonzero(grid > 1)
    axis.plot(columns, rows, "x", color="k", markersize=7)
    axis.set_yticks(range(len(kinds)), [IN_BLOCK[kind] for kind in kinds], fontsize=8)
    axis.set_xticks(range(0, layers, max(1, layers // 12)))
    ticks = [-2, -1, 0, 1, 2]
    bar = axis.figure.colorbar(drawn, ax=axis, ticks=ticks, fraction=0.05)
    bar.ax.set_yticklabels([f"{10.0**tick:g}" for tick in ticks], fontsize=8)


def plot_depth(axis: Axes, comparison: LayerComparison) -> None:
    """Plots each operation's own error, the error up to it, and its limit, in the order of the operations."""
    head(axis, "Along depth", "relative error")
    differences, places = comparison.differences, np.arange(len(comparison.differences))
    lines = {
        "own error": ([each.own for each in differences], ".", COLORS[0]),
        "error up to it": ([each.up_to for each in differences], "-", COLORS[1]),
        "limit of the own error": ([each.limit for each in differences], ":", COLORS[5]),
    }
    for label, (values, form, color) in lines.items():
        axis.plot(places, np.maximum(values, _SMALLEST), form, color=color, label=label)
    above = [i for i, each in enumerate(differences) if each.ratio > 1 and np.isfinite(each.own)]
    axis.plot(above, [max(differences[i].own, _SMALLEST) for i in above], "kx", label="above its limit")
    first = [i for i, each in enumerate(differences) if each.operation.kind == "attention_norm"]
    axis.set_xticks(first, [str(differences[i].operation.layer) for i in first], fontsize=8)
    axis.set(yscale="log", xlabel="layer")
    axis.grid(color=GRID)
    axis.legend(frameon=False, fontsize=8)


def plot_effects(axis: Axes, comparison: LayerComparison) -> None:
    """Plots the mean change of the reference's log-probabilities by an operation's own error, where it was measured."""
    head(axis, "Effect of one own error on log-probabilities", "")
    known = [(each.effect_mean, each) for each in comparison.differences if each.effect_mean is not None]
    known.sort(key=lambda pair: pair[0], reverse=True)
    if not known:
        note(axis, "no operation differs")
        return
    colors = ["k" if each.ratio > 1 else COLORS[0] for _, each in known]
    axis.barh(range(len(known)), [effect for effect, _ in known], color=colors)
    axis.set_yticks(range(len(known)), [each.operation.label for _, each in known], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(comparison.logprob_mean, color=COLORS[1], linestyle="--")
    axis.set_xlabel("mean change (nats); dashed: scorers", fontsize=8.5)
    axis.set_axisbelow(True)
    axis.grid(axis="x", color=GRID)
