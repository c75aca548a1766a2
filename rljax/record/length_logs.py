"""Reads the response lengths of one run from one column of a training log.

An export may have the lengths of several runs. A log may also have a constant column, the width of padded responses,
under a name of the length.
"""

import functools
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rljax.errors import ConfigError
from rljax.mismatch.names import NOT_TRAINING
from rljax.record.training_logs import (
    Rows,
    choose_columns,
    choose_step_column,
    columns_of,
    number_of,
    read_log,
    series,
)

# The words in the name of a column that has the mean length of responses, and words that such a name does not have.
_OF_RESPONSES = {
    *("response", "responses", "completion", "completions", "output", "outputs"),
    *("generation", "generations", "generate", "generated", "gen", "decode", "decoded"),
}
_LENGTHS = {"length", "lengths", "len", "token", "tokens"}
_NOT_MEANS = {"max", "min", "std", "total", "prompt", "throughput", "sec", "second", "time", "timing", *NOT_TRAINING}


@dataclass(frozen=True)
class LengthLog:
    """The response lengths in a log."""

    column: str  # the length column
    other_runs: list[str]  # the columns with the lengths of other runs in the same file
    truncated_column: str | None  # the column with the share of truncated responses
    step_column: str | None  # the column that numbers the steps; None: each row with a length is a step
    columns: list[str]  # the names of all columns of the log
    lengths: list[float]  # the length of each step 1, 2, ... (tokens); NaN where a step has none
    truncated: list[float]  # the share of truncated responses of each step; NaN where a step has none


def read_lengths(path: Path, column: str | None = None, truncated_column: str | None = None) -> LengthLog:
    """Reads the response lengths of a log, a file or a directory that contains it, with the names of their columns.

    ``column`` has the lengths, and ``truncated_column`` the share of truncated responses. None means a known name.

    Raises:
      ConfigError: The log cannot be read, or it has no length, or its lengths are constant beside others that vary.
      OSError: A file cannot be opened.
    """
    choose = functools.partial(choose_columns, column=column, truncated_column=truncated_column)
    rows, chosen = read_log(path, choose)
    if column is None and (others := varying_lengths(rows, chosen[0][0])):
        raise ConfigError(
            f"column {chosen[0][0]!r} has one number in most rows, as a padded width has, beside lengths that vary: "
            f"choose one with --column {' or --column '.join(map(shlex.quote, [*others, chosen[0][0]]))}"
        )
    column, truncated_column = chosen[0][0], chosen[-1][1]
    step_column = choose_step_column(rows, column)
    lengths, truncated = series(rows, column, truncated_column, step_column)
    columns = columns_of(rows)
    return LengthLog(column, runs_beside(columns, column), truncated_column, step_column, columns, lengths, truncated)


def runs_beside(columns: list[str], column: str) -> list[str]:
    """Returns the columns of the same name of other runs: W&B's export of a chart names them ``RUN - NAME``."""
    _, dash, name = column.rpartition(" - ")
    return [other for other in columns if dash and other != column and other.rpartition(" - ")[1:] == (dash, name)]


def varying_lengths(rows: Rows, column: str) -> list[str]:
    """Returns the columns that seem to be the length of a response, if ``column`` has one number in most of its rows.

    Only a column counts that has different numbers in most of those rows.
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
