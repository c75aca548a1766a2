"""Reads token files of other frameworks into a ``TokenDump``.

``read_tokens`` recognises a file by its content: a token dump, prime-rl's token export, or generic JSONL. The
documented exporters for TRL and verl write generic JSONL. Pickles are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rljax.data.files import Row, json_lines
from rljax.record.token_dumps import ColumnSource, TokenDump, make_dump, read_dump

PRIME_RL_SCHEMA = 1
"""The ``schema_version`` of prime-rl's token export that this module reads."""

_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}
_HEADER = "rljax_tokens"


def read_tokens(path: str | os.PathLike[str]) -> TokenDump:
    """Reads a file of any known kind, or a directory of prime-rl's token export.

    Raises:
      OSError: There is no such file.
      ValueError: The file is a pickle, damaged, or of an unknown kind; the message names the line.
    """
    place = Path(path)
    if place.is_dir():
        return read_prime_rl(place)
    with place.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return read_dump(place)
    if place.suffix.lower() in _PICKLES or start[:1] == b"\x80" or start == b"PK\x03\x04":
        raise ValueError(
            f"{place} is a pickle (torch.save writes these): loading one runs whatever code it holds, so it is not "
            "read; export JSONL from the process that has the tensors"
        )
    _, first = next(json_lines(place), (0, {}))
    return read_prime_rl(place) if "schema_version" in first else read_jsonl(place)


def read_jsonl(path: str | os.PathLike[str]) -> TokenDump:
    """Reads generic JSONL: one object for each sequence, after an optional header.

    A sequence is ``{"sequence_id": ..., "token_ids": [...], "response_mask": [...], "logprobs": {column: [...]}}``.
    It may have ``prompt_ids`` and ``response_ids`` instead of ``token_ids`` and ``response_mask``; then its columns may
    cover the response alone. ``sequence_id`` defaults to the sequence's number, from 0. null is an unknown number.
    The header is ``{"rljax_tokens": 1, "columns": {column: {engine, dtype, weights_hash, temperature, role}},
    "sampling": {...}}``; all its parts but the first are optional.

    Raises:
      OSError: There is no such file.
      ValueError: A line has another form; the message names the line.
    """
    place = Path(path)
    lines = list(json_lines(place))
    header = lines.pop(0)[1] if lines and lines[0][1].get(_HEADER) == 1 else {}
    columns = header.get("columns", {})
    if not isinstance(columns, dict):
        raise ValueError(f"{place}: header: columns must be an object, got {columns!r:.60}")
    try:
        sources = {name: ColumnSource.read(source) for name, source in columns.items()}
    except ValueError as error:
        raise ValueError(f"{place}: header: {error}") from error
    return _assemble(place, ((place, *line) for line in lines), _jsonl_sequence, sources, header.get("sampling", {}))


def read_prime_rl(path: str | os.PathLike[str]) -> TokenDump:
    """Reads prime-rl's token export (``enable_token_export``): a ``rank_*.jsonl``, or a directory with such files.

    The columns are ``trainer`` and ``inference``; the mask is prime-rl's loss mask. A sequence's name is
    ``step/rank/number``, with the step of the export.

    Raises:
      OSError: There is no such file.
      ValueError: The directory has no such file, the schema version is another one, or a field is missing.
    """
    place = Path(path)
    files = sorted(place.rglob("rank_*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{place}: expected rank_*.jsonl files of prime-rl's token export, found none")
    lines = ((file, number, record) for file in files for number, record in json_lines(file))
    sources = {
        "trainer": ColumnSource(engine="prime-rl trainer", role="trainer"),
        "inference": ColumnSource(engine="vllm", role="rollout"),
    }
    return _assemble(place, lines, _prime_rl_sequence, sources, {})


def _jsonl_sequence(record: Row, number: int) -> TokenDump:
    """Makes a dump of one line of generic JSONL; columns that cover the response alone are padded in front."""
    if _HEADER in record:
        raise ValueError(f"expected one header of version 1 in the first line, got {record[_HEADER]!r}")
    if "token_ids" in record:
        token_ids, mask, front = record["token_ids"], record["response_mask"], 0
    else:
        front = len(record["prompt_ids"])
        token_ids = record["prompt_ids"] + record["response_ids"]
        mask = [False] * front + record.get("response_mask", [True] * len(record["response_ids"]))
    columns = {
        name: [[None] * front + values if len(values) == len(token_ids) - front else values]
        for name, values in record.get("logprobs", {}).items()
    }
    return make_dump([str(record.get("sequence_id", number))], [token_ids], [mask], columns)


def _prime_rl_sequence(record: Row, _: int) -> TokenDump:
    """Makes a dump of one line of prime-rl's token export."""
    if record.get("schema_version") != PRIME_RL_SCHEMA:
        raise ValueError(f"schema_version {record.get('schema_version')!r}, expected {PRIME_RL_SCHEMA}")
    run = f"{record['run_id']}/" if record.get("run_id") else ""
    name = f"{run}{record['export_step']}/{record['rank']}/{record['export_sequence_idx']}"
    columns = {"trainer": [record["trainer_logprobs"]], "inference": [record["inference_logprobs"]]}
    return make_dump([name], [record["token_ids"]], [record["loss_mask"]], columns)


def _assemble(
    place: Path,
    lines: Iterable[tuple[Path, int, Row]],
    parse: Callable[[Row, int], TokenDump],
    sources: Mapping[str, ColumnSource],
    sampling: Mapping[str, Any],
) -> TokenDump:
    """Makes a dump of all lines, each (file, line number, record); an error names its line."""
    parts: list[TokenDump] = []
    for file, line, record in lines:
        try:
            parts.append(parse(record, len(parts)))
            got, expected = sorted(parts[-1].logprobs), sorted(parts[0].logprobs)
            if got != expected:
                raise ValueError(f"the sequence has columns {got}, expected {expected} as the first")
        except KeyError as error:
            raise ValueError(f"{file}:{line}: {error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{file}:{line}: a field is not of the form that the format requires") from error
        except ValueError as error:
            raise ValueError(f"{file}:{line}: {error}") from error
    if not parts:
        raise ValueError(f"{place}: there is no sequence in it")
    try:
        return make_dump(
            [part.sequence_ids[0] for part in parts],
            [part.token_ids[0] for part in parts],
            [part.response_mask[0] for part in parts],
            {name: [part.logprobs[name][0] for part in parts] for name in parts[0].logprobs},
            sources,
            sampling,
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
