"""Reads from a training log the response lengths of one run, in the order of its steps.

An export may have the lengths of several runs. It may also have a constant column, the width of padded responses, under
a name that means the length.
"""

import bisect
import itertools
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rljax.errors import ConfigError
from rljax.mismatch.names import CALL_COUNT, NOT_TRAINING, RUN_COLUMNS
from rljax.record.training_logs import (
    Rows,
    cells_by_step,
    choose_columns,
    choose_step_column,
    columns_of,
    number_of,
    read_log,
)

MAX_STEPS = 1_000_000

# The words in the name of a column that has the mean length of responses, and words that such a name does not have.
_OF_RESPONSES = {
    *("response", "responses", "completion", "completions", "output", "outputs"),
    *("generation", "generations", "generate", "generated", "gen", "decode", "decoded"),
}
_LENGTHS = {"length", "lengths", "len", "token", "tokens"}
_NOT_MEANS = {"max", "min", "std", "total", "prompt", "throughput", "sec", "second", "time", "timing", *NOT_TRAINING}


def series(
    rows: Rows, column: str, truncated_column: str | None, step_column: str | None
) -> tuple[list[float], list[float]]:
    """Returns the lengths and the truncated fractions of steps 1, 2, ...; NaN if a step has none.

    If the log itself has a length at step 0, the first entry belongs to that step. A call of ``wandb.log`` without a
    length, as after an evaluation, is not a step. Raises ConfigError if no step has a positive length, or a step is
    larger than ``MAX_STEPS``.
    """
    names = {name: name for name in (column, truncated_column) if name is not None}
    by_step = {step: cells for step, cells in cells_by_step(rows, names, step_column).items() if column in cells}
    if step_column == CALL_COUNT:
        calls = {number_of(row.get(CALL_COUNT)) for row in rows}
        by_step = {step: cells for step, cells in by_step.items() if math.isfinite(cells[column])}
        others = sorted(call for call in calls if math.isfinite(call) and int(call) not in by_step)
        by_step = {step - bisect.bisect(others, step): cells for step, cells in by_step.items()}
    if not by_step:
        raise ConfigError(f"column {column!r} has no row with a step")
    if max(by_step) > MAX_STEPS:
        raise ConfigError(f"column {step_column!r} has a step of {max(by_step):.3g}, beyond {MAX_STEPS:,}")

    def values(name: str | None) -> list[float]:
        first = 0 if math.isfinite(by_step.get(0, {}).get(column, math.nan)) else 1
        return [by_step.get(step, {}).get(name or "", math.nan) for step in range(first, max(by_step) + 1)]

    lengths, truncated = values(column), values(truncated_column)
    if not any(math.isfinite(length) and length > 0 for length in lengths):
        raise ConfigError(f"column {column!r} has no positive number in any of its {len(lengths)} steps")
    return lengths, truncated


@dataclass(frozen=True)
class LengthLog:
    """The response lengths of one run in a log."""

    column: str  # the length column
    other_runs: list[str]  # the columns with the lengths of other runs in the same file
    truncated_column: str | None  # the column with the share of truncated responses
    step_column: str | None  # the column that numbers the steps; None: each row with a length is a step
    lengths: list[float]  # the length of each step 1, 2, ... (tokens); NaN where a step has none
    truncated: list[float]  # the share of truncated responses of each step; NaN where a step has none


def read_lengths(path: Path, column: str | None = None, truncated_column: str | None = None) -> LengthLog:
    """Reads the response lengths from a log: from a file, or from a directory with a log in it.

    ``column`` has the lengths, and ``truncated_column`` the share of truncated responses. None means a known name.

    Raises:
      ConfigError: The log cannot be read, or has no length. Or its lengths are constant, and another column of lengths
        varies. Or it is a table of several runs with the same steps.
      OSError: A file cannot be opened.
    """
    rows, chosen = read_log(path, lambda columns: choose_columns(columns, column, truncated_column))
    if column is None and (others := varying_lengths(rows, chosen[0][0])):
        said = f"column {chosen[0][0]!r} has one number in most rows, as a padded width has, beside lengths that vary"
        choice = " or --column ".join(map(shlex.quote, [*others, chosen[0][0]]))
        raise ConfigError(f"{said}: choose one with --column {choice}")
    column, truncated_column = chosen[0][0], chosen[-1][1]
    step_column = choose_step_column(rows, column)
    run_column = next((name for name in RUN_COLUMNS if any(name in row for row in rows)), "")
    begins: dict[str, float] = {}
    for row in (row for row in rows if column in row and run_column in row):
        begins.setdefault(str(row[run_column]), number_of(row.get(step_column or "")))
    if any(later <= earlier for earlier, later in itertools.pairwise(begins.values())):
        raise ConfigError(f"column {run_column!r} has several runs with the same steps: keep the rows of one run")
    lengths, truncated = series(rows, column, truncated_column, step_column)
    columns, (_, *of_run) = columns_of(rows), column.rpartition(" - ")  # W&B names a chart's columns ``RUN - NAME``
    others = [one for one in columns if of_run[0] and one != column and [*one.rpartition(" - ")[1:]] == of_run]
    return LengthLog(column, others, truncated_column, step_column, lengths, truncated)


def varying_lengths(rows: Rows, column: str) -> list[str]:
    """Returns the columns that seem to be the length of a response, if ``column`` has one number in most of its rows.

    Only a column with different numbers in most of these rows counts.
    """
    found = Counter(number for row in rows if math.isfinite(number := number_of(row.get(column))))
    number, count = found.most_common(1)[0] if found else (math.nan, 0)
    if count < 2 or 2 * count <= found.total():
        return []
    same = [row for row in rows if number_of(row.get(column)) == number]
    varying = []
    for name in columns_of(same):
        words = set(re.split(r"[^a-z]+", name.lower()))
        is_of_run = name.rpartition(" - ")[0] == column.rpartition(" - ")[0]
        is_length = not _OF_RESPONSES.isdisjoint(words) and not _LENGTHS.isdisjoint(words)
        numbers = {other for row in same if math.isfinite(other := number_of(row.get(name)))}
        if is_of_run and is_length and _NOT_MEANS.isdisjoint(words) and 2 * len(numbers) > count:
            varying.append(name)
    return varying
