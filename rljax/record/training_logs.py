"""Reads training logs, and from them the response lengths of one run in the order of its steps.

A log is a list of rows, one dictionary for each record. JSONL, JSON, CSV and console output need no further package.
Event files of TensorBoard need tensorboardX (``event_files``). An export may have the lengths of several runs. It may
also have a constant column, the width of padded responses, under a name that means the length.
"""

import bisect
import codecs
import contextlib
import csv
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rljax.errors import ConfigError, MissingPackageError, import_for, parse_json
from rljax.mismatch.names import (
    CALL_COUNT,
    LENGTH_COLUMNS,
    METRIC_COLUMNS,
    NOT_TRAINING,
    RUN_COLUMNS,
    STEP_COLUMNS,
    WRAPPERS,
)
from rljax.record.console_logs import console_rows
from rljax.record.foreign_files import foreign_kind

MAX_STEPS = 1_000_000
Rows = list[dict[str, Any]]
Columns = TypeVar("Columns", bound=tuple[Any, ...])

# The words in the name of a column that has the mean length of responses, and words that such a name does not have.
_OF_RESPONSES = {
    *("response", "responses", "completion", "completions", "output", "outputs"),
    *("generation", "generations", "generate", "generated", "gen", "decode", "decoded"),
}
_LENGTHS = {"length", "lengths", "len", "token", "tokens"}
_NOT_MEANS = {"max", "min", "std", "total", "prompt", "throughput", "sec", "second", "time", "timing", *NOT_TRAINING}


def read_log(path: Path, choose: Callable[[list[str]], Columns]) -> tuple[Rows, list[Columns]]:
    """Reads a log: a file, or the log in a directory. Returns the rows, and the chosen columns of each folder.

    In a directory, the first kind of log that has the wanted columns is read: metrics.jsonl, TensorBoard, metrics.jsonl
    in a folder, trainer_state.json, other text files. Several folders are one log if each starts after the first step
    of the folder before it.

    ``choose`` is a function from the columns of a log to the wanted ones. The first of them decides which column
    numbers the steps. It raises ConfigError if a log lacks a wanted column.

    Raises:
      ConfigError: There is no such log, or the logs of several runs.
    """
    if path.is_file() and (foreign := foreign_kind(path)):
        raise ConfigError(f"{path} is {foreign}")
    reason: ConfigError | None = None
    for kind in find_logs(path) if path.is_dir() else iter([[[path]]]):
        logs: list[tuple[Path, Rows, Columns]] = []
        for files in kind:
            try:
                rows = [row for file in files for row in read_rows(file)]
            except MissingPackageError as error:
                reason = reason or error
                continue
            try:
                logs.append((files[0], rows, choose(columns_of(rows))))
            except ConfigError as error:
                reason = reason or (error if rows else ConfigError(f"{files[0]}: the log is empty"))
        if logs:
            starts = [first_step(rows, chosen[0]) for _, rows, chosen in logs]
            same = len({chosen[0] for *_, chosen in logs}) == 1
            if not same or any(later <= earlier for earlier, later in itertools.pairwise(starts)):
                names = ", ".join(str(file) for file, *_ in logs)
                raise ConfigError(f"{path} has the logs of several runs; name them one by one: {names}")
            return [row for _, rows, _ in logs for row in rows], [chosen for *_, chosen in logs]
    if path.is_dir() and (foreign := foreign_kind(path)):
        raise ConfigError(f"{path} is {foreign}") from reason
    raise reason or ConfigError(f"{path}: neither metrics.jsonl nor a TensorBoard event file in it")


def first_step(rows: Rows, column: str) -> float:
    """Returns the lowest step with a value in ``column``, as the log numbers steps; 0 without a step column."""
    name = choose_step_column(rows, column)
    steps = [number_of(row.get(name or "")) for row in rows if column in row]
    return min((step for step in steps if math.isfinite(step)), default=0.0)


def find_logs(directory: Path) -> Iterator[list[list[Path]]]:
    """Yields the logs of each kind in a directory. Each log is a list of files."""

    def files(pattern: str) -> list[Path]:
        return [path for path in sorted(directory.rglob(pattern)) if path.is_file()]

    def start(path: Path) -> tuple[float, str]:
        with contextlib.suppress(MissingPackageError):
            return next((event.wall_time for event in event_files(path).events_of(path)), 0.0), path.name
        return 0.0, path.name

    top = directory / "metrics.jsonl"
    yield [[top]] if top.is_file() else []
    folders: dict[Path, list[Path]] = {}
    for path in sorted(files("*tfevents*"), key=start):
        if NOT_TRAINING.isdisjoint(path.parent.relative_to(directory).parts):
            folders.setdefault(path.parent, []).append(path)
    yield list(folders.values())
    yield [[path] for path in files("metrics.jsonl") if path != top]
    states = sorted(files("trainer_state.json"), key=lambda path: (path.parent == directory, path.stat().st_mtime))
    yield [states[-1:]] if states else []
    texts = [path for path in directory.iterdir() if path.suffix in (".jsonl", ".csv") and path.is_file()]
    yield [[path] for path in sorted(texts) if path != top]


