"""Reads the real curves of the mean response length over training steps and sorts them into kinds.

    python experiments/length_curves.py

It prints the table of docs/length_curves.md. The curves are in benchmarks/length_curves.json; the runs of the project's
own study are read from the Parquet file that the JSON names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CURVES = Path(__file__).parents[1] / "benchmarks" / "length_curves.json"

KINDS = {
    "surge": "grows at least 2.5 times within 50 steps and stays above 1.5 times",
    "slow growth": "ends at least 1.15 times as high, without a surge",
    "flat": "ends between 0.87 and 1.15 times its first level",
    "shrinking": "ends below 0.87 times its first level",
    "rise and fall": "has a peak at least 1.5 times as high as both ends",
    "truncated": "ends at the cap: half of the responses are truncated, or the mean is above 0.9 times the cap",
    "collapse": "ends at or below 0.4 times its first level",
}
"""The kinds with the rule of each. A curve of several kinds has the first in the order of ``kind_by_rule``."""

OBTAINED = {
    "log": "copied from a log",
    "table": "read off a table",
    "text": "read off a sentence",
    "figure": "read off a figure or its description",
    "rows": "the project's own rows",
}
"""The ways in which the numbers were obtained."""

SOURCE_KEYS = ("project", "repository", "path", "commit", "address", "date")
SETTING_KEYS = ("model", "algorithm", "sequences", "max_tokens", "learning_rate")


@dataclass(frozen=True)
class LengthCurve:
    """One training run.

    Attributes:
      name: The name of the curve, unique in the file.
      source: The place of the numbers, with the keys ``SOURCE_KEYS``; an unknown one is None.
      setting: The settings of the run, with the keys ``SETTING_KEYS``; an unknown one is None.
      obtained: A key of ``OBTAINED``.
      kind: A key of ``KINDS``.
      reason: The reason for that kind, a sentence or more.
      surge: The steps at which a surge begins and at which it has grown about three times, or None.
      steps: The training steps, increasing.
      lengths: The mean response length at each step, in tokens.
      truncated: The share of responses at the cap at each step, in [0, 1], NaN where unknown.
    """

    name: str
    source: dict[str, Any]
    setting: dict[str, Any]
    obtained: str
    kind: str
    reason: str
    surge: tuple[int, int] | None
    steps: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray


def load_curves(path: Path = CURVES) -> list[LengthCurve]:
    """Returns the curves of other people's runs, in the order of the file.

    Raises:
      ValueError: The file has another format.
    """
    record = json.loads(path.read_text())
    if record.get("format") != 1:
        raise ValueError(f"{path} must have format 1, got {record.get('format')!r}.")
    return [_curve(entry) for entry in record["curves"]]


def load_runs(path: Path = CURVES) -> list[LengthCurve]:
    """Returns the runs of the project's study, one for each arm and seed, sorted into kinds by rule."""
    import study_rows

    runs = json.loads(path.read_text())["runs"]
    curves = []
    for (arm, seed), rows in study_rows.read_table(path.parent / runs["file"]).items():
        rows = [row for row in rows if row["response_length/mean"]]
        entry: dict[str, Any] = {
            "name": f"study-{arm}-{seed}",
            "source": {"project": "rljax", "path": f"benchmarks/{runs['file']}"},
            "setting": {"model": "1.2M parameters", "algorithm": arm},
            "obtained": "rows",
            "kind": "flat",
            "reason": "By rule.",
            "surge": None,
            "steps": [row["step"] for row in rows],
            "lengths": [row["response_length/mean"] for row in rows],
            "truncated": [row["response_length/truncated_fraction"] for row in rows],
        }
        curve = _curve(entry)
        entry |= {"kind": kind_by_rule(curve), "surge": find_surge(curve)}
        curves.append(_curve(entry))
    return curves


def _curve(entry: dict[str, Any]) -> LengthCurve:
    steps = entry["steps"]
    truncated = entry["truncated"] or [None] * len(steps)
    arrays = {
        "steps": np.asarray(steps, np.int64),
        "lengths": np.asarray(entry["lengths"], np.float64),
        "truncated": np.asarray([math.nan if value is None else value for value in truncated], np.float64),
    }
    source = dict.fromkeys(SOURCE_KEYS) | entry["source"]
    setting = dict.fromkeys(SETTING_KEYS) | entry["setting"]
    surge = None if entry["surge"] is None else (int(entry["surge"][0]), int(entry["surge"][1]))
    return LengthCurve(**{**entry, **arrays, "source": source, "setting": setting, "surge": surge})


