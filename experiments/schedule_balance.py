"""Counts in the project's studies where the length-triggered schedule helped, and where something simpler did as well.

    python experiments/schedule_balance.py

It reads the results in benchmarks/ and prints the tables of docs/should_i_use_it.md. A run ends well if its final
accuracy is above 0.3, as in the studies. Runs are compared in pairs with the same seed. The p value of a row is exact
and two-sided. Under the null hypothesis the difference of each pair has either sign with the same probability. The
value is the share of all patterns of signs whose mean is at least as far from 0. With three pairs it is at least 0.25.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from study_claims import ENDS_WELL
from study_rows import Runs, read_table

from rljax.record.rows import trailing_mean
from rljax.schedule import SurgeConfig
from rljax.schedule.neighbours import STUDY, RateLaw, Rule, replay_rule

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Study = Mapping[str, Mapping[str, Any]]  # arm -> seed -> outcome

FILES = {
    "toy": ("study_toy.json", "arms"),
    "slow": ("study_slow.json", "runs"),
    "staleness": ("study_staleness.json", "arms"),
    "ahead": ("study_ahead.json", "arms"),
    "ahead_6e-4": ("study_ahead_6e-4.json", "arms"),
}
"""The file of each study, and the key of its outcomes; a sixth study, of engines, has no schedule."""
ENGINES = "mismatch_growth.json"

CORRECTED = ("token_tis", "token_mis", "sequence_tis", "sequence_mis", "fp16")


class Comparison(NamedTuple):
    """One row: pairs of arms in one study, each with its counterpart."""

    label: str
    study: str
    arms: tuple[tuple[str, str], ...]  # (arm, counterpart)


def triggered(*arms: str) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of an arm with the schedule and the same arm at a constant rate."""
    return tuple((f"{arm}_triggered", arm) for arm in arms)


AGAINST_CONSTANT = (
    Comparison("random noise in the engine's weights", "toy", (("length_triggered", "constant"),)),
    Comparison("the same, with a correction or float16", "toy", triggered(*CORRECTED)),
    Comparison("an engine of 8 bits", "slow", (("triggered_1.8", "constant"),)),
    Comparison("the same, with a correction or float16", "slow", triggered(*CORRECTED)),
    Comparison("an engine of 16 bits", "slow", triggered("sixteen_bits")),
    Comparison("the trainer's own numbers, newest weights", "staleness", triggered("stale_0")),
    Comparison("rollouts 1, 2 and 4 versions old", "staleness", triggered("ahead_1", "stale_2", "stale_4")),
    Comparison("vLLM, newest weights, half the rate", "ahead", triggered("ahead_0")),
    Comparison("vLLM, 1, 2 and 4 versions old, half the rate", "ahead", triggered("ahead_1", "ahead_2", "ahead_4")),
    Comparison("vLLM, 0 to 4 versions old", "ahead_6e-4", triggered("ahead_0", "ahead_1", "ahead_2", "ahead_4")),
)
"""The schedule against the constant rate, all else the same."""

AGAINST_TRIGGERED = (
    Comparison("a tenth of the rate, constant; 8 bits", "slow", (("constant_tenth", "triggered_1.8"),)),
    Comparison("a tenth of the rate, constant; noise", "toy", (("constant_tenth", "length_triggered"),)),
    Comparison("linear to the floor within the run; 8 bits", "slow", (("linear", "triggered_1.8"),)),
    Comparison("linear within a quarter of it; 8 bits", "slow", (("linear_short", "triggered_1.8"),)),
    Comparison("linear within four times it; 8 bits", "slow", (("linear_long", "triggered_1.8"),)),
    Comparison("cosine within the run; 8 bits", "slow", (("cosine", "triggered_1.8"),)),
    Comparison("cosine within a quarter of it; 8 bits", "slow", (("cosine_short", "triggered_1.8"),)),
    Comparison("cosine within four times it; 8 bits", "slow", (("cosine_long", "triggered_1.8"),)),
    Comparison("cosine within the run; noise", "toy", (("cosine", "length_triggered"),)),
    Comparison("triggered by the mismatch, at step 11 to 14; 8 bits", "slow", (("by_mismatch", "triggered_1.8"),)),
    Comparison("triggered by the gradient norm; 8 bits", "slow", (("by_grad_norm", "triggered_1.8"),)),
)
"""Other schedules against the length-triggered one."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Returns the exact two-sided p value of paired differences; pairs without a difference do not count."""
    moved = [difference for difference in differences if difference != 0]
    least = abs(math.fsum(moved)) * (1 - 1e-12)
    patterns = itertools.product((1, -1), repeat=len(moved))
    far = sum(abs(math.fsum(map(math.prod, zip(signs, moved, strict=True)))) >= least for signs in patterns)
    return far / 2 ** len(moved)


def fisher_p(well: int, runs: int, other_well: int, other_runs: int) -> float:
    """Returns the exact two-sided p value of two shares: tables that are no more probable than the observed one."""
    both, total = well + other_well, runs + other_runs

    def ways(first: int) -> int:
        return math.comb(runs, first) * math.comb(other_runs, both - first)

    tables = [ways(first) for first in range(max(0, both - other_runs), min(runs, both) + 1)]
    return sum(count for count in tables if count <= ways(well)) / math.comb(total, both)


def read_studies() -> dict[str, Study]:
    """Reads the outcomes of the five studies with a schedule."""
    return {name: json.loads((BENCHMARKS / file).read_text())[key] for name, (file, key) in FILES.items()}


@functools.cache
def slow_runs() -> Runs:
    """Reads the rows of the study of 8 bits."""
    return read_table(BENCHMARKS / "study_slow.parquet")