def read_rows(path: Path) -> Rows:
    """Reads one dictionary for each record of a log file, in the order of the file.

    Raises ConfigError if there is no such file, or it cannot be read as a log.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if "tfevents" in path.name:
        return with_response_lengths(list(event_files(path).scalar_rows(path)))
    return with_response_lengths(by_metric(read_text_log(path)))


def by_metric(rows: Rows) -> Rows:
    """Returns the rows of a long table, with a row for each number of each metric, under the names of the metrics.

    TensorBoard and MLflow export such tables. Other rows are returned as they are.
    """
    columns = set(columns_of(rows[:1]))
    name = next((name for name in METRIC_COLUMNS if {name, "value", "step"} <= columns), "")
    if not name:
        return rows
    return [row | {str(row.get(name)): row.get("value")} for row in rows]


def with_response_lengths(rows: Rows) -> Rows:
    """Adds ``response_len/avg`` to the rows of AReaL's log, whose ``seq_len/avg`` includes the prompt.

    The length of the prompt is in the same row, or in a row of the same ``step``.
    """
    for name in [name for name in columns_of(rows) if f"/{name}".endswith("/seq_len/avg")]:
        prefix = name.removesuffix("seq_len/avg")
        prompt = f"{prefix}prompt_len/avg"
        prompts = {row.get("step"): row[prompt] for row in rows if prompt in row}
        for row in rows:
            length = number_of(row.get(name)) - number_of(row.get(prompt, prompts.get(row.get("step"))))
            if math.isfinite(length):
                row[f"{prefix}response_len/avg"] = length
    return rows


def event_files(path: Path) -> ModuleType:
    """Returns the module that reads ``path``, an event file. Raises MissingPackageError if its package is missing."""
    user = f"{path}: an event file of TensorBoard"
    return import_for(user, "rljax.record.event_files", "replay", "tensorboardX")


def read_text_log(path: Path) -> Rows:
    """Reads the rows of a CSV, JSON or JSONL file, or of console output (.log, .txt, .out). Raises ConfigError."""
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return csv_rows(path)
    if kind in (".wandb", ".parquet"):
        raise ConfigError(f"{path}: a {kind} file is not read; export the history as CSV or JSONL")
    try:
        return [flatten(row) for row in json_rows(path)]
    except ConfigError:
        if kind in (".log", ".txt", ".out") and (rows := console_rows(path)):
            return rows
        raise


def csv_rows(path: Path) -> Rows:
    """Reads the rows of a CSV file. Empty cells and cells to the right of its header are left out."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count))
            return [{name.strip(): cell for name, cell in row.items() if name and cell} for row in reader]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text") from error
        except csv.Error as error:
            raise ConfigError(f"{path}: not CSV ({error})") from error


def json_rows(path: Path) -> Rows:
    """Reads the rows of a JSONL file, or of a JSON document that is a table. A last line that is cut is left out."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    with contextlib.suppress(ValueError):
        if (table := table_rows(parse_json(data))) is not None:
            return table
    rows: Rows = []
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            if rows and number == len(lines) and not data.endswith(b"\n"):
                break
            raise ConfigError(f"{path}: line {number} is {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: line {number} is not a JSON object")
        rows.append(row)
    return rows


def table_rows(document: Any) -> Rows | None:
    """Returns the rows of a JSON document; None if it is not a table.

    A table is a list of objects, or an object with such a list (``trainer_state.json`` has ``log_history``). It may
    also be an object with one list or one numbered object for each column, as pandas writes it.
    """
    if isinstance(document, dict):
        for name in ("log_history", "history"):
            if isinstance(document.get(name), list):
                return table_rows(document[name])
        columns = [dict(enumerate(cells)) if isinstance(cells, list) else cells for cells in document.values()]
        if columns and all(isinstance(cells, dict) and all(str(at).isdigit() for at in cells) for cells in columns):
            places = dict.fromkeys(place for cells in columns for place in cells)
            return [{name: cells.get(at) for name, cells in zip(document, columns, strict=True)} for at in places]
    if isinstance(document, list) and all(isinstance(row, dict) for row in document):
        return document
    return None


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row without nesting: nested names are joined by ``/``. Outer values have precedence."""
    cells: dict[str, Any] = {}
    groups = [("", row)]
    for prefix, group in groups:  # the list grows here
        for name, value in group.items():
            if isinstance(value, dict):
                groups.append((prefix if name in WRAPPERS else f"{prefix}{name}/", value))
            else:
                cells.setdefault(prefix + name, value)
    return cells


