"""The format of one version of the weights: a directory with ``version.json``, written last, and safetensors files.

A version is dense (written whole), or a delta against the version before it, or both. A dense version is an anchor: a
server starts from it if no delta applies to what the server holds. A tensor may be stored in several pieces, each
written by a process that holds a shard of it. docs/weights.md describes every entry.

This module writes safetensors itself, because the safetensors library neither hashes a file while it writes it nor maps
it for changes in place. Here a tensor is an array of bits (uint8, uint16 or uint32), not of its dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from rljax.distributed.files import write_whole

PROTOCOL = 10
"""The number of the protocol between trainer and server's plugin; both must have the same one."""
VERSION_FILE = "version.json"
PREFIX = "rljax-weights-"
"""The beginning of the name of a run's directory of weights."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint8": "U8"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}
_HEADER_BYTES = 100 * 2**20  # no header is longer


@dataclass(frozen=True)
class Checksum:
    """The checksum of a tensor, or of a part of it: three sums mod 2^32 over its elements (``weights.sums``).

    An element's place is its flat index in the tensor, or in the part if the position of the part is unknown.
    """

    count: int  # the number of elements
    first: int  # the sum of the first mixed values
    second: int  # the sum of the second mixed values
    placed: int  # the sum of the first mixed values, each times the weight of its place

    @classmethod
    def from_sums(cls, count: int, first: int, second: int, placed: int) -> Checksum:
        """Returns the checksum with these sums mod 2^32. The arguments may be negative or larger."""
        return cls(count, first % 2**32, second % 2**32, placed % 2**32)


@dataclass(frozen=True)
class TensorRegion:
    """A rectangle of a tensor. The tensor counts as a matrix: the first axis by all other axes together.

    A vector counts as a matrix of one row.
    """

    row: int  # the first row of the rectangle
    rows: int  # the number of its rows
    column: int  # the first column of the rectangle
    width: int  # the number of its columns
    stride: int  # the number of columns of the whole tensor

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorRegion:
        """Returns the region that covers a whole tensor of this shape."""
        rows = shape[0] if len(shape) > 1 else 1
        width = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
        return cls(0, rows, 0, width, width)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Returns whether the region is a part of a tensor of this shape."""
        whole = TensorRegion.whole(shape)
        inside = 0 <= self.row <= self.row + self.rows <= whole.rows
        return inside and 0 <= self.column <= self.column + self.width <= self.stride == whole.stride

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.width

    @property
    def first(self) -> int:
        """The flat index of the region's first element in the tensor."""
        return self.row * self.stride + self.column


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a tensor, and its place in a safetensors file."""

    tensor: str  # the Hugging Face name of the tensor
    region: TensorRegion
    file: str
    key: str  # the key of the part's entry in the file; a delta has two entries: KEY.gaps and KEY.values
    changed: int = 0  # in a delta: the number of changed elements
    gap_type: str = ""  # in a delta: ``delta.Delta.gap_type``


class TensorRecord(msgspec.Struct, frozen=True):
    """The shape and the checksum of a whole tensor."""

    shape: tuple[int, ...]
    sums: Checksum


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The size and hash of a file, and the server that has it."""

    bytes: int
    xxh3: str  # the hexadecimal xxh3-64 of the file's content
    at: str = ""  # the URL of the server that has AT/VERSION/FILE; "": the file is beside version.json


class Base(msgspec.Struct, frozen=True):
    """The version that a delta is against: the name of its directory, and its ``Version.digest``."""

    name: str
    digest: str


class Version(msgspec.Struct, frozen=True):
    """The content of ``version.json``."""

    name: str  # the name of the version's directory
    tag: str  # the name by which servers call the version
    dtype: str  # the dtype of all tensors
    tensors: dict[str, TensorRecord]  # every tensor, by Hugging Face name
    files: dict[str, FileRecord]  # every file of the version, by its name
    dense: tuple[Piece, ...] = ()  # the pieces of the whole tensors; empty in a version that is only a delta
    delta: tuple[Piece, ...] = ()  # the pieces of the delta; empty in a version without one
    base: Base | None = None  # the version that the delta is against

    @property
    def digest(self) -> str:
        """A hexadecimal hash of all tensors' names and checksums. Versions with the same bits have the same digest."""
        sums = {name: record.sums for name, record in self.tensors.items()}
        return xxhash.xxh3_64(msgspec.json.encode(sorted(sums.items()))).hexdigest()

    def files_of(self, pieces: Iterable[Piece]) -> list[str]:
        """Returns the names of the files that hold ``pieces``, each name once."""
        return list(dict.fromkeys(piece.file for piece in pieces))

    def num_bytes(self, pieces: Iterable[Piece]) -> int:
        """Returns the total size of the files that hold ``pieces`` (bytes)."""
        return sum(self.files[file].bytes for file in self.files_of(pieces))

    def check(self) -> None:
        """Raises ValueError if the version contradicts itself, or names a file outside its directory."""
        if not self.tensors or not (self.dense or self.base):
            raise ValueError("neither a dense version nor a delta")
        for file in self.files:
            if file in ("", ".", "..") or PurePosixPath(file).name != file:
                raise ValueError(f"a file outside its directory: {file!r:.80}")
        for pieces in filter(None, (self.dense, self.delta)):
            elements = dict.fromkeys(self.tensors, 0)
            for piece in pieces:
                record = self.tensors.get(piece.tensor)
                if record is None or piece.file not in self.files or not piece.region.lies_in(record.shape):
                    raise ValueError(f"a piece of {piece.tensor!r:.80} that does not fit")
                elements[piece.tensor] += piece.region.size
            for name, record in self.tensors.items():
                if elements[name] != math.prod(record.shape) or record.sums.count != elements[name]:
                    raise ValueError(f"the pieces of {name!r:.80} are not the whole tensor")


