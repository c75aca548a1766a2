"""Reads the rows of ``metrics.jsonl`` back, takes values from them, summarizes a run, and formats tables."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.errors import parse_json

Row = dict[str, Any]
NONFINITE_KEYS = "nonfinite_keys"
EDGE_STEPS = 10  # the steps at either end of a run whose means are its first and last values


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Reads the rows of a ``metrics.jsonl``. A last line that is incomplete, because the run was killed, is left out.

    Raises FileNotFoundError if there is no such file, and RuntimeError if a line before the last is not a row.
    """
    return [row for row, _ in read_lines(Path(path))]


def read_lines(path: Path) -> list[tuple[Row, bytes]]:
    """Reads each row of a ``metrics.jsonl`` together with the bytes of its line.

    A last line that is no JSON is left out. Raises FileNotFoundError if there is no such file, and RuntimeError if
    another line is not a row.
    """
    lines = path.read_bytes().splitlines()
    rows: list[tuple[Row, bytes]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RuntimeError(f"{path}:{number}: not a row: {error}") from error
        if not isinstance(row, dict) or "step" not in row:
            raise RuntimeError(f"{path}:{number}: expected an object with a step, got {line[:60]!r}")
        if wrong := [key for key, value in row.items() if not _is_value(key, value)]:
            raise RuntimeError(f"{path}:{number}: {wrong[0]} cannot be {row[wrong[0]]!r:.60}")
        rows.append((row, line))
    return rows


def _is_value(key: str, value: Any) -> bool:
    """Returns whether a row may hold the value: the step is a whole number, other values are None or scalars."""
    if key == "step":
        return type(value) is int and 0 <= value < 2**31
    if key == NONFINITE_KEYS:
        return isinstance(value, list)
    return value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63)


def last_value(rows: Sequence[Row], key: str) -> Any:
    """Returns the newest value other than None under a key; None if no row has one."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def is_accuracy(key: str) -> bool:
    """Returns whether a key has the form ``eval/<dataset>/accuracy``."""
    return key.startswith("eval/") and key.endswith("/accuracy")


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Computes the content of summary.json. Steps are 1-based, lengths are in tokens, and None means unknown.

    ``wall_seconds`` adds up ``time/step_s``. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("no rows to summarize")
    rewards, lengths = _series(rows, "reward/mean"), _series(rows, "response_length/mean")
    mismatch, of_tokens = (_series(rows, f"mismatch/{name}") for name in ("log_ppl_abs_diff", "logprob_abs_diff_mean"))
    first, last = _mean_of(rewards[:EDGE_STEPS]), _mean_of(rewards[-EDGE_STEPS:])
    return {
        "steps": rows[-1]["step"],
        "reward_first": first,
        "reward_last": last,
        "reward_gain": None if first is None or last is None else last - first,
        "response_length_first": _mean_of(lengths[:EDGE_STEPS]),
        "response_length_last": _mean_of(lengths[-EDGE_STEPS:]),
        "surge_step": last_value(rows, "schedule/surge_step"),
        "decay_period": last_value(rows, "schedule/decay_period"),
        "learning_rate_final": last_value(rows, "schedule/learning_rate"),
        "evaluations": _evaluations(rows),
        "mismatch_mean": _mean_of(mismatch),
        "mismatch_max": max((value for _, value in mismatch), default=None),
        "mismatch_of_tokens_mean": _mean_of(of_tokens),
        "mismatch_of_tokens_max": max((value for _, value in of_tokens), default=None),
        "skipped_updates": last_value(rows, "optimizer/skipped_updates"),
        "rows_with_nonfinite": sum(NONFINITE_KEYS in row for row in rows),
        "wall_seconds": math.fsum(row.get("time/step_s") or 0.0 for row in rows),
    }


def finite_json(plain: Any, indent: int | None = 1) -> str:
    """Formats plain values as JSON, in one line if ``indent`` is None; numbers that are not finite become null."""
    finite = json.loads(json.dumps(plain), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, allow_nan=False) + "\n"


def run_dumps(run_dir: Path) -> list[Path]:
    """Returns the paths of the token dumps of a run, by rising step."""
    return sorted((run_dir / "rollouts").glob("step_*.parquet"))


def format_summary(summary: Mapping[str, Any]) -> str:
    """Formats the result of ``summarize`` as a table for a terminal."""

    def say(key: str, form: str = "") -> str:
        return cell(summary[key], form)

    def span(key: str, form: str) -> str:
        return f"{say(f'{key}_first', form)} -> {say(f'{key}_last', form)}"

    at_step = "never" if summary["surge_step"] is None else f"at step {summary['surge_step']}"
    lines = {
        "steps": say("steps"),
        "reward": f"{span('reward', '.3f')} (gain {say('reward_gain', '+.3f')})",
        "response length": f"{span('response_length', '.1f')} tokens",
        "surge called": f"{at_step}; decay period {say('decay_period')}",
        "final learning rate": say("learning_rate_final", ".3e"),
    }
    for name, value in summary["evaluations"].items():
        lines[f"accuracy on {name}"] = f"{value['last']:.3f} (best {value['best']:.3f} at step {value['best_step']})"
    for label, key, name in (
        ("mismatch", "mismatch", "log_ppl_abs_diff"),
        ("mean abs", "mismatch_of_tokens", "logprob_abs_diff_mean"),
    ):
        lines[label] = f"mean {say(f'{key}_mean', '.2e')}, max {say(f'{key}_max', '.2e')} ({name})"
    lines |= {
        "skipped updates": say("skipped_updates"),
        "rows with non-finite": say("rows_with_nonfinite"),
        "wall time": _duration(summary["wall_seconds"]),
    }
    table, notes = text_table(list(lines.items())), f"first and last: means over {EDGE_STEPS} steps"
    rule = "-" * max(map(len, [notes, *table.splitlines()]))
    return "\n".join([rule, table, rule, notes])


def _series(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each row in which the key has a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _mean_of(series: Sequence[tuple[int, float]]) -> float | None:
    return math.fsum(value for _, value in series) / len(series) if series else None


def _evaluations(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Returns the last and the best accuracy of each dataset; of equal best accuracies the first step counts."""
    accuracies: dict[str, dict[str, Any]] = {}
    for key in sorted({key for row in rows for key in row if is_accuracy(key)}):
        if series := _series(rows, key):
            best_step, best = max(series, key=lambda item: item[1])
            name = key[len("eval/") : -len("/accuracy")]
            accuracies[name] = {"last": series[-1][1], "best": best, "best_step": best_step}
    return accuracies


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:04.1f} s" if minutes else f"{rest:.1f} s"


def cell(value: Any, form: str = "") -> str:
    """Returns ``format(value, form)``, or - for None."""
    return "-" if value is None else format(value, form)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells, the head first, with each column padded to its widest cell and two spaces between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)
