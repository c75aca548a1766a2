"""Reads and writes files of problems: Parquet in the form that verl reads, JSONL, JSON or CSV, also in shards.

A row has a ``prompt``, which is a text or a list of chat messages ``{"role", "content"}``. Its right answer is
``reward_model.ground_truth`` or ``answer``. Published data sets have other keys (``rljax.data.forms``). The reward also
gets ``data_source``, ``extra_info``, and ``alternatives`` if a row has several right answers. A reward of the user's
own also gets the other keys of the row, as ``columns``. The metadata of a written file has a JSON object under
``rljax.problems`` with the source file and the filters.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljax.data.forms import Alternatives, Form, NoAnswerError, as_alternatives, take, unread_keys
from rljax.data.shards import source_files
from rljax.distributed.files import replacing
from rljax.errors import naming, parse_json
from rljax.record.token_dumps import parquet_file

FORMAT_VERSION = 1
PASS_RATE = "pass_rate"
ALTERNATIVES = "alternatives"  # the key of all right answers of a problem that has several; ``answer`` is the first
COLUMNS = "columns"  # the key of a row's other values, which a reward of the user's own may take
TRUTH = "truth"  # the key of a right answer that is no text, for a reward of the user's own
CHAT_TOOLS = "chat_tools"  # the key of the tools that the chat template writes into the prompt
_FURTHER = ("name", "reasoning_content", "tool_calls", "tool_call_id")  # a message's keys for the chat template
_KEY = b"rljax.problems"
_NO_PROMPT = "the prompt must be text or a list of messages with role and content"
_BATCH_ROWS = 8192
_LONGEST_FIELD = 2**30  # characters of a value in CSV; Python's own limit is 2**17
_CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TRUTH = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
_CANONICAL = pa.schema([("data_source", pa.string()), ("prompt", pa.string()), ("reward_model", _TRUTH)])

FileRow = dict[str, Any]
Problem = dict[str, Any]


@dataclass
class Tally:
    """The counts of one data set."""

    name: str  # the name of the data set
    problems: Sequence[Problem] = ()  # the problems that are used
    rows: int = 0  # the number of rows read
    unanswered: int = 0  # the number of rows that are left out because their right answer is empty
    # The number of problems that are left out because of their length; None: lengths were not counted.
    too_long: int | None = None
    # The number of problems whose prompt another problem has, too. None: a reader counts them in ``problems``.
    repeats: int | None = None
    unread: Counter[str] = field(default_factory=Counter)  # the keys that nothing reads, with the number of their rows


def read_rows(path: str | Path) -> Iterator[tuple[int, FileRow]]:
    """Yields (number, row) of a file of problems, or of all shards of ``source_files``.

    Numbers count from 1 over all shards. In a single file of JSONL or CSV they are line numbers.

    Raises:
      ValueError: The file does not exist or has another form, or a line is not a JSON object. The message is one line.
    """
    files = source_files(path)
    rows = itertools.chain.from_iterable(map(_rows_of_file, files))
    yield from rows if len(files) == 1 else ((number, row) for number, (_, row) in enumerate(rows, 1))


def _rows_of_file(path: Path) -> Iterator[tuple[int, FileRow]]:
    if path.suffix == ".jsonl":
        yield from json_lines(path)
    elif path.suffix == ".json":
        yield from _json_rows(path)
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix == ".parquet":
        number = 0
        with parquet_file(path) as file:
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
                if number != file.metadata.num_rows:
                    raise ValueError(f"the file says that it has {file.metadata.num_rows}")
            except (pa.ArrowException, OSError, ArithmeticError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"{path} cannot be read after row {number}: {reason}") from error
    else:
        raise ValueError(f"{path}: problems are read from .parquet, .jsonl, .json or .csv files")


def parse_row(row: Mapping[str, Any], where: str, form: Form = None, *, whole: bool = False) -> Problem:
    """Reads the problem of a row: ``prompt`` (text or messages), ``answer`` (text), ``data_source``, ``extra_info``.

    If there are several right answers, ``ALTERNATIVES`` has them all. ``where``, the file and row number, begins each
    message. ``form`` is a key of ``FORMS``, or the keys that the user names; None: it is found from the row's keys.
    With ``whole`` the problem may also have ``COLUMNS`` and ``TRUTH``. Its right answer may be a record, or "" if none.

    Raises:
      NoAnswerError: The right answer is empty.
      ValueError: Prompt or answer is missing or has another form, or a text cannot be written as UTF-8.
    """
    prompt, answer = take(row, form, where, whole=whole)
    with naming(where):
        if not isinstance(prompt, str | list):
            raise ValueError(_NO_PROMPT)
        prompt = prompt if isinstance(prompt, str) else [_message(each) for each in prompt]
        if not prompt_text(prompt).strip():
            raise ValueError("the prompt is empty")
    tools = row.get("tools")
    with contextlib.suppress(ValueError):
        tools = parse_json(tools) if isinstance(tools, str) else tools
    several = list(answer.answers) if isinstance(answer, Alternatives) else []
    given = several if isinstance(answer, Alternatives) and answer.is_list else answer
    kept: dict[str, Any] = {TRUTH: given} if whole and isinstance(given, list | dict | int | float) else {}
    if several:
        answer = several[0]
    elif not kept and isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], str):
        (answer,) = answer
    elif isinstance(answer, list) or (kept and isinstance(answer, dict)):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    if not kept and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise ValueError(f"{where}: the right answer must be text or a number, got {type(answer).__name__}")
    problem: Problem = {"prompt": prompt, "answer": str(answer), "data_source": str(row.get("data_source") or "")}
    if len(several) > 1:
        problem[ALTERNATIVES] = several
    for key, value in problem.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start])
            raise ValueError(f"{where}: the {key} holds half a character, the lone surrogate {found}") from error
    problem["extra_info"] = row.get("extra_info") or {}
    others = {key: value for key, value in row.items() if key not in problem} if whole else {}
    if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools):
        kept[CHAT_TOOLS] = tools
    return problem | kept | ({COLUMNS: others} if others else {})


def answered_rows(
    path: str | Path,
    tally: Tally | None,
    form: Form = None,
    rows: Iterable[tuple[int, FileRow]] | None = None,
    *,
    whole: bool = False,
) -> Iterator[tuple[FileRow, Problem]]:
    """Yields each row of a file and its problem; rows whose right answer is empty are only counted.

    The counts of the file are added to ``tally``; without one such a row is an error. ``form`` and ``whole`` are as in
    ``parse_row``. ``rows`` are the numbered rows of the file, if they were read already.

    Raises:
      ValueError: The file cannot be read, a row is not a problem, or no row has a right answer.
    """
    counts = tally or Tally(str(path))
    first: NoAnswerError | None = None
    for number, row in read_rows(path) if rows is None else rows:
        counts.rows += 1
        try:
            problem = parse_row(row, f"{path}: row {number}", form, whole=whole)
        except NoAnswerError as error:
            if tally is None:
                raise
            first = first or error
            counts.unanswered += 1
            continue
        counts.unread.update(() if whole else unread_keys(row, form))
        yield row, problem
    if counts.rows == counts.unanswered:
        raise first or ValueError(f"{path} holds no problems")


def right_answers(problem: Problem) -> str | list[str]:
    """Returns the right answer of a problem, or all of them if it has several."""
    answers: str | list[str] = problem.get(ALTERNATIVES) or problem["answer"]
    return answers


def single_answer(problem: Problem) -> str:
    """Returns the right answer of a problem: the only text of a list under ``TRUTH``, or else ``answer``."""
    match problem.get(TRUTH):
        case [str(only)]:
            return only
    return str(problem["answer"])


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Returns the text of a prompt; the contents of messages are separated by blank lines."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] or "" for message in prompt)


def write_rows(
    path: str | Path,
    rows: Iterable[FileRow],
    *,
    like: str | Path,
    provenance: Mapping[str, Any],
    form: Form = None,
    whole: bool = False,
) -> None:
    """Writes rows as Parquet in verl's form; an interrupted write leaves no file.

    Args:
      path: The file to write; its directory is made.
      rows: The rows, from ``read_rows`` of the file ``like``; each may have an additional ``pass_rate``.
      like: The file that the rows came from. The columns of a Parquet file with ``prompt`` keep their types. Other rows
        become ``data_source``, ``prompt``, ``reward_model.ground_truth`` and ``extra_info``. With ``whole`` they keep
        what is neither prompt nor answer. Chats with tools are the text of JSON.
      provenance: The JSON values for the metadata.
      form: The form by which the rows were read, as in ``parse_row``.
      whole: Whether the rows were read for a reward of the user's own, as in ``parse_row``.
    """
    path, rows = Path(path), list(rows)
    schema = None
    if Path(like).suffix == ".parquet":
        with parquet_file(like) as file:
            schema = file.schema_arrow
    if schema is None or form is not None or "prompt" not in schema.names:
        source, problems = schema, [parse_row(row, "a row to write", form, whole=whole) for row in rows]
        chats = [problem["prompt"] for problem in problems if not isinstance(problem["prompt"], str)]
        as_json = any(len(message) > 2 for chat in chats for message in chat)
        schema = _CANONICAL.set(1, pa.field("prompt", _CHAT)) if chats and not as_json else _CANONICAL
        if any(CHAT_TOOLS in problem for problem in problems):
            schema = schema.append(pa.field("tools", pa.string()))
        pairs = zip(rows, problems, strict=True)
        rows = [row | _canonical(each, bool(chats), as_json) | _other_facts(row) for row, each in pairs]
        kept = [key for row in rows if whole for key in unread_keys(row, None)]
        kept += ["verification_info"] if whole and any(row.get("verification_info") for row in rows) else []
        kept += ["extra_info"] if any(problem["extra_info"] for problem in problems) else []
        for name in dict.fromkeys(kept):
            try:
                schema = schema.append(_field(name, rows, source))
            except ValueError as error:
                if whole:
                    raise
                print(f"warning: {error}; it is left out", file=sys.stderr)
    if rows and PASS_RATE in rows[0] and PASS_RATE not in schema.names:
        schema = schema.append(pa.field(PASS_RATE, pa.float32()))
    document = json.dumps({"version": FORMAT_VERSION, **provenance}).encode()
    schema = schema.with_metadata({**(schema.metadata or {}), _KEY: document})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), partial, write_page_checksum=True)


def read_provenance(path: str | Path) -> dict[str, Any] | None:
    """Reads the provenance that ``write_rows`` stored; None if none. Raises ValueError if the file is not Parquet."""
    with parquet_file(path) as file:
        metadata = file.schema_arrow.metadata or {}
    return parse_json(metadata[_KEY]) if _KEY in metadata else None


def json_lines(path: Path) -> Iterator[tuple[int, FileRow]]:
    """Yields the line number (from 1) and the object of every line that is not blank.

    Raises:
      ValueError: A line is not a JSON object, or the file is not text; the message names the line.
    """
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    with naming(f"{path}:{number}"):
                        row = parse_json(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
                    yield number, row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not JSONL: it is not UTF-8 text") from error


def _json_rows(path: Path) -> Iterator[tuple[int, FileRow]]:
    """Yields (number, row) of a list of JSON objects, or of a file with one object a line."""
    content = path.read_bytes()
    if re.match(rb"(?:\xef\xbb\xbf)?\s*\{.*\}\s*$", content, re.MULTILINE):
        yield from json_lines(path)
        return
    with naming(path):
        rows = parse_json(content)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of JSON objects; name a file with one object a line .jsonl")
    yield from enumerate(rows, 1)


def _csv_rows(path: Path) -> Iterator[tuple[int, FileRow]]:
    """Yields (number of its last line, row) for each row of a CSV file with commas. Each value is a text.

    The first row of the file names the columns.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            if len(set(names)) < len(names):
                raise ValueError("two columns have the same name")
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"expected {len(names)} values, one for each column")
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            raise ValueError(f"{path}:{max(1, reader.reader.line_num)}: {reason}") from error