def is_newer(one: Version, other: Version) -> bool:
    """Returns whether ``one`` is of the same run as ``other`` and was written later."""
    (run, _, _), (name, _, number) = one.tag.rpartition("."), one.name.rpartition("-")
    (other_run, _, _), (other_name, _, other_number) = other.tag.rpartition("."), other.name.rpartition("-")
    counted = bool(name and other_name) and number.isdecimal() and other_number.isdecimal()
    return counted and run == other_run and int(number) > int(other_number)


def write_version(directory: Path, version: Version) -> None:
    """Writes ``version.json``, which appears whole by a rename. Raises OSError."""
    write_whole(directory / VERSION_FILE, msgspec.json.encode(version))


def read_version(directory: Path) -> Version:
    """Returns the version in ``directory``. Raises OSError if it cannot be read, or ValueError if it is not usable."""
    return parse_version((directory / VERSION_FILE).read_bytes())


def parse_version(content: bytes, name: str | None = None) -> Version:
    """Returns the version that the content of a ``version.json`` describes.

    Raises ValueError if the content cannot be used, or if the version has another name than ``name``. With None any
    name is allowed.
    """
    path = VERSION_FILE if name is None else f"{name}/{VERSION_FILE}"
    try:
        version = msgspec.json.decode(content, type=Version)
        version.check()
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    if name not in (None, version.name):
        raise ValueError(f"{path} is of the version {version.name!r:.80}")
    return version


def write_tensors(file: BinaryIO, tensors: Mapping[str, tuple[str, Sequence[int], np.ndarray]]) -> FileRecord:
    """Writes tensors into an empty file as safetensors, and returns its size and hash.

    ``tensors`` has the dtype, the shape and the bits of each tensor by key, in the order of the file. Raises OSError,
    and ValueError if bits have another size than their dtype and shape.
    """
    entries, place = {}, 0
    for key, (dtype, shape, bits) in tensors.items():
        kind = _DTYPES[dtype]
        end = place + math.prod(shape) * _SIZES[kind]
        if bits.nbytes != end - place:
            raise ValueError(f"{bits.nbytes} bytes are not a tensor of {end - place}")
        entries[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    header = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    hasher = xxhash.xxh3_64()
    for content in (header, *(bits for _, _, bits in tensors.values())):
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        file.write(data)
        hasher.update(data)
    return FileRecord(header.size + place, hasher.hexdigest())


def mapped(path: Path, *, writable: bool = False) -> dict[str, np.ndarray]:
    """Maps a safetensors file into memory. Returns the bits of each tensor by its key: uint8, uint16 or uint32 vectors.

    With ``writable``, writing into the arrays changes the file. Raises OSError if the file cannot be opened, and
    ValueError if its header cannot be used.
    """
    data = _bytes_of(path, writable=writable)
    try:
        return {key: content.view(f"u{_SIZES[entry['dtype']]}") for key, entry, content in _entries(data)}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: the header of the safetensors file cannot be used: {error}") from error


def _bytes_of(path: Path, *, writable: bool = False) -> np.ndarray:
    """Maps a file into memory (uint8). Raises OSError."""
    with open(path, "r+b" if writable else "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=access), np.uint8)


def _entries(data: np.ndarray) -> Iterator[tuple[str, Mapping[str, Any], np.ndarray]]:
    """Yields the key, header entry and content (uint8) of each tensor in a file's bytes, without a copy."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 0 < length <= min(data.size - 8, _HEADER_BYTES):
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
    return xxhash.xxh3_64(_bytes_of(path).data).hexdigest()


def weights_hash(directory: str | os.PathLike[str]) -> str:
    """Returns ``sha256:...``, a hash over names, dtypes, shapes and bytes of all tensors in a directory's safetensors.

    The hash does not depend on how the tensors are spread over files. Raises ValueError if the directory has no
    safetensors.
    """
    tensors = [
        (name, f"{entry['dtype']} {entry['shape']}", content)
        for path in Path(directory).glob("*.safetensors")
        for name, entry, content in _entries(_bytes_of(path))
    ]
    if not tensors:
        raise ValueError(f"no *.safetensors in {os.fspath(directory)}")
    digest = hashlib.sha256()
    for name, kind, content in sorted(tensors, key=lambda entry: entry[0]):
        digest.update(f"{name} {kind}\n".encode())
        digest.update(content.data)
    return f"sha256:{digest.hexdigest()}"
