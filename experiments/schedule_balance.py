"""Counts the studies in which the length-triggered schedule helped, and in which something simpler was as good.

    python experiments/schedule_balance.py

It reads the results in benchmarks/ and prints the tables of docs/should_i_use_it.md. A run ends well if its final
accuracy is above 0.3, as in the studies. Runs are compared in pairs with the same seed. The p values are exact and
two-sided (exact_tests.py). The first treats all pairs of a row as independent. The second uses the mean difference of
each seed, because the runs of a seed are not independent. With three seeds it is at least 0.25.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from exact_tests import fisher_p, sign_flip_p
from study_outcome import ENDS_WELL, LEARNED, trailing_mean
from study_rows import Runs, read_table

from rljax.schedule import SurgeConfig
from rljax.schedule.neighbours import STUDY, RateLaw, Rule, replay_rule

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Study = Mapping[str, Mapping[str, Any]]  # the outcome by arm and seed

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
"""The schedule against the constant rate, with everything else equal."""

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
    paired = [
        (seed, study[arm][seed], study[other][seed])
        for arm, other in comparison.arms
        for seed in sorted(set(study[arm]) & set(study[other]))
    ]
    pairs = [(one, other) for _, one, other in paired]
    differences = [one["final"] - other["final"] for one, other in pairs]
    by_seed: dict[str, list[float]] = {}
    for (seed, *_), difference in zip(paired, differences, strict=True):
        by_seed.setdefault(seed, []).append(difference)
    return {
        "pairs": len(pairs),
        "well": sum(one["final"] > ENDS_WELL for one, _ in pairs),
        "other_well": sum(other["final"] > ENDS_WELL for _, other in pairs),
        "no_call": sum(one["surge_step"] is None for one, _ in pairs),
        "better": sum(difference > 0 for difference in differences),
        "same": sum(difference == 0 for difference in differences),
        "difference": math.fsum(differences) / len(pairs),
        "p": sign_flip_p(differences),
        "seeds": len(by_seed),
        "p_by_seed": sign_flip_p([math.fsum(of_seed) / len(of_seed) for of_seed in by_seed.values()]),
    }


def comparison_table(comparisons: Sequence[Comparison], studies: Mapping[str, Study], names: Sequence[str]) -> str:
    """Formats comparisons as a table in Markdown.

    Args:
      comparisons: The rows.
      studies: The outcomes of the studies.
      names: The heads of the first column and of the two columns that count runs that end well.
    """
    head = [names[0], "pairs", f"{names[1]}: end well", f"{names[2]}: end well", "better / same / worse"]
    lines = [[*head, "mean difference", "p", "p by seed"], ["---"] * 8]
    for comparison in comparisons:
        row = compare(comparison, studies)
        worse = row["pairs"] - row["better"] - row["same"]
        cells = [comparison.label, row["pairs"], row["other_well"], row["well"]]
        signs = f"{row['better']} / {row['same']} / {worse}"
        values = [signs, f"{row['difference']:+.2f}", f"{row['p']:.2g}", f"{row['p_by_seed']:.2g}"]
        lines.append([*map(str, cells), *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def totals(studies: Mapping[str, Study]) -> str:
    """Counts the runs of the six studies: all, those that differ, and what becomes of these."""
    engines = json.loads((BENCHMARKS / ENGINES).read_text())["runs"]
    runs = {name: (run["accuracy_peak"], run["collapse_step"]) for name, run in engines.items()}
    total = len(runs)
    for name, study in studies.items():
        for arm in study.values():
            for seed, run in arm.items():
                total += 1
                what = {key: value for key, value in run.items() if key != "wall_seconds"}
                runs[f"{name} {seed} {what}"] = (run["peak"], run["collapse_step"])
    collapsed = [peak for peak, step in runs.values() if step is not None]
    low = sum(peak < LEARNED for peak, _ in runs.values())
    return (
        f"{total} runs, {len(runs)} of them different: {low} never reach 0.3, "
        f"{len(collapsed)} collapse from 0.3 or more, {sum(peak > 0.5 for peak in collapsed)} from more than 0.5"
    )


def steps_to(accuracy: float, arms: Sequence[str]) -> str:
    """Returns the steps at which runs of the study of 8 bits reach an accuracy, by arm; - if they do not."""
    found: dict[str, list[str]] = {arm: [] for arm in arms}
    for (arm, _), rows in slow_runs().items():
        if arm in found:
            reached = np.flatnonzero(trailing_mean([row["reward/mean"] for row in rows]) >= accuracy)
            found[arm].append(str(reached[0] + 1) if reached.size else "-")
    return f"8 bits, steps to {accuracy}: " + "; ".join(f"{arm} {' '.join(steps)}" for arm, steps in found.items())


def calls_on_constant_runs() -> str:
    """Replays each rule on the eight constant runs of the study of 8 bits; returns the number of calls of each."""
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
    """Returns the counts that no table has, one in each line."""
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
    """Returns both tables."""
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