def compare(comparison: Comparison, studies: Mapping[str, Study]) -> dict[str, Any]:
    """Computes one row of a table."""
    study = studies[comparison.study]
    pairs = [
        (study[arm][seed], study[other][seed])
        for arm, other in comparison.arms
        for seed in sorted(set(study[arm]) & set(study[other]))
    ]
    differences = [one["final"] - other["final"] for one, other in pairs]
    return {
        "pairs": len(pairs),
        "well": sum(one["final"] > ENDS_WELL for one, _ in pairs),
        "other_well": sum(other["final"] > ENDS_WELL for _, other in pairs),
        "no_call": sum(one["surge_step"] is None for one, _ in pairs),
        "better": sum(difference > 0 for difference in differences),
        "same": sum(difference == 0 for difference in differences),
        "difference": math.fsum(differences) / len(pairs),
        "p": sign_flip_p(differences),
    }


def comparison_table(comparisons: Sequence[Comparison], studies: Mapping[str, Study], names: Sequence[str]) -> str:
    """Formats comparisons as a table in Markdown.

    Args:
      comparisons: The rows.
      studies: The outcomes of the studies.
      names: The heads of the first column and of the two columns that count runs that end well.
    """
    head = [names[0], "pairs", f"{names[1]}: end well", f"{names[2]}: end well", "better / same / worse"]
    lines = [[*head, "mean difference", "p"], ["---"] * 7]
    for comparison in comparisons:
        row = compare(comparison, studies)
        worse = row["pairs"] - row["better"] - row["same"]
        cells = [comparison.label, row["pairs"], row["other_well"], row["well"]]
        signs = f"{row['better']} / {row['same']} / {worse}"
        lines.append([*map(str, cells), signs, f"{row['difference']:+.2f}", f"{row['p']:.2g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def totals(studies: Mapping[str, Study]) -> str:
    """Counts all runs of the six studies, and those that collapse from an accuracy worth the name."""
    engines = json.loads((BENCHMARKS / ENGINES).read_text())["runs"].values()
    runs = [(run["accuracy_peak"], run["collapse_step"]) for run in engines]
    for study in studies.values():
        runs += [(run["peak"], run["collapse_step"]) for arm in study.values() for run in arm.values()]
    fallen = [peak for peak, step in runs if step is not None]
    high = [sum(peak > least for peak in fallen) for least in (ENDS_WELL, 0.5)]
    return f"{len(runs)} runs; {len(fallen)} collapse, {high[0]} from a peak above 0.3, {high[1]} from one above 0.5"


def steps_to(accuracy: float, arms: Sequence[str]) -> str:
    """Returns the steps at which runs of the study of 8 bits reach an accuracy, by arm; - where they do not."""
    found: dict[str, list[str]] = {arm: [] for arm in arms}
    for (arm, _), rows in slow_runs().items():
        if arm in found:
            reached = np.flatnonzero(trailing_mean([row["reward/mean"] for row in rows]) >= accuracy)
            found[arm].append(str(reached[0] + 1) if reached.size else "-")
    return f"8 bits, steps to {accuracy}: " + "; ".join(f"{arm} {' '.join(steps)}" for arm, steps in found.items())


def calls_on_constant_runs() -> str:
    """Replays each rule on the eight constant runs of the study of 8 bits; says how many it calls."""
    rules = [
        Rule("shipped", SurgeConfig()),
        Rule("warm-up 40 and ratio 3", SurgeConfig(warmup=40, ratio=3.0)),
        Rule("study", STUDY),
        Rule("study with ratio 3", dataclasses.replace(STUDY, ratio=3.0)),
        Rule("three times", None),
    ]
    runs = [rows for (arm, _), rows in slow_runs().items() if arm == "constant"]
    called = {}
    for rule in rules:
        calls = 0
        for rows in runs:
            lengths, truncated = (
                [math.nan if row[key] is None else row[key] for row in rows]
                for key in ("response_length/mean", "response_length/truncated_fraction")
            )
            calls += replay_rule(rule, lengths, truncated, RateLaw()).surge_step is not None
        called[rule.name] = calls
    return f"calls on {len(runs)} constant runs: " + ", ".join(f"{name} {calls}" for name, calls in called.items())


def counts(studies: Mapping[str, Study]) -> str:
    """Returns the counts that no table has, a line each."""
    slow = compare(AGAINST_CONSTANT[2], studies)
    fisher = fisher_p(slow["well"], slow["pairs"], slow["other_well"], slow["pairs"])
    tenth = compare(Comparison("", "slow", (("constant_tenth", "constant"),)), studies)
    lines = [
        totals(studies),
        f"8 bits, end well: {slow['well']} against {slow['other_well']} of {slow['pairs']}, Fisher p {fisher:.2g}",
        f"8 bits, a tenth of the rate against the rate: {tenth['difference']:+.2f}, p {tenth['p']:.2g}",
        steps_to(0.8, ("triggered_1.8", "constant_tenth")),
        steps_to(0.8, ("linear", "linear_short", "by_mismatch")),
        calls_on_constant_runs(),
    ]
    return "\n".join(lines)


def tables(studies: Mapping[str, Study]) -> list[str]:
    """Returns the two tables."""
    return [
        comparison_table(AGAINST_CONSTANT, studies, ("mismatch from", "constant rate", "schedule")),
        comparison_table(AGAINST_TRIGGERED, studies, ("instead of the schedule", "schedule", "instead")),
    ]


def main() -> None:
    """Prints the counts and the tables."""
    studies = read_studies()
    print("\n\n".join([counts(studies), *tables(studies)]))


if __name__ == "__main__":
    main()
