"""Compares the arms of a study by the area under the accuracy, from the rows, with exact tests over the seeds.

    python experiments/study_area.py configs/study/collapse.yaml benchmarks/study_collapse.parquet --json areas.json
    python experiments/study_area.py configs/study/collapse.yaml benchmarks/study_collapse.parquet --power constant

The area of a run is the mean reward of its steps from the surge on, or the mean of the study's ``outcome`` in the steps
that have it. Every arm of a seed counts from the same step: the one after the surge was called in the seed's run of the
arm ``constant``, or step 1 where none was called. A study's ``after`` names another step. A step that a stopped run
lacks does not count.

A pair of arms is compared by the differences of the areas of the same seeds. The p value is exact (exact_tests.py).
With m planned pairs the corrected p value is m times the first, and an interval covers 1 - 0.05 / m. Falls, collapses
and final accuracies are those of study_outcome.py.

A study with a ``trend`` has arms by size of a mismatch. The slope of the area on the number of the arm is tested over
the seeds, and the table gives the gap of each arm in nats: the mean of its first 100 steps.

--figure draws the differences of each planned pair, with the mean and the interval. With a trend it draws the
difference to the first arm against the gap.

--power draws the areas of both sides from the runs of some arms, with replacement. A shift is added to one side. The
table gives, for each shift and each number of seeds, the share of drawn studies whose corrected p value is under 0.05.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from exact_tests import fisher_p, paired_test, share_interval, table_cells
from matplotlib.figure import Figure
from study import Study, read_study
from study_outcome import Outcome, outcome_of
from study_rows import Runs, read_table

from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.record.figure import COLORS, INK, QUIET, save_figure, style_axis
from rljax.record.rows import Row, last_value
from rljax.run.options import Positional, parse_arguments

REFERENCE = "constant"  # the arm whose surge begins the area of each seed
SHIFTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
DRAWS = 2000
GAP_STEPS = 100  # the first steps of a run, whose mean gap is the size of its mismatch
RL_KERNEL = {0.0126: "no harm", 0.049: "-0.29"}  # by gap: Qwen3-8B's reward, less an exact engine's


@dataclass(frozen=True)
class Arguments:
    """The options of the program."""

    study: Positional[Path]
    """The YAML file of the study."""
    rows: Positional[Path]
    """The Parquet file of the rows."""
    json: Path | None = None
    """The JSON file for the numbers."""
    figure: Path | None = None
    """The PNG file for the differences of the planned pairs."""
    power: tuple[str, ...] = ()
    """The arms whose runs stand in for both sides of a simulated pair. Only the power is printed then."""
    seeds: tuple[int, ...] = (6, 9)
    """The numbers of seeds of the simulated studies."""


def area(rows: Sequence[Row], after: int, outcome: str = "reward/mean") -> float:
    """Computes the mean ``outcome`` of the steps after ``after`` that have it. Raises ValueError if there are none."""
    values = [row[outcome] for row in rows if row["step"] > after and row.get(outcome) is not None]
    if not values:
        raise ValueError(f"no step after {after} has {outcome}")
    return float(np.mean(values))


def start_of(rows: Sequence[Row]) -> int:
    """Returns the step at which the surge was called; 0 without a call."""
    return last_value(rows, "schedule/surge_step") or 0


def areas_of(runs: Runs, outcome: str = "reward/mean", after: int | None = None) -> dict[str, dict[int, float]]:
    """Computes the area of each run, by arm and seed; a seed without the reference arm is left out."""
    of_reference = {seed: rows for (arm, seed), rows in runs.items() if arm == REFERENCE}
    starts = {seed: start_of(rows) if after is None else after for seed, rows in of_reference.items()}
    found: dict[str, dict[int, float]] = {}
    for (arm, seed), rows in runs.items():
        if seed in starts:
            found.setdefault(arm, {})[seed] = area(rows, starts[seed], outcome)
    return found


def compare(one: Mapping[int, float], other: Mapping[int, float], count: int) -> dict[str, Any]:
    """Compares two arms by the seeds that both have.

    Args:
      one: The area of each seed in the first arm.
      other: The area of each seed in the second arm.
      count: The number of planned comparisons.

    Raises:
      ValueError: The arms have no seed in common.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        raise ValueError("the arms have no seed in common")
    differences = {seed: one[seed] - other[seed] for seed in seeds}
    return {
        **paired_test(list(differences.values()), count),
        "differences": {str(seed): value for seed, value in differences.items()},
    }


