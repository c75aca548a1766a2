"""Reads token files of other frameworks into a ``TokenDump``.

``read_tokens`` recognises a file by its content: a token dump, prime-rl's token export or traces, or replies of an
OpenAI-compatible server or of SGLang's ``/generate``. It also reads sequences or batches as JSONL or Parquet, in
rljax's names or those of TRL, verl, NeMo-RL, slime, Miles, tunix, Levanter and open-instruct. Pickles are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.compare.sequences import COLUMNS, IDS, Line, renamed, sequences_of
from rljax.data.files import FileRow, json_lines
from rljax.errors import naming, parse_json
from rljax.record.token_dumps import ColumnSource, TokenDump, make_dump, parquet_file, read_dump
from rljax.record.training_logs import TRL_TEXTS, foreign_kind

PRIME_RL_SCHEMA = 1
"""The ``schema_version`` of prime-rl's token export that this module reads."""

_PRIME_RL_SOURCES = {
    "trainer": ColumnSource("prime-rl trainer", role="trainer"),
    "inference": ColumnSource("vllm", role="rollout"),
}
_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}
_HEADER = "rljax_tokens"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_NO_IDS = "text does not give the tokens back"
_ADD = "rljax docs compare has the lines that write token ids and log-probabilities inside its process"
_RUNS_CODE = "loading it runs whatever code it holds"


def read_tokens(path: str | os.PathLike[str]) -> TokenDump:
    """Reads a file of any known kind, or a directory with ``tokens_*.jsonl`` files or prime-rl's token export.

    Raises ValueError if the file is a pickle, damaged, or of an unknown kind; the message names the file or its line.
    """
    place = Path(path)
    ranks = sorted(place.rglob("rank_*.jsonl")) if place.is_dir() else []
    if ranks:
        exported = ((file, *line) for file in ranks for line in json_lines(file))
        return _assemble(place, exported, _prime_rl_sequence, _PRIME_RL_SOURCES)
    if parts := sorted(place.glob("tokens_*.jsonl")) if place.is_dir() else []:
        return _read_generic(place, [_of_part(*line) for part in parts for line in _documents(part)])
    if kind := foreign_kind(place):
        raise ValueError(f"{place} is {kind}")
    if place.is_dir():
        raise ValueError(f"{place}: expected rank_*.jsonl of prime-rl's token export, or tokens_*.jsonl, found none")
    with place.open("rb") as file:
        start = file.read(4)
    if place.suffix.lower() in _PICKLES or start.startswith((b"\x80", b"PK")):
        refused = f"{place} is a pickle, or an archive that may hold one"
        raise ValueError(f"{refused}: {_RUNS_CODE}, so it is not read; export JSONL from its process")
    if start.startswith(b"PAR1"):
        return _read_parquet(place)
    lines = _documents(place)
    first = lines[0][2] if lines else {}
    if "schema_version" in first:
        return _assemble(place, lines, _prime_rl_sequence, _PRIME_RL_SOURCES)
    if "traces" in first:
        return _assemble(place, _branches(lines), _branch_sequence, {"rollout": ColumnSource(role="rollout")})
    if not {"choices", "outputs", "meta_info"}.isdisjoint(first) and "token_ids" not in first:
        return _assemble(place, _choices(lines), _reply_sequence, {"rollout": ColumnSource(role="rollout")})
    return _read_generic(place, lines)


def _documents(place: Path) -> list[Line]:
    """Returns the objects of a JSONL file, or of a file that is one JSON object or list.

    Each comes with its file and its line number, or its number in the list, from 1. Raises ValueError if the file is
    neither.
    """
    try:
        return [(place, *line) for line in json_lines(place)]
    except ValueError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):  # It is no UTF-8, and may have many gigabytes.
            raise
        try:
            whole = parse_json(place.read_bytes())
        except ValueError:
            whole = None
        rows = [whole] if isinstance(whole, dict) else whole
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise
        return [(place, number, row) for number, row in enumerate(rows, 1)]


def _of_part(part: Path, number: int, row: FileRow) -> Line:
    """Returns a line of one of several files. Each file may number its sequences from 0."""
    named = {"sequence_id": f"{part.stem}/{row['sequence_id']}"} if "sequence_id" in row else {}
    return part, number, row | named