def _message(value: Any) -> dict[str, Any]:
    """Returns a message, with its parts joined. Raises ValueError if a part is no text, such as an image."""
    further = {key: value[key] for key in _FURTHER if isinstance(value, dict) and value.get(key) is not None}
    match value:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content} | further
        case {"role": str(role), "tool_calls": [_, *_]} if value.get("content") is None:
            return {"role": role, "content": None} | further
        case {"role": str(role), "content": [_, *_] as parts} if all(isinstance(part, dict) for part in parts):
            for part in parts:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type")
                    raise ValueError(
                        f"the prompt has a part of type {kind}; only parts of type text, with text, are read"
                    )
            return {"role": role, "content": "".join(part["text"] for part in parts)} | further
    raise ValueError(_NO_PROMPT)


def _canonical(problem: Problem, chat: bool, as_json: bool) -> FileRow:
    prompt, tools = problem["prompt"], problem.get(CHAT_TOOLS)
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {
        "data_source": problem["data_source"],
        "prompt": json.dumps(prompt, ensure_ascii=False, default=str) if as_json else prompt,
        "reward_model": {"ground_truth": _written_truth(problem) or None, "style": "rule"},
        "tools": json.dumps(tools, ensure_ascii=False, default=str) if tools else None,
    }


def _other_facts(row: FileRow) -> FileRow:
    """Returns ``verification_info`` without the right answer, which has another place; {} if it holds none."""
    given = facts = row.get("verification_info")
    with contextlib.suppress(ValueError):
        facts = parse_json(given) if isinstance(given, str) else given
    if not isinstance(facts, dict) or "ground_truth" not in facts:
        return {}
    rest = {key: value for key, value in facts.items() if key != "ground_truth"} or None
    return {"verification_info": json.dumps(rest) if rest and isinstance(given, str) else rest}


def _field(name: str, rows: Sequence[FileRow], source: pa.Schema | None) -> pa.Field:
    """Returns a key's column, as ``source`` has it or the values need it. Raises ValueError if Parquet has none."""
    if source is not None and name in source.names:
        return source.field(name)
    try:
        column = pa.table({name: [row.get(name) for row in rows]})
        pq.write_table(column, pa.BufferOutputStream())
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"no column of Parquet holds the values of {name}: write them as text ({error})") from error
    return column.schema.field(0)


def _written_truth(problem: Problem) -> str:
    """Returns the right answers of a problem as one text, which ``take`` reads back."""
    several = problem.get(ALTERNATIVES, [problem["answer"]])
    is_plain = len(several) == 1 and as_alternatives(several[0]) is None
    return problem["answer"] if is_plain else json.dumps(several, ensure_ascii=False)
