"""Reads the rows of a request's body into typed records.

A body is decoded only as far as it has rows. So memory is bounded by a small multiple of its size, whatever it holds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from rljax.rollout.external.rows import PostedRow, RowLimits, lacking

MOST_ROWS = 8192
"""The most rows of one request. To check them takes a few seconds, in which other requests wait."""
JSON, LINES, MSGPACK = "application/json", ("application/jsonl", "application/x-ndjson"), "application/msgpack"
"""The content types: JSON (one object, or an array), JSON lines, and msgpack (an array)."""

_Number = bool | int | float | None
_Numbers = list[_Number] | None | UnsetType
_Lists = list[tuple[_Number, ...] | None] | None | UnsetType
_PYTHON = {b"NaN": b"null", b"Infinity": b"1e308"}  # what JSON has for the numbers that Python writes


class _Sent(msgspec.Struct):
    """A row as it was sent. The types are wide, so that ``rows`` checks the values with its own messages."""

    group: str | _Number | UnsetType = UNSET
    prompt_ids: _Numbers = UNSET
    token_ids: _Numbers = UNSET
    logprobs: _Numbers = UNSET
    reward: str | _Number | UnsetType = UNSET
    version: list[_Number] | _Number | UnsetType = UNSET
    mask: _Numbers = UNSET
    turns: _Numbers = UNSET
    trajectory: str | _Number | UnsetType = UNSET
    truncated: str | _Number | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raises ValueError if a column is missing. So the first row that is none ends the decoding."""
        if missing := lacking(as_row(self)):
            raise ValueError(f"lacks {missing}")


def as_row(sent: msgspec.Struct) -> PostedRow:
    """Returns the columns that were sent."""
    return {name: value for name, value in msgspec.structs.asdict(sent).items() if value is not UNSET}


def make_reader(limits: RowLimits) -> Callable[[bytes | bytearray, str], list[tuple[int, PostedRow]]]:
    """Returns a function from a body and its content type to the rows with their numbers, from 1.

    The likeliest tokens and the routes are read only where ``limits`` needs them. The function raises ValueError with
    one line if the body cannot be read, or has no row or more than ``MOST_ROWS``.
    """
    lists = ["top_ids", "top_logprobs"] if limits.sampling.reported else []
    lists += ["routes"] if limits.routes else []
    sent: Any = msgspec.defstruct("_SentWithLists", [(name, _Lists, UNSET) for name in lists], bases=(_Sent,))
    rows: Any = Annotated[list[sent], msgspec.Meta(max_length=MOST_ROWS)]
    one, several = msgspec.json.Decoder(sent), msgspec.json.Decoder(rows | sent)
    packed = msgspec.msgpack.Decoder(rows | sent)

    def read(body: bytes | bytearray, kind: str) -> list[tuple[int, PostedRow]]:
        if kind in LINES:
            found = []
            for number, line in enumerate(_lines(body), 1):
                if number > MOST_ROWS:
                    raise ValueError(f"POST: a request may have {MOST_ROWS} rows at most")
                found.append(_decode(one, line, f"POST: row {number}"))
        else:
            values = _decode(packed if kind == MSGPACK else several, body, "POST")
            found = values if isinstance(values, list) else [values]
        if not found:
            raise ValueError("POST: the request has no row")
        return [(number, as_row(each)) for number, each in enumerate(found, 1)]

    return read


def _lines(body: bytes | bytearray) -> Iterator[bytes]:
    return (line for line in io.BytesIO(body) if line.strip())


def _decode(decoder: Any, body: bytes | bytearray, place: str) -> Any:
    """Returns the decoded values. Raises ValueError with one line that names the row and the column."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if not isinstance(decoder, msgspec.json.Decoder) or not re.search(rb"NaN|Infinity", body):
                raise
            return decoder.decode(_without_nan(body))
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `")
        found = re.match(r"(?:key` in `)?\$(?:\[(\d+)\])?(?:\.(\w+))?(?:\[(\d+)\])?", path)
        row, column, entry = found.groups() if found else (None, None, None)
        if row or (column and "row" not in place):
            place += f": row {int(row or 0) + 1}"
        place += f": {column}" if column else ""
        place += f" at token {entry}" if entry else ""
        raise ValueError(f"{place} {said}" if said.startswith("lacks") else f"{place}: {said}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON or msgpack that can be read ({error})") from error


def _without_nan(text: bytes | bytearray) -> bytes:
    """Returns a JSON text that has null for each NaN outside of strings, and 1e308 for each Infinity."""
    hidden = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    plain, end, in_string = bytearray(), 0, False
    for found in re.finditer(rb"NaN|Infinity", hidden):
        in_string ^= hidden.count(b'"', end, found.start()) % 2 == 1
        plain += text[end : found.start()] + (found[0] if in_string else _PYTHON[found[0]])
        end = found.end()
    return bytes(plain + text[end:])
