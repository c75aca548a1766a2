"""Reads the rows of ``metrics.jsonl`` back, and takes single values from them."""

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
    """Reads the rows of a ``metrics.jsonl``. A last line that is incomplete, because the run was killed, is left out.

    Raises FileNotFoundError without the file, and RuntimeError if another line is not a row.
    """
    return [row for row, _ in read_lines(Path(path))]


def read_lines(path: Path) -> list[tuple[Row, bytes]]:
    """Reads each row together with the bytes of its line."""
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
    """Whether a row may hold the value: a step is a whole number, others are what ``Recorder.write`` takes."""
    if key == "step":
        return type(value) is int and 0 <= value < 2**31
    if key == NONFINITE_KEYS:
        return isinstance(value, list)
    return value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63)


def last_value(rows: Sequence[Row], key: str) -> Any:
    """Returns the last value recorded under the key; None without one."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def is_accuracy(key: str) -> bool:
    """Whether a key is ``eval/<dataset>/accuracy``."""
    return key.startswith("eval/") and key.endswith("/accuracy")


def step_seconds(row: Row) -> float:
    """Returns the seconds of a row's step: ``time/step_s``, or the sum of all ``time/*`` without it."""
    if row.get("time/step_s") is not None:
        return row["time/step_s"]
    return math.fsum(value for key, value in row.items() if key.startswith("time/") and value is not None)


def format_value(form: str, value: Any) -> str:
    """Formats a value; None becomes ``-``."""
    return "-" if value is None else form.format(value)
