"""Reads the rows of a request's body into typed records.

A body is decoded only as far as it has rows. So memory is bounded by a small multiple of its size, whatever it holds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from rljax.rollout.external.rows import PostedRow, RowLimits, row_type, wrong_type

MOST_ROWS = 8192
"""The most rows of one request. To check them takes a few seconds, in which other requests wait."""
JSON, LINES, MSGPACK = "application/json", ("application/jsonl", "application/x-ndjson"), "application/msgpack"
"""The content types: JSON (one object, or an array), JSON lines, and msgpack (an array)."""

_PYTHON = {b"NaN": b"null", b"Infinity": b"1e308"}  # what JSON has for the numbers that Python writes


def make_reader(limits: RowLimits) -> Callable[[bytes | bytearray, str], list[tuple[int, PostedRow]]]:
    """Returns a function from a body and its content type to the rows with their numbers, from 1.

    The function raises ValueError with one line if the body cannot be read, or has no row or more than ``MOST_ROWS``.
    """
    row: Any = row_type(limits)
    rows: Any = Annotated[list[row], msgspec.Meta(max_length=MOST_ROWS)]
    one, several = msgspec.json.Decoder(row), msgspec.json.Decoder(rows | row)
    packed = msgspec.msgpack.Decoder(rows | row)

    def read(body: bytes | bytearray, kind: str) -> list[tuple[int, PostedRow]]:
        if kind in LINES:
            found = []
            for number, line in enumerate((line for line in io.BytesIO(body) if line.strip()), 1):
                if number > MOST_ROWS:
                    raise ValueError(f"POST: a request may have {MOST_ROWS} rows at most")
                found.append(_decode(one, line, f"POST: row {number}"))
        else:
            values = _decode(packed if kind == MSGPACK else several, body, "POST")
            found = values if isinstance(values, list) else [values]
        if not found:
            raise ValueError("POST: the request has no row")
        return list(enumerate(found, 1))

    return read


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
        raise ValueError(wrong_type(error, place)) from error
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
