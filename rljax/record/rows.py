"""The rows of a run: reading ``metrics.jsonl`` back, and single values from it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.errors import parse_json

Row = dict[str, Any]
NONFINITE_KEYS = "nonfinite_keys"


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a ``metrics.jsonl``; a torn last line, as a killed run leaves it, is left out.

    Raises:
      FileNotFoundError: there is no such file.
      RuntimeError: any other line is not a row.
    """
    return [row for row, _ in read_lines(Path(path))]


def read_lines(path: Path) -> list[tuple[Row, bytes]]:
    """Each row with its line as it stands in the file."""
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
    """Whether a row may have the value: a whole number as step, otherwise what ``Recorder.write`` takes."""
    if key == "step":
        return type(value) is int and 0 <= value < 2**31
    if key == NONFINITE_KEYS:
        return isinstance(value, list)
    return value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63)


def last_value(rows: Sequence[Row], key: str) -> Any:
    """The last value recorded under the key; None without one."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def is_accuracy(key: str) -> bool:
    """Whether a key is ``eval/<dataset>/accuracy``."""
    return key.startswith("eval/") and key.endswith("/accuracy")


def step_seconds(row: Row) -> float:
    """``time/step_s`` of a row, or every ``time/*`` where there is none."""
    if row.get("time/step_s") is not None:
        return row["time/step_s"]
    return math.fsum(value for key, value in row.items() if key.startswith("time/") and value is not None)


def format_value(form: str, value: Any) -> str:
    """The value in the form, or - where there is none."""
    return "-" if value is None else form.format(value)
