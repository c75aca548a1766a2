"""Safetensors files written with their checksum on the way, and mapped into memory, for changes in place, too.

The library that reads models elsewhere neither hashes what it writes nor maps a file for writing. Tensors are bits
here: uint8, uint16 or uint32, whatever dtype the file says they have.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_HEADER_BYTES = 100 * 2**20  # no header is longer


class Written(NamedTuple):
    """What was written to a file: its size (bytes) and the hexadecimal xxh3-64 of its content."""

    bytes: int
    xxh3: str


def write(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], bytes | np.ndarray]]) -> Written:
    """Writes (dtype, shape, content) by key, in this order. Raises OSError."""
    header = _header({key: (dtype, shape) for key, (dtype, shape, _) in tensors.items()})
    hasher, size = xxhash.xxh3_64(), 0
    with open(path, "wb") as file:
        for content in (header, *(content for _, _, content in tensors.values())):
            data = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else _bytes_of(content)
            file.write(data.data)
            hasher.update(data.data)
            size += data.nbytes
    return Written(size, hasher.hexdigest())


def create(path: Path, key: str, dtype: str, shape: Sequence[int], content: np.ndarray | None = None) -> None:
    """Makes a file of one tensor, whose bits are ``content`` or zeros.

    Raises:
      OSError: it cannot be written, or there is no room for it.
      ValueError: ``content`` has another size.
    """
    header, size = _header({key: (dtype, shape)}), math.prod(shape) * _SIZES[_DTYPES[dtype]]
    with open(path, "wb") as file:
        file.write(header)
        if content is None:
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(header) + size)
        elif content.nbytes == size:
            file.write(_bytes_of(content).data)
        else:
            raise ValueError(f"{content.nbytes} bytes are not a tensor of {size}")


def mapped(path: Path, *, writable: bool = False) -> dict[str, np.ndarray]:
    """The bits of each tensor by key, flat, as uint8, uint16 or uint32 in the file itself.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no safetensors file of such tensors.
    """
    with open(path, "r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path} is no safetensors file")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)
    try:
        return {key: content.view(f"u{_SIZES[entry['dtype']]}") for key, entry, content in entries(data)}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: the header of the safetensors file cannot be used: {error}") from error


def entries(data: np.ndarray) -> Iterator[tuple[str, Mapping[str, Any], np.ndarray]]:
    """Key, header entry and content of each tensor of a safetensors file whose bytes are ``data``, without a copy.

    Raises:
      LookupError, TypeError, AttributeError, ValueError: it is none.
    """
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(data.size - 8, _HEADER_BYTES):
        raise ValueError("the file ends before the header does")
    content = data[8 + length :]
    for key, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if key != "__metadata__":
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= content.size:
                raise ValueError(f"{key} lies outside the file")
            yield key, entry, content[first:last]


def xxh3_of(path: Path) -> str:
    """The hexadecimal xxh3-64 of a file's content. Raises OSError."""
    hasher = xxhash.xxh3_64()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                hasher.update(content)
    return hasher.hexdigest()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    entries, place = {}, 0
    for key, (dtype, shape) in tensors.items():
        kind = _DTYPES[dtype]
        end = place + math.prod(shape) * _SIZES[kind]
        entries[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
