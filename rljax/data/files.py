"""Reads and writes files of problems: Parquet in the form that verl reads, or JSONL.

A row has a ``prompt``, which is a text or a list of chat messages ``{"role", "content"}``. Its right answer is
``reward_model.ground_truth`` or ``answer``. The reward also gets ``data_source`` and ``extra_info``. The metadata of a
written file has a JSON object under ``rljax.problems`` with the source file and the filters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljax.distributed.files import replacing
from rljax.errors import parse_json

FORMAT_VERSION = 1
PASS_RATE = "pass_rate"
_KEY = b"rljax.problems"
_BATCH_ROWS = 8192
_CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TRUTH = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
_CANONICAL = pa.schema([("data_source", pa.string()), ("prompt", pa.string()), ("reward_model", _TRUTH)])

Row = dict[str, Any]
Problem = dict[str, Any]


def read_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """Yields (number, row) of a Parquet or JSONL file. Numbers count from 1; in JSONL they are line numbers.

    Raises:
      ValueError: The file does not exist or has another form, or a line is not a JSON object. The message is one line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no problems at {path}: there is no such file")
    if path.suffix == ".jsonl":
        yield from json_lines(path)
    elif path.suffix == ".parquet":
        number = 0
        with _open_parquet(path) as file:
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
            except (pa.ArrowException, OSError, ArithmeticError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"{path} cannot be read after row {number}: {reason}") from error
    else:
        raise ValueError(f"{path}: problems are read from .parquet or .jsonl files")


def parse_row(row: Mapping[str, Any], where: str) -> Problem:
    """Reads the problem of a row: ``prompt`` (text or messages), ``answer`` (text), ``data_source``, ``extra_info``.

    Args:
      row: The row, from ``read_rows``.
      where: The file and row number, for the error message.

    Raises:
      ValueError: The prompt or the right answer is missing or has another form, or a text cannot be written as UTF-8.
    """
    prompt = _parse_prompt(row.get("prompt"), where)
    nested = row.get("reward_model")
    answer = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    answer = row.get("answer") if answer is None else answer
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError(f"{where}: the right answer must be text or a number, got {type(answer).__name__}")
    if answer is None or not str(answer).strip() or answer != answer:  # a table may have NaN for a missing value
        raise ValueError(f"{where}: no right answer (reward_model.ground_truth, or answer)")
    problem = {"prompt": prompt, "answer": str(answer), "data_source": str(row.get("data_source") or "")}
    for key, value in problem.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start])
            raise ValueError(f"{where}: the {key} holds half a character, the lone surrogate {found}") from error
    return problem | {"extra_info": row.get("extra_info") or {}}


def read_problems(path: str | Path) -> tuple[Problem, ...]:
    """Reads and checks all problems of a file.

    Raises:
      ValueError: The file cannot be read, a row is not a problem, or the file has no problems.
    """
    problems = tuple(parse_row(row, f"{path}: row {number}") for number, row in read_rows(path))
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """Returns the text of a prompt; the contents of messages are separated by blank lines."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def write_rows(path: str | Path, rows: Iterable[Row], *, like: str | Path, provenance: Mapping[str, Any]) -> None:
    """Writes rows as Parquet in verl's form; an interrupted write leaves no file.

    Args:
      path: The file to write; its directory is made.
      rows: The rows, from ``read_rows`` of the file ``like``; each may have an additional ``pass_rate``.
      like: The file that the rows came from. The columns of a Parquet file keep their types. A JSONL row becomes
        ``data_source``, ``prompt`` and ``reward_model.ground_truth``.
      provenance: The JSON values for the metadata.
    """
    path, rows = Path(path), list(rows)
    if Path(like).suffix == ".parquet":
        with _open_parquet(Path(like)) as file:
            schema = file.schema_arrow
    else:
        chat = any(not isinstance(row["prompt"], str) for row in rows)
        schema = _CANONICAL.set(1, pa.field("prompt", _CHAT)) if chat else _CANONICAL
        rows = [_canonical_row(row, chat=chat) for row in rows]
    if rows and PASS_RATE in rows[0] and PASS_RATE not in schema.names:
        schema = schema.append(pa.field(PASS_RATE, pa.float32()))
    document = json.dumps({"version": FORMAT_VERSION, **provenance}).encode()
    schema = schema.with_metadata({**(schema.metadata or {}), _KEY: document})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), partial)


def read_provenance(path: str | Path) -> dict[str, Any] | None:
    """Reads the provenance that ``write_rows`` stored, or None. Raises ValueError if the file is not Parquet."""
    with _open_parquet(Path(path)) as file:
        metadata = file.schema_arrow.metadata or {}
    return json.loads(metadata[_KEY]) if _KEY in metadata else None


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from error


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields the line number (from 1) and the object of every line that is not blank.

    Raises:
      ValueError: A line is not a JSON object, or the file is not text; the message names the line.
    """
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = _parse_line(line, f"{path}:{number}")
                    if not isinstance(row, dict):
                        raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                    yield number, row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not JSONL: it is not UTF-8 text") from error


def _parse_line(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _parse_prompt(prompt: Any, where: str) -> str | list[dict[str, str]]:
    parsed: str | list[dict[str, str]]
    if isinstance(prompt, str | None):
        parsed = prompt or ""
    elif isinstance(prompt, list) and all(_is_message(message) for message in prompt):
        parsed = [{"role": message["role"], "content": message["content"]} for message in prompt]
    else:
        raise ValueError(f"{where}: the prompt must be text or a list of messages with role and content")
    if not prompt_text(parsed).strip():
        raise ValueError(f"{where}: the prompt is empty")
    return parsed


def _is_message(value: Any) -> bool:
    match value:
        case {"role": str(), "content": str()}:
            return True
    return False


def _canonical_row(row: Row, *, chat: bool) -> Row:
    problem = parse_row(row, "a row to write")
    prompt = problem["prompt"]
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return row | {
        "data_source": problem["data_source"],
        "prompt": prompt,
        "reward_model": {"ground_truth": problem["answer"], "style": "rule"},
    }
