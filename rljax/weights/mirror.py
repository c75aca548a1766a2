"""The newest version of the weights in the memory of a server's machine, which all servers of the machine load.

A mirror is a directory with one version, written whole, with a file for each tensor. Deltas change the files in place.
A lock keeps readers out meanwhile. Every bit is checked. Before a delta is applied, each file must still have the hash
that was recorded when it was last known to be right. After the delta each tensor must have the trainer's checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rljax.weights.delta import decode_piece
from rljax.weights.format import (
    VERSION_FILE,
    Checksum,
    FileRecord,
    Piece,
    TensorRegion,
    Version,
    mapped,
    read_version,
    write_tensors,
    write_version,
    xxh3_of,
)
from rljax.weights.sums import changed_checksum, named_few, region_checksum

THREADS = min(8, os.cpu_count() or 1)


class DamagedError(RuntimeError):
    """An error of weights whose bits are not as expected. The message names a version, a path or a few tensors."""


class Mirror:
    """A directory with one whole version. It is changed under ``locked()`` and read under ``locked(shared=True)``.

    ``check_s`` counts the seconds spent on the hashes of files and the checksums of whole tensors. The checksums after
    a delta come from the changed elements, while the delta is applied, and are not counted.
    """

    def __init__(self, root: Path) -> None:
        """Makes the directory ``root``, for this user only, if there is none. Raises OSError."""
        self.root, self.check_s = root, 0.0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Locks the mirror (flock) for a ``with`` block: against all users, or with ``shared`` only against changes."""
        with open(self.root / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield

    @property
    def version(self) -> Version | None:
        """The version that the mirror holds; None if there is none, or if a change was not completed."""
        try:
            return read_version(self.root)
        except (OSError, ValueError):
            return None

    def check(self) -> None:
        """Raises DamagedError if the mirror holds no version, or a file no longer has its recorded hash."""
        version = self.version
        if version is None:
            raise DamagedError(f"{self.root} holds no whole version")

        def differs(piece: Piece) -> bool:
            path = self.root / piece.file
            return not path.is_file() or xxh3_of(path) != version.files[piece.file].xxh3

        with self._timed(), ThreadPoolExecutor(THREADS) as pool:
            wrong = pool.map(differs, version.dense)
            changed = [piece.tensor for piece, found in zip(version.dense, wrong, strict=True) if found]
        _refuse(changed, "not as it came")

    def fill(self, version: Version, paths: Mapping[str, Path]) -> None:
        """Replaces the content of the mirror by a version that is written whole (dense).

        ``paths`` has the paths of the version's files by name. The caller has checked their hashes. Raises DamagedError
        if a tensor lacks the version's checksum, or a file cannot be used. The mirror then holds no version.
        """
        self.clear()
        files = {name: f"{number:05d}.safetensors" for number, name in enumerate(version.tensors)}
        pieces = _by_tensor(version.dense)

        def take(name: str) -> FileRecord:
            shape = version.tensors[name].shape
            bits = _assembled(shape, pieces[name], sources)
            with open(self.root / files[name], "wb") as file:
                return write_tensors(file, {name: (version.dtype, shape, bits)})

        def summed(name: str) -> Checksum:
            whole = TensorRegion.whole(version.tensors[name].shape)
            return region_checksum(mapped(self.root / files[name])[name], whole)

        with ThreadPoolExecutor(THREADS) as pool:
            with _damaged_if_unusable(version):
                sources = {file: mapped(paths[file]) for file in version.files_of(version.dense)}
                records = dict(zip(files, pool.map(take, files), strict=True))
            with self._timed():
                largest_first = sorted(files, key=lambda name: -version.tensors[name].sums.count)
                sums = dict(zip(largest_first, pool.map(summed, largest_first), strict=True))
        self._record(version, files, sums, records)

    def apply(self, version: Version, paths: Mapping[str, Path]) -> None:
        """Applies a delta to the version that the mirror holds, which must be the delta's base.

        ``paths`` and the errors are as in :meth:`fill`.
        """
        before = self.version
        assert before is not None
        assert version.base is not None
        assert before.digest == version.base.digest
        (self.root / VERSION_FILE).unlink()
        files = {piece.tensor: piece.file for piece in before.dense}
        pieces = _by_tensor(version.delta)

        def take(name: str) -> Checksum:
            sums = before.tensors[name].sums
            changing = [piece for piece in pieces[name] if piece.changed]
            if not changing:
                return sums
            flat = mapped(self.root / files[name], writable=True)[name]
            for piece in changing:
                places, new = decode_piece(piece, sources[piece.file], flat.dtype)
                sums = changed_checksum(sums, flat[places], new, places)
                flat[places] = new
            return sums

        with ThreadPoolExecutor(THREADS) as pool, _damaged_if_unusable(version):
            sources = {file: mapped(paths[file]) for file in version.files_of(version.delta)}
            sums = dict(zip(version.tensors, pool.map(take, version.tensors), strict=True))
        kept = (name for name in sums if before.tensors[name] == version.tensors[name])
        self._record(version, files, sums, {name: before.files[files[name]] for name in kept})

    def clear(self) -> None:
        """Removes the version that the mirror holds."""
        (self.root / VERSION_FILE).unlink(missing_ok=True)
        for path in self.root.glob("*.safetensors"):
            path.unlink()

    def _record(
        self, version: Version, files: Mapping[str, str], sums: Mapping[str, Checksum], known: Mapping[str, FileRecord]
    ) -> None:
        """Compares the tensors' checksums with the version's, and writes ``version.json``.

        ``known`` has the records of files that need not be read again. Raises DamagedError.
        """
        tensors = version.tensors
        _refuse([name for name in tensors if sums[name] != tensors[name].sums], f"other than in {version.tag}")

        def record(name: str) -> FileRecord:
            path = self.root / files[name]
            return known.get(name) or FileRecord(path.stat().st_size, xxh3_of(path))

        with self._timed(), ThreadPoolExecutor(THREADS) as pool:
            records = {files[name]: found for name, found in zip(tensors, pool.map(record, tensors), strict=True)}
        dense = tuple(Piece(name, TensorRegion.whole(tensors[name].shape), files[name], name) for name in tensors)
        write_version(self.root, Version(version.name, version.tag, version.dtype, tensors, records, dense))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.check_s += time.monotonic() - began


@contextlib.contextmanager
def _damaged_if_unusable(version: Version) -> Iterator[None]:
    try:
        yield
    except (LookupError, ValueError) as error:
        raise DamagedError(f"{version.name} cannot be used: {error}") from error


def _by_tensor(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.tensor].append(piece)
    return found


def _assembled(
    shape: Sequence[int], pieces: Sequence[Piece], sources: Mapping[str, Mapping[str, np.ndarray]]
) -> np.ndarray:
    """Returns the bits of the tensor that consists of ``pieces``. A tensor in one piece is not copied."""
    parts, whole = [sources[piece.file][piece.key] for piece in pieces], TensorRegion.whole(shape)
    if len(parts) == 1:
        return parts[0]
    matrix = np.empty((whole.rows, whole.width), parts[0].dtype)
    for piece, bits in zip(pieces, parts, strict=True):
        region = piece.region
        if bits.dtype != matrix.dtype:
            raise ValueError(f"{piece.file} has another {piece.key}")
        rows = slice(region.row, region.row + region.rows)
        matrix[rows, region.column : region.column + region.width] = bits.reshape(region.rows, region.width)
    return matrix


def _refuse(names: list[str], how: str) -> None:
    if names:
        count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        raise DamagedError(f"{count} {how}: {named_few(names)}")