def columns_of(rows: Rows) -> list[str]:
    """Returns the names of all columns of a log, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def matching(columns: list[str], name: str) -> list[str]:
    """Returns the training columns that end in ``name``: first aggregates over environments, then short names."""

    def fits(column: str) -> bool:
        if not f"/{column.replace('.', '/')}".endswith((f"/{name}", f" - {name}")):
            return False
        parts = column.lower().replace("-", "/").replace(".", "/").replace(" ", "").split("/")
        return NOT_TRAINING.isdisjoint({*parts} - {*name.split("/")})

    return sorted(filter(fits, columns), key=lambda column: ("/agg/" not in column, len(column)))


def choose_columns(columns: list[str], column: str | None, truncated_column: str | None) -> tuple[str, str | None]:
    """Returns the length column, and the column with the share of truncated responses, or None.

    ``column`` and ``truncated_column`` are the names that the user chose, if any. Raises ConfigError if the log has no
    such column, or none of a known name.
    """
    for wanted in (column, truncated_column):
        if wanted is not None and wanted not in columns:
            raise ConfigError(f"no column {wanted!r} in the log; it has: {', '.join(columns)}")
    if column is not None:
        return column, truncated_column
    for length_name, truncated_names in LENGTH_COLUMNS:
        if lengths := matching(columns, length_name):
            prefix = lengths[0].removesuffix(length_name)
            truncated = [prefix + name for name in truncated_names if prefix + name in columns]
            below = (column for name in truncated_names for column in matching(columns, name))
            truncated += [column for column in below if prefix and column.startswith(prefix)]  # prime-rl: by agent
            return lengths[0], truncated_column or next(iter(truncated), None)
    names = ", ".join(columns)
    raise ConfigError(f"no length column of a known name in the log; choose one with --column from: {names}")


def number_of(value: Any) -> float:
    """Returns a value of the log as a float; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def choose_step_column(rows: Rows, column: str) -> str | None:
    """Returns the first known step column that numbers the rows with a length; None if no column does.

    A column counts if it has at least half as many different steps in these rows as the best one.
    """
    used = [row for row in rows if math.isfinite(number_of(row.get(column)))]
    steps = {name: {number_of(row[name]) for row in used if name in row} for name in STEP_COLUMNS}
    counts = {name: sum(map(math.isfinite, found)) for name, found in steps.items()}
    return next((name for name, count in counts.items() if count and 2 * count >= max(counts.values())), None)


def cells_by_step(rows: Rows, columns: Mapping[str, str], step_column: str | None) -> dict[int, dict[str, float]]:
    """Returns the numbers of some columns by step and name, NaN for a cell without a number.

    ``columns`` are the columns to read, by the names that the result has for them. ``step_column`` numbers the steps.
    Without it each row with one of the columns is a step. A later row of the same step overrides the values for which
    it has a number. Rows with none of the columns are left out. A row with another step column alone belongs to the
    last step above it, because slime numbers its rollouts and its updates apart.
    """
    by_step: dict[int, dict[str, float]] = {}
    other_steps = {*STEP_COLUMNS} - {CALL_COUNT}
    last = math.nan
    for row in rows:
        cells = {name: number_of(row[column]) for name, column in columns.items() if column in row}
        step = number_of(row.get(step_column)) if step_column else len(by_step) + 1
        if step_column and step_column not in row and not other_steps.isdisjoint(row):
            step = last
        last = step if math.isfinite(step) else last
        if cells and math.isfinite(step):
            known = by_step.setdefault(int(step), {})
            known.update({name: cell for name, cell in cells.items() if math.isfinite(cell) or name not in known})
    return by_step


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
    """The response lengths in a log."""

    column: str  # the length column
    other_runs: list[str]  # the columns with the lengths of other runs in the same file
    truncated_column: str | None  # the column with the share of truncated responses
    step_column: str | None  # the column that numbers the steps; None: each row with a length is a step
    columns: list[str]  # the names of all columns of the log
    lengths: list[float]  # the length of each step 1, 2, ... (tokens); NaN where a step has none
    truncated: list[float]  # the share of truncated responses of each step; NaN where a step has none


def read_lengths(path: Path, column: str | None = None, truncated_column: str | None = None) -> LengthLog:
    """Reads the response lengths from a log: from a file, or from a directory with a log in it.

    ``column`` has the lengths, and ``truncated_column`` the share of truncated responses. None means a known name.

    Raises:
      ConfigError: The log cannot be read, or it has no length, or its lengths are constant beside others that vary. Or
        two runs have the same step.
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
    runs: dict[Any, Any] = {}
    for row in (row for row in rows if column in row):
        if runs.setdefault(row.get(step_column or ""), row.get(run_column)) != row.get(run_column):
            raise ConfigError(f"column {run_column!r} has several runs with the same step: keep the rows of one run")
    lengths, truncated = series(rows, column, truncated_column, step_column)
    columns, (_, *of_run) = columns_of(rows), column.rpartition(" - ")  # W&B names a chart's columns ``RUN - NAME``
    others = [one for one in columns if of_run[0] and one != column and [*one.rpartition(" - ")[1:]] == of_run]
    return LengthLog(column, others, truncated_column, step_column, columns, lengths, truncated)


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