def _read_generic(place: Path, lines: list[Line]) -> TokenDump:
    """Makes a dump of generic JSONL: one object for each sequence, after an optional header.

    A sequence is ``{"sequence_id": ..., "token_ids": [...], "response_mask": [...], "logprobs": {column: [...]}}``. It
    may have ``prompt_ids`` and ``response_ids`` instead of ``token_ids`` and ``response_mask``; then its columns may
    cover only the response. ``values`` may have further numbers of the tokens by name, in the form of ``logprobs``. The
    fields may have the names of other projects, and a line may be a padded batch with a list for each sequence.
    ``sequence_id`` defaults to the sequence's number, from 0. null is an unknown number. The header is
    ``{"rljax_tokens": 1, "columns": {column: {engine, dtype, weights_hash, temperature, role}}, "sampling": {...}}``;
    all its parts but the first are optional.
    """
    header = lines[0][2] if lines and lines[0][2].get(_HEADER) == 1 else {}
    lines = [line for line in lines if line[2] != header]  # each file of a directory may begin with it
    columns = header.get("columns", {})
    if not isinstance(columns, dict):
        raise ValueError(f"{place}: header: columns must be an object, got {columns!r:.60}")
    with naming(f"{place}: header"):
        sources = {name: ColumnSource.read(source) for name, source in columns.items()}
    first = lines[0][2] if lines else {}
    known = {name: first[name] for name in _SAMPLING if type(first.get(name)) in (int, float)}
    return _assemble(place, sequences_of(lines), _jsonl_sequence, sources, header.get("sampling", known))


def _jsonl_sequence(record: FileRow, number: int) -> TokenDump:
    """Makes a dump of one line of generic JSONL; columns that cover only the response are padded in front."""
    if _HEADER in record:
        raise ValueError(f"expected one header of version 1 in the first line, got {record[_HEADER]!r}")
    if {"token_ids", "prompt_ids"}.isdisjoint(record):
        if any(isinstance(record.get(key), str) for key in ("output", "completion", "response")):
            why = "this is a log of texts, as verl and TRL write them"
            raise ValueError(f"{why}, and {_NO_IDS}: {_ADD}")
        if "prev_logprobs" in record:
            raise ValueError(f"this is NeMo-RL's training data of a release that writes no token_ids, and {_NO_IDS}")
        raise ValueError(f"expected token_ids, or prompt_ids and response_ids, got the keys {list(record)!r:.200}")
    if "token_ids" in record:
        end = record.get("input_lengths")  # NeMo-RL pads sequences, and leaves samples out by a weight of 0
        token_ids, front = record["token_ids"][:end], 0
        if (got := record.get("response_length", record.get("response_lengths"))) is not None:  # slime and Miles
            front = len(token_ids) - got
            if not 0 <= front <= len(token_ids):
                raise ValueError(f"response_length must be at most the {len(token_ids)} tokens, got {got}")
            record = {"response_mask": [True] * (len(token_ids) - front), **record}
        mask = record["response_mask"][:end] if record.get("sample_loss_mask", 1) else [False] * len(token_ids)
        mask = [False] * (len(token_ids) - len(mask)) + mask if len(mask) == len(token_ids) - front else mask
    else:
        end, prompt = None, record["prompt_ids"]
        if "prompt_mask" in record:
            prompt = [token for token, mark in zip(prompt, record["prompt_mask"], strict=True) if mark]
        front = len(prompt)
        token_ids = prompt + record["response_ids"]
        mask = record.get("response_mask", [True] * len(record["response_ids"]))
        mask = [False] * front + mask if len(mask) == len(record["response_ids"]) else mask

    def padded(values: list[Any]) -> list[Any]:
        values = values[:end]
        return [None] * front + values if len(values) == len(token_ids) - front else values

    columns = {name: [_pick(padded(values), token_ids)] for name, values in record.get("logprobs", {}).items()}
    found = record.get("values", {}).items()
    more = {f"values/{name}": [padded(values)] for name, values in found if isinstance(values, list)}
    return make_dump([str(record.get("sequence_id", number))], [token_ids], [mask], columns, columns=more)


