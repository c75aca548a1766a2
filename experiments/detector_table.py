"""Scores rules that call a surge on real curves of the mean response length and on variations of them.

    python experiments/detector_table.py --json benchmarks/detector_table.json

It takes half a minute on one core. The curves come from ``length_curves``. Every rule sees one value a step, with
straight lines between the known steps. A curve with a surge counts as called if the call is between its beginning and
50 steps after its end. Any call on another curve is false.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import length_curves
import numpy as np
from length_curves import LengthCurve

from rljax.schedule import SurgeConfig, neighbours
from rljax.schedule.neighbours import STUDY

FORMER = SurgeConfig(ratio=3.0, window=100, warmup=40, capped_ratio=None)
"""The defaults before others were chosen on these curves."""

TOY = dataclasses.replace(STUDY, baseline_quantile=0.2)
"""The rules of configs/study/toy.yaml."""

LATE_STEPS, SEEDS, SPREAD = 50, 3, 0.7
"""A later call is late. The noise has this many seeds; ``SPREAD`` is the deviation of one length over the mean."""

OUTCOMES = ("called", "early", "late", "missed", "false", "quiet")
"""The outcomes of a rule: the first four are for a curve with a surge, the last two for a curve without one."""

Stream = tuple[np.ndarray, np.ndarray, np.ndarray]  # the step, the length and the truncated share of each observation
Rule = Callable[[Stream], int | None]  # returns the step of the call


def tracked(config: SurgeConfig | None) -> Rule:
    """Returns the rule of a ``SurgeTracker``; for None, the rule of a ``FirstLengthsTracker``."""

    def call(stream: Stream) -> int | None:
        tracker = neighbours.Rule("", config).tracker()
        for step, length, truncated in zip(*stream, strict=True):
            if tracker.update(float(length), float(truncated)):
                return int(step)
        return None

    return call


RULES: dict[str, Rule] = {
    "shipped": tracked(SurgeConfig()),
    "former": tracked(FORMER),
    "study": tracked(STUDY),
    "toy": tracked(TOY),
    "three times": tracked(None),
    "ratio 2": tracked(SurgeConfig(ratio=2.0)),
    "ratio 3": tracked(SurgeConfig(ratio=3.0)),
    "warm-up 40": tracked(SurgeConfig(warmup=40)),
    "persistence 10": tracked(SurgeConfig(persistence=10)),
}
"""The rules by name; each of the last four is the shipped rules with one other value."""


def stream_of(curve: LengthCurve) -> Stream:
    """Returns the curve with one observation a step."""
    lengths, truncated = length_curves.every_step(curve)
    return np.arange(1, len(lengths) + 1), lengths, truncated


def thinned(stream: Stream, every: int) -> Stream:
    """Keeps every n-th observation, like a log with fewer lines."""
    steps, lengths, truncated = stream
    return steps[::every], lengths[::every], truncated[::every]


def averaged(stream: Stream, steps: int = 10) -> Stream:
    """Replaces each length by the mean of the newest ``steps`` lengths, as dashboards do."""
    total = np.cumsum(np.concatenate([np.zeros(1), stream[1]]))
    ends = np.arange(1, len(stream[1]) + 1)
    begins = np.maximum(0, ends - steps)
    return stream[0], (total[ends] - total[begins]) / (ends - begins), stream[2]


def noisy(stream: Stream, sequences: int, seed: int) -> Stream:
    """Adds the noise of a mean over ``sequences`` responses whose lengths deviate by ``SPREAD`` of their mean."""
    rng = np.random.default_rng([seed, sequences])
    shape = sequences / SPREAD**2
    return stream[0], stream[1] * rng.gamma(shape, 1 / shape, len(stream[1])), stream[2]


def restarted(stream: Stream) -> Stream:
    """Drops the first half, as a run that is resumed without the tracker's state does."""
    half = len(stream[0]) // 2
    return stream[0][half:], stream[1][half:], stream[2][half:]


def uncut(stream: Stream) -> Stream:
    """Sets the truncated share to zero, as a log without it does."""
    return stream[0], stream[1], np.zeros_like(stream[2])


VARIATIONS: dict[str, list[Callable[[Stream], Stream]]] = {
    "as it is": [lambda stream: stream],
    "every 2nd step": [lambda stream: thinned(stream, 2)],
    "every 5th step": [lambda stream: thinned(stream, 5)],
    "mean of 10 steps": [averaged],
    **{
        f"noise of {n} responses": [functools.partial(noisy, sequences=n, seed=seed) for seed in range(SEEDS)]
        for n in (8, 64, 1024)
    },
    "restart in the middle": [restarted],
    "truncation unknown": [uncut],
}
"""The variations by name; a variation with noise has one entry for each seed."""


def outcome(curve: LengthCurve, call: int | None, first: int = 1) -> str:
    """Returns one of ``OUTCOMES`` for a call at a step; a surge that began before ``first`` does not count."""
    if curve.surge is None or curve.surge[0] < first:
        return "quiet" if call is None else "false"
    begin, end = curve.surge
    if call is None:
        return "missed"
    return "early" if call < begin else "called" if call <= end + LATE_STEPS else "late"


def count(curves: Sequence[LengthCurve], rule: Rule, changes: Sequence[Callable[[Stream], Stream]]) -> dict[str, int]:
    """Counts the outcomes of a rule over curves and changes of them."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for curve in curves:
        for change in changes:
            stream = change(stream_of(curve))
            counts[outcome(curve, rule(stream), int(stream[0][0]))] += 1
    return counts


def study(curves: Sequence[LengthCurve], runs: Sequence[LengthCurve]) -> dict[str, object]:
    """Returns the outcomes of every rule: by variation, by kind, by run, and the step of each call."""
    sets = {"curves": curves, "runs": runs}
    kinds = {kind: [curve for curve in curves if curve.kind == kind] for kind in length_curves.KINDS}
    whole = VARIATIONS["as it is"]
    return {
        "late_steps": LATE_STEPS,
        "seeds": SEEDS,
        "spread": SPREAD,
        "sizes": {name: len(members) for name, members in sets.items()},
        "by_variation": {
            name: {
                variation: {rule: count(members, call, changes) for rule, call in RULES.items()}
                for variation, changes in VARIATIONS.items()
            }
            for name, members in sets.items()
        },
        "by_kind": {
            kind: {rule: count(members, call, whole) for rule, call in RULES.items()} for kind, members in kinds.items()
        },
        "calls": {
            curve.name: {
                "kind": curve.kind,
                "surge": curve.surge,
                "steps": int(curve.steps[-1]),
                **{rule: call(stream_of(curve)) for rule, call in RULES.items()},
            }
            for curve in [*curves, *(run for run in runs if run.setting["algorithm"] == "constant")]
        },
    }


def as_markdown(result: dict) -> str:
    """Formats the outcomes of each set and variation; a cell has called/early or late/missed/false."""
    blocks = []
    for name, variations in result["by_variation"].items():
        lines = [f"{name} ({result['sizes'][name]})", "", f"| | {' | '.join(RULES)} |", "|---|" + "---|" * len(RULES)]
        for variation, rules in variations.items():
            cells = [f"{n['called']}/{n['early'] + n['late']}/{n['missed']}/{n['false']}" for n in rules.values()]
            lines.append(f"| {variation} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main() -> None:
    """Prints the tables, and writes the numbers if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    result = study(length_curves.load_curves(), length_curves.load_runs())
    print(as_markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
