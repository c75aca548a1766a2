"""Chooses the rules of ``SurgeConfig`` on one half of the real length curves and scores them on the other half.

    python experiments/choose_rules.py --json benchmarks/chosen_rules.json

It takes two minutes on one core. ``half_of`` names the half of a curve. The cost of a rule is the share of surges that
are not called in time, plus ``FALSE_WEIGHT`` times the share of the other curves that are called. It is summed over the
curves and the runs of the study. Every variation of ``detector_table`` counts alike. The cheapest rule that makes no
mistake on the synthetic families of ``study_surge`` is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import detector_table
import length_curves
import study_surge
from detector_table import Rule, tracked
from length_curves import LengthCurve

from rljax.schedule import SurgeConfig

GRID = {"ratio": (2.0, 2.5, 3.0), "window": (60, 100), "warmup": (10, 20, 40)}
"""The rules that vary. The other rules exclude spikes, dips and limits, and stay the same."""

FALSE_WEIGHT = 4
"""A false call lowers the rate of a healthy run for good; a missed call leaves the rate as it would be without it."""

HALVES = ("first", "second")
SEEDS = 60
"""The number of synthetic curves of each family."""


def half_of(curve: LengthCurve) -> str:
    """Returns "first" or "second", by the hash of the project's name.

    All curves of a project are in one half. A run of the study is assigned by its seed.
    """
    if curve.source["project"] == "rljax":
        return HALVES[int(curve.name.rsplit("-", 1)[1]) % 2]
    return HALVES[hashlib.sha256(curve.source["project"].encode()).digest()[0] % 2]


def score(rule: Rule, curves: Sequence[LengthCurve]) -> dict[str, float]:
    """Returns the share of surges that are not called in time, and of streams without a surge that are called."""
    counts = dict.fromkeys(detector_table.OUTCOMES, 0.0)
    for changes in detector_table.VARIATIONS.values():
        for outcome, number in detector_table.count(curves, rule, changes).items():
            counts[outcome] += number / len(changes)
    surges = sum(counts[name] for name in ("called", "early", "late", "missed"))
    quiet = counts["false"] + counts["quiet"]
    return {"not in time": 1 - counts["called"] / surges, "false": counts["false"] / max(quiet, 1)}


def scores(rule: Rule, sets: dict[str, Sequence[LengthCurve]]) -> dict[str, Any]:
    """Returns the score on each set of curves, and their cost."""
    parts = {name: score(rule, curves) for name, curves in sets.items()}
    return {"cost": sum(part["not in time"] + FALSE_WEIGHT * part["false"] for part in parts.values()), **parts}


def holds_on_synthetic(config: SurgeConfig) -> bool:
    """Whether the rule calls every synthetic surge, none of them 15 steps early, and nothing else."""
    surges = [study_surge.judge_surges(name, family, config, SEEDS) for name, family in study_surge.SURGES.items()]
    quiets = [study_surge.judge_quiets(name, family, config, SEEDS) for name, family in study_surge.QUIETS.items()]
    in_time = all(row["called"] == 1 and not row["earlier_than_15"] for row in surges)
    return in_time and not any(row["false_calls"] for row in quiets)


def study() -> dict[str, Any]:
    """Returns the ranking on the first half, the chosen rule, and the scores of some rules on both halves."""
    every = {"curves": length_curves.load_curves(), "runs": length_curves.load_runs()}
    sets = {half: {n: [c for c in cs if half_of(c) == half] for n, cs in every.items()} for half in HALVES}
    configs = [SurgeConfig(**dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values())]
    ranking = sorted(((scores(tracked(config), sets["first"]), config) for config in configs), key=_by_cost)
    passed = []
    while not any(passed):
        passed.append(holds_on_synthetic(ranking[len(passed)][1]))
    chosen = ranking[len(passed) - 1][1]
    compared: dict[str, Rule] = {
        "chosen": tracked(chosen),
        "former": tracked(detector_table.FORMER),
        "chosen, without capped_ratio": tracked(dataclasses.replace(chosen, capped_ratio=None)),
        "study": detector_table.RULES["study"],
        "toy": detector_table.RULES["toy"],
        "three times": detector_table.RULES["three times"],
    }
    return {
        "sizes": {
            half: {name: [len(cs), sum(c.surge is not None for c in cs)] for name, cs in sets[half].items()}
            for half in HALVES
        },
        "ranking": [
            {**{name: getattr(config, name) for name in GRID}, **result, "synthetic": ok}
            for (result, config), ok in itertools.zip_longest(ranking, passed)
        ],
        "chosen": dataclasses.asdict(chosen),
        "halves": {name: {half: scores(rule, sets[half]) for half in HALVES} for name, rule in compared.items()},
    }


def _by_cost(ranked: tuple[dict[str, Any], SurgeConfig]) -> float:
    return ranked[0]["cost"]


def as_markdown(result: dict[str, Any]) -> str:
    """Formats the first places of the ranking and the table of both halves."""
    lines = [f"| {' | '.join(GRID)} | cost | synthetic families |", f"|{'---|' * (len(GRID) + 2)}"]
    for row in result["ranking"][:8]:
        verdict = {True: "pass", False: "fail", None: "-"}[row["synthetic"]]
        lines.append(f"| {' | '.join(f'{row[name]:g}' for name in GRID)} | {row['cost']:.2f} | {verdict} |")
    lines += [
        "",
        "| rule | first half: curves, runs | cost | second half: curves, runs | cost |",
        "|---|---|---|---|---|",
    ]
    for name, halves in result["halves"].items():
        cells = []
        for half in HALVES:
            parts = [halves[half][part] for part in ("curves", "runs")]
            cells.append(", ".join(f"{part['not in time']:.0%} / {part['false']:.1%}" for part in parts))
            cells.append(f"{halves[half]['cost']:.2f}")
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    result = study()
    print(as_markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
