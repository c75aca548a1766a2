"""Draws the picture of ``rljax replay``: the length of each log, the call of each rule, and the rate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rljax.commands.replay import Replay, verdict
from rljax.record.panel_style import INK, LINES, QUIET, head, save_figure, style_axis

_MOST_NAMES = 10  # the most names in the legend
_LONGEST_NAME = 40  # the most letters of a log's name


def draw(results: Sequence[Replay], path: Path) -> None:
    """Writes one picture of all logs. Raises OSError."""
    rules = len(results[0].outcomes)
    figure = Figure(figsize=(11, 7.0 + 0.24 * rules), layout="constrained")
    length, calls, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3.0, 0.6 + 0.24 * rules, 1.6))
    last = max(len(result.log.lengths) for result in results)
    for axis in (length, calls, rate):
        style_axis(axis, 1, last)
        axis.set_xlabel("")
    rate.set_xlabel("step", fontsize=8.5, color=QUIET)
    looks = list(zip(results, itertools.cycle(LINES), strict=False))
    for result, look in looks:
        draw_log(result, look, length, rate)
    draw_calls(results, calls)
    alone = f": {verdict(results[0].in_use)}" if len(results) == 1 else ""
    head(length, f"Response length{alone}", "")
    length.set_ylabel(results[0].log.column, fontsize=8.5, color=QUIET, parse_math=False)
    head(calls, "Call of each rule", "")
    head(rate, "Learning rate of the rule in use", "per update")
    length.set_ylim(bottom=0)
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter("{x:g}")
    if len(results) > 1:
        named = looks[:_MOST_NAMES]
        lines = [Line2D([], [], ls=look[0], color=look[1], label=name_of(result)) for result, look in named]
        figure.legend(handles=lines, loc="outside upper right", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    save_figure(figure, path)


def name_of(result: Replay) -> str:
    """Returns the log's path for the legend, cut at the front to ``_LONGEST_NAME`` letters."""
    name = str(result.path)
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def draw_log(result: Replay, look: tuple[str, str], length: Axes, rate: Axes) -> None:
    """Draws the length of one log, and the rate and the call of the rule in use."""
    line, color = look
    steps, outcome = range(1, len(result.log.lengths) + 1), result.in_use
    marker = "o" if len(steps) == 1 else ""
    length.plot(steps, result.log.lengths, color=color, linestyle=line, linewidth=1.2, marker=marker)
    rate.step(steps, outcome.rates, where="mid", color=color, linestyle=line, linewidth=1.5)
    if outcome.surge_step is not None:
        for axis in (length, rate):
            axis.axvline(outcome.surge_step, color=color, linewidth=1.2, linestyle=(0, (4, 2)))


def draw_calls(results: Sequence[Replay], axis: Axes) -> None:
    """Draws a row for each rule, with a point at the step of each log's call.

    If a rule does not call on every log, a text says on how many it calls.
    """
    outcomes = [result.outcomes for result in results]
    names = [one.rule.name for one in outcomes[0]]
    for row in range(len(names)):
        calls = [(each[row].surge_step, look) for each, look in zip(outcomes, itertools.cycle(LINES), strict=False)]
        made = [(step, look) for step, look in calls if step is not None]
        for step, (_, color) in made:
            axis.plot(step, row, marker="o", markersize=7 if row == 0 else 5, color=color, linestyle="")
        if len(made) < len(calls):
            text, place = f"{len(made)} of {len(calls)} call" if made else "no call", axis.get_yaxis_transform()
            axis.text(0.995, row, text, ha="right", va="center", transform=place, fontsize=8, color=QUIET)
    axis.set_yticks(range(len(names)), names, fontsize=8.5)
    axis.set_ylim(len(names) - 0.5, -0.5)
