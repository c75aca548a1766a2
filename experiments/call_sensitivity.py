"""Replays recorded lengths under several ratios, multipliers and waits, and prints the calls, periods and rates.

    python experiments/call_sensitivity.py

It takes a few seconds and prints the tables of docs/length_curves.md. The lengths are the ones of ``length_curves``:
the curves, and the study's runs with a constant rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import detector_table
import length_curves
import numpy as np
from length_curves import LengthCurve

from rljax.schedule import SurgeConfig
from rljax.schedule.neighbours import Outcome, RateLaw, Rule, replay_rule

RATIOS, MULTIPLIERS, WAITS = (2.0, 2.5, 3.0), (1.5, 1.8, 2.0), (None, 50, 100, 200)
RATE_STEP = 150


def replayed(curve: LengthCurve, config: SurgeConfig, multiplier: float = 1.8) -> Outcome:
    """Returns the outcome of the rules on a curve, with an initial rate of 1."""
    _, lengths, truncated = detector_table.stream_of(curve)
    return replay_rule(Rule("", config), lengths.tolist(), truncated.tolist(), RateLaw(1.0, multiplier))


def rate_at(outcome: Outcome, step: int) -> float:
    """Returns the rate at a step, which may be after the end of the curve."""
    return [rate for change, rate in outcome.changes if change <= step][-1]


def sensitivity(curves: Sequence[LengthCurve]) -> list[str]:
    """Returns the rows of a table, one for each ratio and multiplier.

    A row has the medians over the curves that are called.
    """
    lines = []
    for ratio in RATIOS:
        for multiplier in MULTIPLIERS:
            outcomes = [replayed(curve, SurgeConfig(ratio=ratio), multiplier) for curve in curves]
            called = [one for one in outcomes if one.surge_step is not None]
            step, period = (
                np.median([getattr(one, name) for one in called]) for name in ("surge_step", "decay_period")
            )
            rate = np.median([rate_at(one, RATE_STEP) for one in called])
            cells = [f"{ratio:g}", f"{multiplier:g}", f"{len(called)} of {len(curves)}"]
            lines.append(f"| {' | '.join([*cells, f'{step:.0f}', f'{period:.0f}', f'{rate:.2g}'])} |")
    return lines


def waiting(curves: Sequence[LengthCurve]) -> list[str]:
    """Returns the rows of a table, one for each ``max_wait``.

    A row counts what makes the calls.
    """
    lines = []
    for wait in WAITS:
        outcomes = [replayed(curve, SurgeConfig(max_wait=wait)) for curve in curves]
        surges = sum(one.crossing_step is not None for one in outcomes)
        waited = sum(one.surge_step is not None and one.crossing_step is None for one in outcomes)
        lines.append(f"| {wait or 'off'} | {surges} | {waited} | {len(curves) - surges - waited} |")
    return lines


def main() -> None:
    """Prints the tables."""
    curves = length_curves.load_curves()
    surges = [curve for curve in curves if curve.surge]
    runs = [run for run in length_curves.load_runs() if run.setting["algorithm"] == "constant"]
    for name, members in (("curves with a surge", surges), ("constant runs of the study", runs)):
        print(f"{name}\n")
        print(f"| ratio | multiplier | called | median call | median period | median rate at step {RATE_STEP} |")
        print("|---|---|---|---|---|---|")
        print("\n".join(sensitivity(members)), end="\n\n")
    for name, members in (("all curves", curves), ("constant runs of the study", runs)):
        print(f"{name}\n\n| `max_wait` | called for a surge | called by the wait | never called |\n|---|---|---|---|")
        print("\n".join(waiting(members)), end="\n\n")


if __name__ == "__main__":
    main()