def _pick(values: Sequence[Any], token_ids: Sequence[int]) -> list[Any]:
    """Returns the number of each token. vLLM may give an object of likely tokens by token id instead of a number.

    TRL's server gives a list with the number alone.
    """
    picked = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    for i, (value, token) in enumerate(zip(values, token_ids, strict=False)):
        if isinstance(value, dict):
            entry = value if "logprob" in value else value.get(str(token))
            if entry is None:
                known = sorted(value)[:5]
                raise ValueError(f"token {i}: its id {token} is not among the ids {known!r:.60} with numbers")
            picked[i] = entry["logprob"] if isinstance(entry, dict) else entry
    return picked


def _choices(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields each choice of each reply, with the reply's prompt. A reply of SGLang is one choice."""
    for file, number, reply in lines:
        choices = [reply] if "meta_info" in reply else reply.get("choices", reply.get("outputs"))
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ValueError(f"{file}:{number}: expected a reply with a list of choices or outputs")
        for choice in choices:
            prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
            yield file, number, {**choice, "prompt_token_ids": prompt}


def _branches(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields each branch of prime-rl's ``traces.jsonl`` that has tokens: its nodes from the first message to the last.

    A trace is a list of messages, each with its own tokens and the number of the message before it. The tokens of a
    message that several branches share are marked in the first one alone.
    """
    for file, number, episode in lines:
        try:
            found: list[list[FileRow]] = []
            for trace in episode["traces"]:
                paths: list[list[int]] = []
                for at, node in enumerate(trace["nodes"]):  # a message comes after the one before it
                    parent = node.get("parent")
                    paths.append([*([] if parent is None else paths[parent]), at])
                before, seen = {node.get("parent") for node in trace["nodes"]}, set[int]()
                for path in (path for at, path in enumerate(paths) if at not in before):
                    unmarked = {"mask": None, "logprobs": None}
                    nodes = [trace["nodes"][at] | (unmarked if at in seen else {}) for at in path]
                    found += [nodes] if any(any(node.get("mask") or []) for node in nodes) else []
                    seen.update(path)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file}:{number}: a trace must have nodes, each after its parent") from error
        yield from ((file, number, {"nodes": path}) for path in found)


def _branch_sequence(branch: FileRow, number: int) -> TokenDump:
    """Makes a dump of one branch. The numbers of a node are those of its tokens that ``mask`` marks."""
    ids: list[int] = []
    marks: list[bool] = []
    values: list[Any] = []
    for node in branch["nodes"]:
        mask = node.get("mask") or [False] * len(node["token_ids"])
        ids += node["token_ids"]
        marks += mask
        numbers = node.get("logprobs") or [None] * sum(mask)
        if len(numbers) != sum(mask):
            raise ValueError(f"a node has {len(numbers)} log-probabilities for {sum(mask)} marked tokens")
        left = iter(numbers)
        values += [next(left) if mark else None for mark in mask]
    return _jsonl_sequence({"token_ids": ids, "response_mask": marks, "logprobs": {"rollout": values}}, number)


def _reply_sequence(choice: FileRow, number: int) -> TokenDump:
    """Makes a dump of one choice of a completion, a chat completion, or vLLM's ``RequestOutput`` as JSON.

    SGLang has a list of [log-probability, token id, text] for the response, and one for the prompt from the token
    ``logprob_start_len`` on.
    """
    ids, prompt, found = choice.get("token_ids"), choice["prompt_token_ids"], choice.get("logprobs") or {}
    values: Any = found
    names: list[str] = []
    if meta := choice.get("meta_info"):
        values, ids = ([item[i] for item in meta.get("output_token_logprobs") or []] for i in (0, 1))
        scored = meta.get("input_token_logprobs") or []
        if prompt is None and scored and len(scored) == meta.get("prompt_tokens", len(scored)):
            prompt = [item[1] for item in scored]
    elif isinstance(found, dict):
        content = found.get("content") or []
        values = [item["logprob"] for item in content] or found.get("token_logprobs") or []
        names = [item["token"] for item in content] or found.get("tokens") or []
    marker = "token_id:"
    if ids is None and names and all(name.startswith(marker) for name in names):
        ids = [int(name.removeprefix(marker)) for name in names]
    if ids is None or prompt is None or not values:
        why = "this is a server's reply without token ids of prompt and response or without log-probabilities"
        ask = "ask vLLM with return_token_ids and logprobs, SGLang with return_logprob, logprob_start_len 0"
        raise ValueError(f"{why}, and {_NO_IDS}: {ask}")
    return _jsonl_sequence({"prompt_ids": prompt, "response_ids": ids, "logprobs": {"rollout": values}}, number)


def _read_parquet(place: Path) -> TokenDump:
    """Reads a token dump, or a table of sequences, as Miles writes with ``--save-rollout-format parquet``."""
    with parquet_file(place) as file:
        names = set(file.schema_arrow.names)
        if {"prompt", "completion"} <= names:
            raise ValueError(f"{place} is {TRL_TEXTS}")
        if any(b"rljax" in key for key in file.schema_arrow.metadata or {}):
            return read_dump(place)
        if names.isdisjoint(IDS):
            raise ValueError(f"{place} has no token ids of a known name; export a history of metrics as CSV or JSONL")
        others = [name for name in names if name in _SAMPLING or name.startswith(("logprobs/", "values/"))]
        rows: list[FileRow] = file.read(sorted({*(names & COLUMNS), *others})).to_pylist()
    if pickled := [name for row in rows for name, value in row.items() if isinstance(value, bytes)]:
        raise ValueError(f"{place}: Miles has pickled its column {pickled[0]!r}: {_RUNS_CODE}")
    lines = [(place, number, row) for number, row in enumerate(rows, 1)]
    if "tokens" not in names or all(row.get("rollout_log_probs") is None for row in rows):
        return _read_generic(place, lines)
    sources = {"rollout": ColumnSource(engine="sglang", role="rollout")}  # Miles
    return _assemble(place, sequences_of(lines), _jsonl_sequence, sources)


def _prime_rl_sequence(record: FileRow, _: int) -> TokenDump:
    """Makes a dump of one line of prime-rl's token export (``enable_token_export``), named ``step/rank/number``."""
    if record.get("schema_version") != PRIME_RL_SCHEMA:
        raise ValueError(f"schema_version {record.get('schema_version')!r}, expected {PRIME_RL_SCHEMA}")
    run = f"{record['run_id']}/" if record.get("run_id") else ""
    name = f"{run}{record.get('export_step', record['step'])}/{record['rank']}/{record['export_sequence_idx']}"
    if "tokens" in record:  # the older form of this version: an object for each token
        keys = {"token_ids": "id", "loss_mask": "loss_mask"}
        keys |= {f"{engine}_logprobs": f"{engine}_logprob" for engine in ("trainer", "inference")}
        record = {many: [token[one] for token in record["tokens"]] for many, one in keys.items()}
    columns = {engine: record[f"{engine}_logprobs"] for engine in ("trainer", "inference")}
    own = {"sequence_id": name, "response_mask": record["loss_mask"], "logprobs": columns}
    return _jsonl_sequence({"token_ids": record["token_ids"], "values": renamed(record)["values"], **own}, 0)


def _assemble(
    place: Path,
    lines: Iterable[Line],
    parse: Callable[[FileRow, int], TokenDump],
    sources: Mapping[str, ColumnSource],
    sampling: Mapping[str, Any] | None = None,
) -> TokenDump:
    """Makes a dump of all lines, each (file, line number, record). Raises ValueError, which names the line."""
    parts: list[TokenDump] = []
    for file, line, record in lines:
        try:
            parts.append(parse(record, len(parts)))
            got, expected = sorted(parts[-1].logprobs), sorted(parts[0].logprobs)
            if got != expected:
                raise ValueError(f"the sequence has columns {got}, expected {expected} as the first")
        except KeyError as error:
            raise ValueError(f"{file}:{line}: {error} is missing") from error
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{file}:{line}: a field is not of the form that the format requires") from error
        except ValueError as error:
            raise ValueError(f"{file}:{line}: {error}") from error
    if not parts:
        raise ValueError(f"{place}: there is no sequence in it")
    rows = ((part.sequence_ids[0], part.token_ids[0], part.response_mask[0]) for part in parts)
    names, ids, masks = zip(*rows, strict=True)
    columns = {name: [part.logprobs[name][0] for part in parts] for name in parts[0].logprobs}
    unknown = [(np.full(len(part.token_ids[0]), np.nan, np.float32),) for part in parts]
    values = {}
    for name in sorted({f"values/{name}" for part in parts for name in part.values}):
        values[name] = [part.columns.get(name, none)[0] for part, none in zip(parts, unknown, strict=True)]
    with naming(place):
        return make_dump(names, ids, masks, columns, sources, sampling, values)