def trend_of(arms: Sequence[str], areas: Mapping[str, Mapping[int, float]], runs: Runs) -> dict[str, Any]:
    """Tests the slope of the areas over ``arms``, which are ordered by the size of a mismatch (``paired_test``).

    The result also has the slope of each seed that has all arms, and the gap of each arm in nats. Raises ValueError if
    no seed has all arms.
    """
    seeds = sorted(set.intersection(*(set(areas.get(arm, ())) for arm in arms)))
    if not seeds:
        raise ValueError(f"no seed has all of the arms {', '.join(arms)}")
    slopes = [float(np.polyfit(range(len(arms)), [areas[arm][seed] for arm in arms], 1)[0]) for seed in seeds]
    gaps = {
        arm: float(np.mean([row["mismatch/logprob_abs_diff_mean"] for s in seeds for row in runs[arm, s][:GAP_STEPS]]))
        for arm in arms
    }
    return {**paired_test(slopes, 1), "slopes": dict(zip(map(str, seeds), slopes, strict=True)), "gaps": gaps}


def arm_row(areas: Mapping[int, float], outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """Computes the line of one arm."""
    collapsed = sum(outcome.collapse_step is not None for outcome in outcomes.values())
    return {
        "seeds": len(outcomes),
        "area": float(np.mean(list(areas.values()))),
        "areas": {str(seed): value for seed, value in areas.items()},
        "collapsed": collapsed,
        "collapsed_interval": share_interval(collapsed, len(outcomes), 0.95),
        "peak": float(np.mean([outcome.peak for outcome in outcomes.values()])),
        "final": float(np.mean([outcome.final for outcome in outcomes.values()])),
        "fall_steps": [outcome.fall_step for outcome in outcomes.values()],
        "surge_steps": [outcome.surge_step for outcome in outcomes.values()],
    }


def tables(study: Study, runs: Runs) -> dict[str, Any]:
    """Computes a line for each arm and each planned comparison, and the outcome of each run."""
    areas = areas_of(runs, study.outcome, study.after)
    outcomes: dict[str, dict[int, Outcome]] = {arm: {} for arm in study.arms if arm in areas}
    for (arm, seed), rows in runs.items():
        if seed in areas.get(arm, {}):
            outcomes[arm][seed] = outcome_of(rows)
    comparisons = []
    for one, other in study.comparisons:
        if one not in areas or other not in areas:
            continue
        both = sorted(set(areas[one]) & set(areas[other]))
        fallen, other_fallen = (sum(outcomes[arm][s].collapse_step is not None for s in both) for arm in (one, other))
        line = {"arms": [one, other], **compare(areas[one], areas[other], len(study.comparisons))}
        line |= {"collapsed": [fallen, other_fallen]}
        line |= {"fisher_p": fisher_p(fallen, len(both), other_fallen, len(both))}
        comparisons.append(line)
    return {
        "arms": {arm: arm_row(areas[arm], of_arm) for arm, of_arm in outcomes.items()},
        "comparisons": comparisons,
        "trend": trend_of(study.trend, areas, runs) if study.trend else None,
        "runs": {arm: {str(s): asdict(run) for s, run in of_arm.items()} for arm, of_arm in outcomes.items()},
    }


def power(areas: Sequence[float], seeds: int, shift: float, count: int, rng: np.random.Generator) -> float:
    """Returns the share of drawn studies whose corrected p value is under 0.05.

    Args:
      areas: The areas of the runs to draw from.
      seeds: The number of pairs of a study.
      shift: The difference between the two arms, in the unit of the area.
      count: The number of planned comparisons.
      rng: The generator of the draws.
    """
    drawn = rng.choice(areas, (DRAWS, seeds)) + shift - rng.choice(areas, (DRAWS, seeds))
    # One row of signs for each pattern. An observed sum counts itself, as in exact_tests.sign_flip_p.
    signs = 1 - 2 * (np.arange(2**seeds)[:, None] >> np.arange(seeds) & 1)
    sums = np.abs(drawn @ signs.T)
    p = (sums >= np.abs(drawn.sum(1, keepdims=True)) * (1 - 1e-12)).mean(1)
    return float((count * p < 0.05).mean())


def markdown(found: Mapping[str, Any]) -> str:
    """Formats both tables as in the documentation."""
    lines = [
        "| arm | seeds | area | peak | final | collapsed | 95% interval | fell at | surge |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in found["arms"].items():
        steps = [" ".join(str(step or "-") for step in row[key]) for key in ("fall_steps", "surge_steps")]
        numbers = [f"{row[key]:.2f}" for key in ("area", "peak", "final")]
        share = "{:.2f} to {:.2f}".format(*row["collapsed_interval"])
        lines.append("| " + " | ".join([arm, str(row["seeds"]), *numbers, str(row["collapsed"]), share, *steps]) + " |")
    head = ["compared", "seeds", "difference", "interval", "better/same/worse", "p", "corrected p", "collapsed"]
    lines += ["", f"| {' | '.join(head)} | Fisher p |", "|---|---|---|---|---|---|---|---|---|"]
    for row in found["comparisons"]:
        cells = [
            " - ".join(row["arms"]),
            *table_cells(row),
            "{}, {}".format(*row["collapsed"]),
            f"{row['fisher_p']:.2g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if trend := found["trend"]:
        bounds = "none" if trend["interval"] is None else "{:+.3f} to {:+.3f}".format(*trend["interval"])
        lines += ["", f"trend: {trend['difference']:+.3f} for each level ({bounds}), p {trend['p']:.2g}"]
        lines += ["gaps (nats): " + ", ".join(f"{arm} {gap:.2g}" for arm, gap in trend["gaps"].items())]
    return "\n".join(lines)


def comparison_figure(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws a line for each planned pair: the difference of each seed, their mean, and the interval of the shift."""
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(comparisons)), layout="constrained")
    axis = figure.subplots()
    values = [value for row in comparisons for value in (*row["differences"].values(), *(row["interval"] or ()))]
    style_axis(axis, 0, 1)
    axis.set_xlim(min([*values, 0.0]) - 0.03, max([*values, 0.0]) + 0.03)
    axis.axvline(0, color=INK, linewidth=0.8)
    for place, (color, row) in enumerate(zip(itertools.cycle(COLORS), comparisons, strict=False)):
        if row["interval"] is not None:
            axis.plot(row["interval"], [place, place], color=color, linewidth=2)
        differences = list(row["differences"].values())
        axis.plot(differences, [place - 0.18] * len(differences), "o", color=color, alpha=0.45, markersize=5)
        axis.plot(row["difference"], place, "D", color=color, markersize=7)
    axis.set_yticks(range(len(comparisons)), [" - ".join(row["arms"]) for row in comparisons], fontsize=9)
    axis.set_ylim(len(comparisons) - 0.5, -0.5)
    axis.set_xlabel("difference of the mean reward after the surge", fontsize=8.5, color=QUIET)
    title = "Each seed, the mean, and the corrected interval"
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def dose_figure(found: Mapping[str, Any]) -> Figure:
    """Draws the difference to the first arm against the gap in nats: each seed, the mean, and its 95% interval.

    Dotted lines are at the gaps of RL-Kernel's two pairs of runs, whose outcome is another reward.
    """
    trend = found["trend"]
    first, *others = trend["gaps"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    style_axis(axis, 0, 1)
    axis.axhline(0, color=INK, linewidth=0.8)
    for arm in others:
        gap, areas, of_first = trend["gaps"][arm], found["arms"][arm]["areas"], found["arms"][first]["areas"]
        differences = [areas[seed] - of_first[seed] for seed in trend["slopes"]]
        test = paired_test(differences, 1)
        if test["interval"] is not None:
            axis.plot([gap, gap], test["interval"], color=COLORS[0], linewidth=2)
        axis.plot([gap] * len(differences), differences, "o", color=COLORS[0], alpha=0.45, markersize=5)
        axis.plot(gap, test["difference"], "D", color=COLORS[0], markersize=7)
    for gap, said in RL_KERNEL.items():
        axis.axvline(gap, color=QUIET, linestyle=":", linewidth=0.9)
        axis.text(gap, 0.01, f" RL-Kernel: {said}", transform=axis.get_xaxis_transform(), fontsize=8, color=QUIET)
    axis.set_xscale("log")
    axis.set_xlim(min(map(trend["gaps"].get, others)) / 1.5, max(trend["gaps"].values()) * 1.5)
    axis.set_xlabel("mean gap of a token in the first 100 steps (nats)", fontsize=8.5, color=QUIET)
    title = "Accuracy after the surge, less that without a mismatch"
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def power_table(study: Study, runs: Runs, arguments: Arguments) -> dict[str, Any]:
    """Prints and returns the power for each shift and number of seeds."""
    drawn_from = [rows for (arm, _), rows in runs.items() if arm in arguments.power]
    if not drawn_from:
        raise ConfigError(f"{arguments.rows} has no run of the arms {', '.join(arguments.power)}")
    areas = [area(rows, start_of(rows) if study.after is None else study.after, study.outcome) for rows in drawn_from]
    print(f"areas of {len(areas)} runs: {' '.join(f'{value:.2f}' for value in areas)}")
    heads = " | ".join(f"{count} seeds" for count in arguments.seeds)
    print(f"\n| shift | {heads} |\n|{'---|' * (len(arguments.seeds) + 1)}")
    rng, shares = np.random.default_rng(0), {}
    for shift in SHIFTS:
        shares[str(shift)] = [power(areas, count, shift, len(study.comparisons), rng) for count in arguments.seeds]
        print(f"| {shift:.2f} | {' | '.join(f'{share:.2f}' for share in shares[str(shift)])} |")
    return {"areas": areas, "seeds": list(arguments.seeds), "comparisons": len(study.comparisons), "power": shares}


def main(argv: Sequence[str]) -> int:
    """Prints the tables and returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python experiments/study_area.py", description=__doc__ or "")
    with caller_errors():
        study, runs = read_study(arguments.study), read_table(arguments.rows)
    if arguments.power:
        found = power_table(study, runs, arguments)
    else:
        with caller_errors():
            found = tables(study, runs)
        print(markdown(found))
        if arguments.figure is not None:
            drawn = dose_figure(found) if study.trend else comparison_figure(found["comparisons"])
            save_figure(drawn, arguments.figure)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