def smoothed(curve: LengthCurve) -> np.ndarray:
    """Returns running medians of 5 lengths if every step is known, and otherwise the unchanged lengths."""
    if len(curve.steps) < 20 or np.median(np.diff(curve.steps)) > 2:
        return curve.lengths
    padded = np.pad(curve.lengths, 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)


def find_surge(curve: LengthCurve, growth: float = 2.5, within: int = 50) -> tuple[int, int] | None:
    """Returns the steps between which the length first grows ``growth`` times within ``within`` steps, or None.

    The next two values must stay above 1.5 times the value before the growth.
    """
    levels, steps = smoothed(curve), curve.steps
    for end in range(1, len(steps)):
        near = np.flatnonzero((steps < steps[end]) & (steps >= steps[end] - within))
        held = levels[end : end + 3].min()
        starts = [i for i in near if levels[end] >= growth * levels[i] and held >= 1.5 * levels[i]]
        if starts:
            return int(steps[starts[-1]]), int(steps[end])
    return None


def kind_by_rule(curve: LengthCurve) -> str:
    """Returns the kind by the rules of ``KINDS``. The level of an end is the mean of a quarter of the samples."""
    levels, quarter = smoothed(curve), max(1, len(curve.steps) // 4)
    first, last, peak = levels[:quarter].mean(), levels[-quarter:].mean(), levels.max()
    cut = curve.truncated[-quarter:]
    known = cut[np.isfinite(cut)]
    cap = curve.setting["max_tokens"]
    if (known.size and known.mean() >= 0.5) or (cap and last >= 0.9 * cap):
        return "truncated"
    if peak >= 1.5 * max(first, last):
        return "rise and fall"
    if find_surge(curve):
        return "surge"
    if last <= 0.4 * first:
        return "collapse"
    if last < 0.87 * first:
        return "shrinking"
    return "slow growth" if last >= 1.15 * first else "flat"


def every_step(curve: LengthCurve) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths and the truncated shares at each step from 1 to the last.

    Unknown steps are filled along straight lines. The steps before the first known one have its values. A share that is
    unknown at every step is 0.
    """
    steps = np.arange(1, max(2, curve.steps[-1]) + 1)
    known = np.isfinite(curve.truncated)
    truncated = np.interp(steps, curve.steps[known], curve.truncated[known]) if known.any() else np.zeros(len(steps))
    return np.interp(steps, curve.steps, curve.lengths), truncated


def source_name(curve: LengthCurve) -> str:
    """Returns the place of the numbers in a few words."""
    source = curve.source
    if source["repository"] and source["path"]:
        return f"{source['repository']}/{source['path']}"
    return str(source["repository"] or source["address"] or source["path"])


def independent(curves: Sequence[LengthCurve]) -> int:
    """Returns the number of sources: the curves of one project count once."""
    return len({curve.source["project"] for curve in curves})


def as_markdown(curves: Sequence[LengthCurve]) -> str:
    """Formats the table of docs/length_curves.md."""
    lines = ["| curve | kind | steps | points | tokens, first to last (peak) | responses a step | how | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for curve in curves:
        lengths, steps = curve.lengths, curve.steps
        span = f"{lengths[0]:.0f} to {lengths[-1]:.0f} ({lengths.max():.0f})"
        cells = [curve.name, curve.kind, f"{steps[0]}-{steps[-1]}", str(len(steps)), span]
        cells += [str(curve.setting["sequences"] or "?"), curve.obtained, source_name(curve)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table and the number of curves of each kind."""
    curves, runs = load_curves(), load_runs()
    print(as_markdown(curves))
    print(f"\n{len(curves)} curves of {independent(curves)} sources, and {len(runs)} runs of the study\n")
    for kind in KINDS:
        print(f"{kind}: {sum(c.kind == kind for c in curves)} curves, {sum(c.kind == kind for c in runs)} runs")


if __name__ == "__main__":
    main()
