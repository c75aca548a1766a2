"""Reads what other frameworks write about their tokens into a ``TokenDump``.

``read_tokens`` knows a file by what is in it: a dump of our own, prime-rl's token export, or generic JSONL, which is
what the exporters for TRL and verl of docs/compare.md write. Pickles are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax.compare.dump import ColumnSource, TokenDump, make_dump, read_dump
from rljax.data.files import json_lines

PRIME_RL_SCHEMA = 1
"""The ``schema_version`` of prime-rl's token export that is understood."""

_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}
_HEADER = "rljax_tokens"
_PRIME_RL_COLUMNS = {"trainer": "trainer_logprobs", "inference": "inference_logprobs"}

_Record = dict[str, Any]


def read_tokens(path: str | os.PathLike[str]) -> TokenDump:
    """Reads any file this module knows, or a directory of prime-rl's token export.

    Raises:
      OSError: there is no such file.
      ValueError: it is a pickle, or of no known kind, or damaged; the message names the line.
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
            "read; export JSONL from the process that has the tensors, as docs/compare.md shows"
        )
    _, first = next(json_lines(place), (0, {}))
    return read_prime_rl(place) if "schema_version" in first else read_jsonl(place)


def read_jsonl(path: str | os.PathLike[str]) -> TokenDump:
    """Reads generic JSONL: one object a sequence, after an optional header.

    A sequence is ``{"sequence_id": ..., "token_ids": [...], "response_mask": [...], "logprobs": {column: [...]}}``;
    instead of ``token_ids`` and ``response_mask`` it may have ``prompt_ids`` and ``response_ids``, and its columns may
    then cover the response only. ``sequence_id`` defaults to the sequence's number, from 0. null is "no number here".
    The header is ``{"rljax_tokens": 1, "columns": {column: {engine, dtype, weights_hash, temperature, role}},
    "sampling": {...}}``, every part of it optional.

    Raises:
      OSError: there is no such file.
      ValueError: a line is not of this form; the message names it.
    """
    place = Path(path)
    header: _Record = {}
    sequences: list[_Record] = []
    for line, record in json_lines(place):
        if _HEADER in record:
            if sequences or header or record[_HEADER] != 1:
                raise ValueError(f"{place}:{line}: expected one header, first, of version 1, got {record[_HEADER]!r}")
            header = record
            continue
        try:
            sequences.append(_sequence(record, str(len(sequences))))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{place}:{line}: {reason}") from error
    try:
        sources = {name: ColumnSource(**source) for name, source in header.get("columns", {}).items()}
    except TypeError as error:
        raise ValueError(f"{place}: header: {error}") from error
    return _assemble(place, sequences, sources, header.get("sampling", {}))


def read_prime_rl(path: str | os.PathLike[str]) -> TokenDump:
    """Reads prime-rl's token export (``enable_token_export``): a ``rank_*.jsonl``, or a directory with such files.

    Columns ``trainer`` and ``inference``; the mask is prime-rl's loss mask. Sequences are named
    ``step/rank/number`` after their export step.

    Raises:
      OSError: there is no such file.
      ValueError: no file is there, another schema version, or a field is missing.
    """
    place = Path(path)
    files = sorted(place.rglob("rank_*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{place}: no rank_*.jsonl in it, as prime-rl's token export writes")
    sequences = []
    for file in files:
        for line, record in json_lines(file):
            if record.get("schema_version") != PRIME_RL_SCHEMA:
                raise ValueError(
                    f"{file}:{line}: schema_version {record.get('schema_version')!r}, expected {PRIME_RL_SCHEMA}"
                )
            try:
                run = f"{record['run_id']}/" if record.get("run_id") else ""
                sequences.append(
                    {
                        "sequence_id": f"{run}{record['export_step']}/{record['rank']}/{record['export_sequence_idx']}",
                        "token_ids": record["token_ids"],
                        "response_mask": record["loss_mask"],
                        "logprobs": {ours: record[theirs] for ours, theirs in _PRIME_RL_COLUMNS.items()},
                    }
                )
            except KeyError as error:
                raise ValueError(f"{file}:{line}: field {error} of prime-rl's token export is missing") from error
    sources = {
        "trainer": ColumnSource(engine="prime-rl trainer", role="trainer"),
        "inference": ColumnSource(engine="vllm", role="rollout"),
    }
    return _assemble(place, sequences, sources, {})


def _sequence(record: _Record, default_id: str) -> _Record:
    """A record in its full form; columns that cover the response only are padded in front."""
    if "token_ids" in record:
        token_ids, mask, front = record["token_ids"], record["response_mask"], 0
    else:
        front = len(record["prompt_ids"])
        token_ids = record["prompt_ids"] + record["response_ids"]
        mask = [False] * front + record.get("response_mask", [True] * len(record["response_ids"]))
    columns = {}
    for name, values in record.get("logprobs", {}).items():
        short = front and len(values) == len(token_ids) - front
        columns[name] = [None] * front + values if short else values
        if len(columns[name]) != len(token_ids):
            raise ValueError(f"column {name!r} has {len(values)} entries, expected {len(token_ids)}")
    if len(mask) != len(token_ids):
        raise ValueError(f"response_mask must have {len(token_ids)} entries, got {len(mask)}")
    name = str(record.get("sequence_id", default_id))
    return {"sequence_id": name, "token_ids": token_ids, "response_mask": mask, "logprobs": columns}


def _assemble(
    place: Path, sequences: list[_Record], sources: Mapping[str, ColumnSource], sampling: Mapping[str, Any]
) -> TokenDump:
    if not sequences:
        raise ValueError(f"{place}: there is no sequence in it")
    names = list(sequences[0]["logprobs"])
    for sequence in sequences:
        if sorted(sequence["logprobs"]) != sorted(names):
            raise ValueError(
                f"{place}: sequence {sequence['sequence_id']!r} has columns {sorted(sequence['logprobs'])}, expected "
                f"{sorted(names)} as the first"
            )
    unknown = sorted(set(sources) - set(names))
    if unknown:
        raise ValueError(f"{place}: the header describes columns {unknown} that no sequence has")
    try:
        return make_dump(
            [sequence["sequence_id"] for sequence in sequences],
            [sequence["token_ids"] for sequence in sequences],
            [sequence["response_mask"] for sequence in sequences],
            {name: [sequence["logprobs"][name] for sequence in sequences] for name in names},
            sources,
            sampling,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error
