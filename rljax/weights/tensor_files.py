"""Safetensors files: written with their hash on the way, and mapped into memory, for changes in place, too.

The library that reads models elsewhere neither hashes the files that it writes nor maps a file for writing. Tensors
are bits here: uint8, uint16 or uint32, whatever dtype the file says that they have.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rljax.weights.format import FileRecord

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_HEADER_BYTES = 100 * 2**20  # no header is longer


def write(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], bytes | np.ndarray]]) -> FileRecord:
    """Writes a file of several tensors, and returns its size and hash.

    Args:
      path: The file.
      tensors: The dtype, shape and content of each tensor by its key, in the order of the file.

    Raises:
      OSError: The file cannot be written.
    """
    header = _header({key: (dtype, shape) for key, (dtype, shape, _) in tensors.items()})
    hasher, size = xxhash.xxh3_64(), 0
    with open(path, "wb") as file:
        for content in (header, *(content for _, _, content in tensors.values())):
            data = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else _bytes_of(content)
            file.write(data.data)
            hasher.update(data.data)
            size += data.nbytes
    return FileRecord(size, hasher.hexdigest())


def create(path: Path, key: str, dtype: str, shape: Sequence[int], content: np.ndarray | None = None) -> None:
    """Writes a file of one tensor.

    Args:
      path: The file.
      key: The tensor's key.
      dtype: The tensor's dtype.
      shape: The tensor's shape.
      content: The bits of the tensor. None: zeros, for which room is kept.

    Raises:
      OSError: The file cannot be written, or there is no room for it.
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
    """Maps a file into memory.

    Args:
      path: The file.
      writable: Whether changes of the arrays change the file.

    Returns:
      The bits of each tensor by its key: a vector of uint8, uint16 or uint32.

    Raises:
      OSError: The file cannot be read.
      ValueError: The file is no safetensors file of such tensors.
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
    """Yields the key, header entry and content of each tensor of a safetensors file, without a copy.

    Args:
      data: The bytes of the file, uint8.

    Raises:
      LookupError, TypeError, AttributeError, ValueError: The bytes are no safetensors file.
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
    """Returns the hexadecimal xxh3-64 of a file's content. Raises OSError."""
    hasher = xxhash.xxh3_64()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                hasher.update(content)
    return hasher.hexdigest()


def weights_hash(directory: str | os.PathLike[str]) -> str:
    """Returns ``sha256:...`` over names, dtypes, shapes and bytes of the safetensors in a directory.

    Equal weights have the same hash, whatever files they are spread over.

    Raises:
      ValueError: The directory has no safetensors file.
    """
    tensors = [
        (name, f"{entry['dtype']} {entry['shape']}", content)
        for path in Path(directory).glob("*.safetensors")
        for name, entry, content in entries(np.memmap(path, np.uint8, mode="r"))
    ]
    if not tensors:
        raise ValueError(f"no *.safetensors in {os.fspath(directory)}")
    digest = hashlib.sha256()
    for name, kind, content in sorted(tensors, key=lambda entry: entry[0]):
        digest.update(f"{name} {kind}\n".encode())
        digest.update(content.data)
    return f"sha256:{digest.hexdigest()}"


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
