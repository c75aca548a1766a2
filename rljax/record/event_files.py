"""Reads the numbers of TensorBoard event files. It needs the package tensorboardX."""

import itertools
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from rljax.errors import ConfigError

# The formats of a number in the bytes of a tensor, by the number of its dtype.
TENSOR_FORMATS = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 17: "<H", 19: "<e", 22: "<I", 23: "<Q"}
BFLOAT16 = 14
_DAMAGED = "not a TensorBoard event file, or a damaged one:"


def events_of(path: Path) -> Iterator[event_pb2.Event]:
    """Yields the events of an event file, whose records are a length, its checksum, the event and its checksum.

    A file may end inside its last record if its writer was killed. A line on stderr then names the last whole record.
    Raises ConfigError if a checksum is wrong or a record is not an event; the message names the record.
    """
    data, start, step = path.read_bytes(), 0, "no step"
    for number in itertools.count(1):
        head, body = data[start : start + 12], start + 12
        end = body + int.from_bytes(head[:8], "little")
        if len(head) == 12 and not _is_whole(head):
            raise ConfigError(f"{path}: {_DAMAGED} the length of record {number} is wrong, after {step}")
        if len(head) < 12 or end + 4 > len(data):
            if head:
                print(f"{path} ends inside record {number}: read up to {step}", file=sys.stderr)
            return
        if not _is_whole(data[body : end + 4]):
            raise ConfigError(f"{path}: {_DAMAGED} the checksum of record {number} is wrong, after {step}")
        try:
            event = event_pb2.Event.FromString(data[body:end])
        except DecodeError as error:
            raise ConfigError(f"{path}: {_DAMAGED} record {number} is not an event, after {step}") from error
        yield event
        start, step = end + 4, f"step {event.step}"


def _is_whole(content: bytes) -> bool:
    """Returns whether the last four bytes are the checksum of the bytes before them."""
    return masked_crc32c(content[:-4]) == int.from_bytes(content[-4:], "little")


def scalar_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields each scalar of an event file, with its step, as one row."""
    for event in events_of(path):
        for value in event.summary.value:
            if (number := scalar_of(value)) is not None:
                yield {"step": event.step, value.tag: number}


def scalar_of(value: Any) -> float | None:
    """Returns the number in a summary value: a plain number, or a tensor with one element. None for other values."""
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor
    if not value.HasField("tensor") or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    numbers = [*tensor.float_val, *tensor.double_val, *tensor.int_val, *tensor.int64_val]
    if numbers:
        return numbers[0]
    content = tensor.tensor_content or b"".join(struct.pack("<H", bits & 0xFFFF) for bits in tensor.half_val)
    form = TENSOR_FORMATS.get(tensor.dtype)
    if tensor.dtype == BFLOAT16:
        form, content = "<f", bytes(2) + content
    return struct.unpack(form, content)[0] if form and len(content) == struct.calcsize(form) else None
