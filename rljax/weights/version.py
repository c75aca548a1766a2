"""What a version of the weights is, in its directory: ``version.json``, written last, and the files that it names.

A version is dense, or a delta against the version before it, or both: then it is an anchor, from which a server starts
that has nothing to apply a delta to. A tensor may lie in several pieces, written by the processes that hold its shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec
import xxhash

from rljax.weights.checksum import Checksum
from rljax.weights.region import Region

FORMAT = 1  # all files are beside version.json
FORMAT_OF_PLACES = 2  # some are elsewhere: ``FileRecord.at``
VERSION_FILE = "version.json"


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a tensor in a safetensors file.

    Attributes:
      tensor: Hugging Face name.
      region: where in the tensor it is.
      file: that has it, beside ``version.json``.
      key: under which the file has it; of a delta, with ``.gaps`` and ``.values`` behind it (see ``delta.Delta``).
      changed: of a delta, the number of changed elements.
      gap_type: of a delta, the type of its gaps.
    """

    tensor: str
    region: Region
    file: str
    key: str
    changed: int = 0
    gap_type: str = ""


class TensorRecord(msgspec.Struct, frozen=True):
    """What a tensor must be once the version is there: its shape and its checksum."""

    shape: tuple[int, ...]
    sums: Checksum


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a version.

    Attributes:
      bytes: its size (bytes).
      xxh3: hexadecimal xxh3-64.
      at: URL of the server that has it, as ``AT/VERSION/FILE``; "": it is beside ``version.json``.
    """

    bytes: int
    xxh3: str
    at: str = ""


class Base(msgspec.Struct, frozen=True):
    """The version that a delta is against: its directory's name, and the digest of its tensors' checksums."""

    name: str
    digest: str


class Version(msgspec.Struct, frozen=True):
    """The content of ``version.json``.

    Attributes:
      format: 1; 2 where a file is not beside ``version.json``.
      name: of the version's directory.
      tag: what servers call it.
      dtype: of all tensors.
      tensors: by Hugging Face name.
      files: by name.
      dense: the pieces that make up the tensors; none in a version that is a delta alone.
      delta: the pieces of a delta; none in one without.
      base: of the delta.
    """

    name: str
    tag: str
    dtype: str
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    dense: tuple[Piece, ...] = ()
    delta: tuple[Piece, ...] = ()
    base: Base | None = None
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Of its tensors' names and checksums: two versions of one digest hold the same bits."""
        return sums_digest({name: record.sums for name, record in self.tensors.items()})

    def files_of(self, pieces: Iterable[Piece]) -> list[str]:
        """The names of the files that have ``pieces``, each once."""
        return list(dict.fromkeys(piece.file for piece in pieces))

    def num_bytes(self, pieces: Iterable[Piece]) -> int:
        """Of those files (bytes)."""
        return sum(self.files[file].bytes for file in self.files_of(pieces))

    def check(self) -> None:
        """Raises ValueError where it contradicts itself, or names a file outside its directory."""
        if self.format not in (FORMAT, FORMAT_OF_PLACES):
            raise ValueError(f"format {self.format}; this program reads {FORMAT} and {FORMAT_OF_PLACES}")
        if not self.tensors or not (self.dense or self.base):
            raise ValueError("neither a dense version nor a delta")
        for file in self.files:
            if file in ("", ".", "..") or PurePosixPath(file).name != file:
                raise ValueError(f"a file outside its directory: {file!r:.80}")
        if self.format != format_of(self.files):
            raise ValueError(f"format {self.format}, but the files are those of {format_of(self.files)}")
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


def format_of(files: Mapping[str, FileRecord]) -> int:
    """That of a version with these files."""
    return FORMAT_OF_PLACES if any(record.at for record in files.values()) else FORMAT


def sums_digest(sums: Mapping[str, Checksum]) -> str:
    """One hexadecimal number of tensors' names and checksums, whatever their order."""
    text = msgspec.json.encode(sorted(sums.items()))
    return xxhash.xxh3_64(text).hexdigest()


class Named(Protocol):
    """What bears the name and the tag of a version."""

    @property
    def name(self) -> str:
        """Of the version's directory."""

    @property
    def tag(self) -> str:
        """What servers call it."""


def is_newer(one: Named, other: Named) -> bool:
    """Whether ``one`` is a version of the same run as ``other`` that was written later."""
    (run, _, _), (name, _, number) = one.tag.rpartition("."), one.name.rpartition("-")
    (other_run, _, _), (other_name, _, other_number) = other.tag.rpartition("."), other.name.rpartition("-")
    counted = bool(name and other_name) and number.isdecimal() and other_number.isdecimal()
    return counted and run == other_run and int(number) > int(other_number)


def write_version(directory: Path, version: Version) -> None:
    """Writes ``version.json``, all of it or nothing. Raises OSError."""
    path = directory / VERSION_FILE
    path.with_suffix(".new").write_bytes(msgspec.json.encode(version))
    path.with_suffix(".new").replace(path)


def parse_version(content: bytes, name: str) -> Version:
    """The version in directory ``name`` from its ``version.json``.

    Raises:
      ValueError: it is none, or another version's.
    """
    try:
        version = msgspec.json.decode(content, type=Version)
        version.check()
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{name}/{VERSION_FILE} cannot be used: {error}") from error
    if version.name != name:
        raise ValueError(f"{name}/{VERSION_FILE} is of the version {version.name!r:.80}")
    return version
