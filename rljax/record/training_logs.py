"""Reads training logs, and the numbers of some of their columns by step.

A log is a list of rows, one dictionary for each record. JSONL, JSON, CSV and console output need no further package.
Event files of TensorBoard need tensorboardX (``event_files``). Files of other projects that hold neither a log nor
tokens are recognised, so that a message can name them.
"""

import codecs
import contextlib
import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rljax.errors import ConfigError, MissingPackageError, import_for, parse_json
from rljax.mismatch.names import CALL_COUNT, LENGTH_COLUMNS, METRIC_COLUMNS, NOT_TRAINING, STEP_COLUMNS, WRAPPERS
from rljax.record.console_logs import console_rows
from rljax.record.rows import NONFINITE_KEYS

Rows = list[dict[str, Any]]
Columns = TypeVar("Columns", bound=tuple[Any, ...])

_MOST_BYTES = 2**20
_ROW_OF_HISTORY = {"_step", "_runtime", "_timestamp"}
_TEXTS = (
    "a log of texts and scores without token ids and log-probabilities. Text does not give the tokens back: "
    "rljax docs compare has the lines that write them inside its process"
)
SUMMARY = (
    "a summary of W&B: it has only the last value of each metric and is no log. Export the run's history instead, as "
    "CSV or JSONL"
)
TRL_TEXTS = f"the completions of TRL, {_TEXTS}"
VERL_TEXTS = f"the rollout data of verl, {_TEXTS}"


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
    """Yields a list of logs for each kind of log in a directory, the best kind first. Each log is a list of files."""

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
    rows = list(event_files(path).scalar_rows(path)) if "tfevents" in path.name else by_metric(read_text_log(path))
    return with_response_lengths(rows)


def by_metric(rows: Rows) -> Rows:
    """Adds to each row of a long table, which has one number a row, that number under the name of its metric.

    TensorBoard and MLflow export such tables. Rows of other logs are returned as they are.
    """
    columns = set(columns_of(rows[:1]))
    name = next((name for name in METRIC_COLUMNS if {name, "value", "step"} <= columns), "")
    if not name:
        return rows
    return [row | {str(row.get(name)): row.get("value")} for row in rows]


def with_response_lengths(rows: Rows) -> Rows:
    """Adds ``response_len/avg`` to the rows of AReaL's log, whose ``seq_len/avg`` includes the prompt.

    The length of the prompt is in the same row, or in a row of the same ``step``. If one is missing, none is added.
    """
    for name in [name for name in columns_of(rows) if f"/{name}".endswith("/seq_len/avg")]:
        prefix = name.removesuffix("seq_len/avg")
        prompt = f"{prefix}prompt_len/avg"
        prompts = {row["step"]: row[prompt] for row in rows if prompt in row and "step" in row}
        of = [row for row in rows if math.isfinite(number_of(row.get(name)))]
        lengths = [number_of(row[name]) - number_of(row.get(prompt, prompts.get(row.get("step")))) for row in of]
        if all(map(math.isfinite, lengths)):
            for row, length in zip(of, lengths, strict=True):
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
    """Returns the row without nesting: nested names are joined by ``/``. Outer values have precedence.

    A null becomes NaN where it stands for a number that is not finite: in verl's file, and where rljax's row lists it.
    """
    cells: dict[str, Any] = {}
    groups = [("", row)]
    lost = row["data"] if row.keys() == {"step", "data"} else row.get(NONFINITE_KEYS)
    for prefix, group in groups:  # the list grows here
        for name, value in group.items():
            if isinstance(value, dict):
                groups.append((prefix if name in WRAPPERS else f"{prefix}{name}/", value))
            else:
                is_lost = value is None and isinstance(lost, (dict, list)) and name in lost
                cells.setdefault(prefix + name, math.nan if is_lost else value)
    return cells


def columns_of(rows: Rows) -> list[str]:
    """Returns the names of all columns of a log, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def matching(columns: list[str], name: str) -> list[str]:
    """Returns the training columns that end in ``name``: first aggregates over environments, then short names."""

    def fits(column: str) -> bool:
        own = re.sub("@(sum|mean)$", "", column).replace(".", "/")  # ROLL's names end in the way to add them up
        if not f"/{own}".endswith((f"/{name}", f" - {name}")):
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
            below = [column for name in truncated_names for column in matching(columns, name)]
            of_agents = [column for column in below if prefix and column.startswith(prefix)]  # prime-rl
            truncated += of_agents if len(of_agents) == 1 else []
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
    it has a number. Rows with none of the columns are left out. In a row with another step column alone, columns that
    no other row has belong to the last step above it, because slime numbers its rollouts and its updates apart.
    """
    by_step: dict[int, dict[str, float]] = {}
    other_steps = {*STEP_COLUMNS} - {CALL_COUNT}
    of_steps = {name for name in columns.values() if any(name in row and step_column in row for row in rows)}
    last = math.nan
    for row in rows:
        cells = {name: number_of(row[column]) for name, column in columns.items() if column in row}
        step = number_of(row.get(step_column)) if step_column else len(by_step) + 1
        if step_column and step_column not in row and not other_steps.isdisjoint(row):
            step, cells = last, {name: cell for name, cell in cells.items() if columns[name] not in of_steps}
        last = step if math.isfinite(step) else last
        if cells and math.isfinite(step):
            known = by_step.setdefault(int(step), {})
            known.update({name: cell for name, cell in cells.items() if math.isfinite(cell) or name not in known})
    return by_step


def foreign_kind(path: Path) -> str:
    """Returns a phrase for a message, with the kind of a file or directory and what to read instead.

    It knows W&B's summary, verl's rollout data, and TRL's completions by their name; for others it returns "". The
    first files of a directory decide. Raises OSError if a file cannot be read.
    """
    if path.is_dir():
        firsts = (min(path.glob(pattern), default=None) for pattern in ("*.jsonl", "completions_*.parquet"))
        return next(filter(None, (foreign_kind(first) for first in firsts if first is not None)), "")
    if path.suffix == ".parquet":
        return TRL_TEXTS if re.fullmatch(r"completions_\d+\.parquet", path.name) else ""
    row, is_whole = _first_object(path)
    if row.keys() >= {"_wandb"} or path.name == "wandb-summary.json" or (is_whole and row.keys() >= _ROW_OF_HISTORY):
        return SUMMARY
    is_text = all(isinstance(row.get(name), str) for name in ("input", "output"))
    return VERL_TEXTS if is_text and not any(isinstance(value, list) for value in row.values()) else ""


def _first_object(path: Path) -> tuple[dict[str, Any], bool]:
    """Returns the JSON object in a file or in its first line, and whether it is the whole of a .json file.

    The object is empty if there is none.
    """
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES)
    for text, is_whole in ((start, path.suffix == ".json"), (start.partition(b"\n")[0], False)):
        with contextlib.suppress(ValueError):
            found = parse_json(text)
            return (found, is_whole) if isinstance(found, dict) else ({}, False)
    return {}, False
