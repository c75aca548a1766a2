"""What a run came to, from its rows: summary.json and the table on the terminal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.report.rows import NONFINITE_KEYS, Row, format_value, is_accuracy, last_value, step_seconds

EDGE_STEPS = 10  # steps at either end of a run that its first and last means are taken over
WINDOW_STEPS = 5  # trailing steps of the mean length whose tripling is reported


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """What a run came to; None stands for what its rows do not tell. Steps are 1-based, lengths in tokens.

    ``length_tripled_step`` is the first step whose trailing 5-step mean length is at least three times the mean of the
    first 10 steps. ``wall_seconds`` adds up ``time/step_s``, or every ``time/*`` where there is none.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows to summarize")
    rewards, lengths = _series(rows, "reward/mean"), _series(rows, "response_length/mean")
    mismatch = [value for _, value in _series(rows, "mismatch/log_ppl_abs_diff")]
    first, last = _edge_mean(rewards, first=True), _edge_mean(rewards, first=False)
    return {
        "steps": rows[-1]["step"],
        "reward_first": first,
        "reward_last": last,
        "reward_gain": None if first is None or last is None else last - first,
        "response_length_first": _edge_mean(lengths, first=True),
        "response_length_last": _edge_mean(lengths, first=False),
        "length_tripled_step": _tripled_step(lengths),
        "surge_step": last_value(rows, "schedule/surge_step"),
        "decay_period": last_value(rows, "schedule/decay_period"),
        "learning_rate_final": last_value(rows, "schedule/learning_rate"),
        "evaluations": _evaluations(rows),
        "mismatch_mean": _mean(mismatch),
        "mismatch_max": max(mismatch, default=None),
        "skipped_updates": last_value(rows, "optimizer/skipped_updates"),
        "rows_with_nonfinite": sum(NONFINITE_KEYS in row for row in rows),
        "wall_seconds": sum(map(step_seconds, rows)),
    }


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Writes ``summary.json`` in one rename and returns its path."""
    path = Path(run_dir) / "summary.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as a table for a terminal."""

    def say(key: str, form: str = "{}") -> str:
        return format_value(form, summary[key])

    gain = f"(gain {say('reward_gain', '{:+.3f}')})"
    lines = [
        ("steps", say("steps")),
        ("reward", f"{say('reward_first', '{:.3f}')} -> {say('reward_last', '{:.3f}')} {gain}"),
        (
            "response length",
            f"{say('response_length_first', '{:.1f}')} -> {say('response_length_last', '{:.1f}')} tokens",
        ),
        ("length tripled", _at_step(summary["length_tripled_step"])),
        ("surge called", f"{_at_step(summary['surge_step'])}; decay period {say('decay_period')}"),
        ("final learning rate", say("learning_rate_final", "{:.3e}")),
    ]
    for name, value in summary["evaluations"].items():
        last, best = format_value("{:.3f}", value["last"]), format_value("{:.3f}", value["best"])
        lines.append((f"accuracy on {name}", f"{last} (best {best} at step {value['best_step']})"))
    lines += [
        ("mismatch", f"mean {say('mismatch_mean', '{:.2e}')}, max {say('mismatch_max', '{:.2e}')} (log_ppl_abs_diff)"),
        ("skipped updates", say("skipped_updates")),
        ("rows with non-finite", say("rows_with_nonfinite")),
        ("wall time", _duration(summary["wall_seconds"])),
    ]
    width = max(len(label) for label, _ in lines)
    notes = f"first and last: means over {EDGE_STEPS} steps"
    rule = "-" * max(len(notes), *(width + 2 + len(text) for _, text in lines))
    return "\n".join([rule, *(f"{label:<{width}}  {text}" for label, text in lines), rule, notes])


def _at_step(step: int | None) -> str:
    return "never" if step is None else f"at step {step}"


def _series(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """(step, value) wherever the key has a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _edge_mean(series: Sequence[tuple[int, float]], *, first: bool) -> float | None:
    edge = series[:EDGE_STEPS] if first else series[-EDGE_STEPS:]
    return _mean([value for _, value in edge])


def _tripled_step(lengths: Sequence[tuple[int, float]]) -> int | None:
    start = _edge_mean(lengths, first=True)
    if start is None or len(lengths) < EDGE_STEPS:
        return None
    for end in range(EDGE_STEPS, len(lengths) + 1):
        window = lengths[end - WINDOW_STEPS : end]
        if math.fsum(value for _, value in window) / WINDOW_STEPS >= 3 * start:
            return window[-1][0]
    return None


def _evaluations(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Dataset -> last and best accuracy; of equal bests the first step counts."""
    keys = sorted({key for row in rows for key in row if is_accuracy(key)})
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        series = _series(rows, key)
        if series:
            best_step, best = max(series, key=lambda item: item[1])
            found[key[len("eval/") : -len("/accuracy")]] = {
                "last": series[-1][1],
                "best": best,
                "best_step": best_step,
            }
    return found


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:04.1f} s" if minutes else f"{rest:.1f} s"
