"""The newest version of the weights in a server machine's memory: its servers load it, deltas are applied to it.

One directory for all servers of a machine, changed in place. A lock keeps those who load out while it changes. Every
bit is accounted for: before a delta is applied, each file has the checksum that it had when it was known to be right;
after it, each tensor has the checksum that the trainer gave it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from rljax.weights import kept_delta, safetensors_file
from rljax.weights.checksum import Checksum
from rljax.weights.region import Region
from rljax.weights.sums import changed_checksum, region_checksum
from rljax.weights.version import Piece, TensorRecord, Version, sums_digest

_STATE = "state.json"
THREADS = min(8, os.cpu_count() or 1)

OfName = Callable[[str], Path]


class DamagedError(RuntimeError):
    """Bits are not what they must be; the message names the first few."""


class Held(msgspec.Struct, frozen=True):
    """A tensor of the mirror.

    Attributes:
      file: that has it.
      record: its shape and checksum.
      xxh3: of the file.
    """

    file: str
    record: TensorRecord
    xxh3: str


class State(msgspec.Struct, frozen=True):
    """What the mirror holds: a version's name, tag and dtype, and its tensors by name. None while it changes."""

    name: str
    tag: str
    dtype: str
    tensors: dict[str, Held]

    @property
    def digest(self) -> str:
        """As ``Version.digest``."""
        return sums_digest({name: held.record.sums for name, held in self.tensors.items()})


class Mirror:
    """A directory. What changes it is done under ``locked``, what reads it under ``locked(shared=True)``.

    Attributes:
      root: the directory.
      check_s: that taking checksums took so far (seconds); those of what a delta changes are taken as it is applied,
        and not in it.
    """

    def __init__(self, root: Path) -> None:
        """Makes the directory where there is none. Raises OSError."""
        self.root, self.check_s = root, 0.0
        root.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """One at a time, or all who only read. The lock is the kernel's: the directory is one machine's own."""
        with open(self.root / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield

    @property
    def state(self) -> State | None:
        """What it holds; None where that is nothing, or unknown."""
        try:
            return msgspec.json.decode((self.root / _STATE).read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError):
            return None

    def holds(self, version: Version) -> bool:
        """Whether it has that version's bits, by its own account."""
        state = self.state
        return state is not None and (state.tag, state.digest) == (version.tag, version.digest)

    def check(self) -> None:
        """Raises DamagedError where a file has changed since it was known to be right."""
        state = self.state
        if state is None:
            raise DamagedError(f"{self.root} holds no whole version")

        def differs(held: Held) -> bool:
            path = self.root / held.file
            return not path.is_file() or safetensors_file.xxh3_of(path) != held.xxh3

        with self._checking(), ThreadPoolExecutor(THREADS) as pool:
            wrong = pool.map(differs, state.tensors.values())
            changed = [name for name, found in zip(state.tensors, wrong, strict=True) if found]
        _refuse(changed, "not as it came")

    def fill(self, version: Version, path_of: OfName) -> None:
        """Takes a dense version; whatever was here is gone.

        Args:
          version: with dense pieces.
          path_of: a file of it by name, whose checksum was compared.

        Raises:
          DamagedError: a tensor is not what the version says; the mirror holds nothing then.
        """
        self.clear()
        sources = {file: safetensors_file.mapped(path_of(file)) for file in version.files_of(version.dense)}
        pieces = _by_tensor(version.dense)

        def take(number: int, name: str) -> str:
            record, file = version.tensors[name], f"{number:05d}.safetensors"
            whole = Region.whole(record.shape)
            if [piece.region for piece in pieces[name]] == [whole]:
                (piece,) = pieces[name]
                bits = sources[piece.file][piece.key]
                safetensors_file.create(self.root / file, name, version.dtype, record.shape, bits)
                return file
            safetensors_file.create(self.root / file, name, version.dtype, record.shape)
            matrix = safetensors_file.mapped(self.root / file, writable=True)[name].reshape(whole.rows, whole.width)
            for piece in pieces[name]:
                region, bits = piece.region, _piece(sources, piece, matrix.dtype)
                rows, columns = slice(region.row, region.row + region.rows), slice(region.column, None)
                matrix[rows, columns][:, : region.width] = bits.reshape(region.rows, region.width)
            return file

        def summed(name: str) -> Checksum:
            bits = safetensors_file.mapped(self.root / files[name])[name]
            return region_checksum(bits, Region.whole(version.tensors[name].shape))

        with ThreadPoolExecutor(THREADS) as pool:
            with _usable(version):
                files = dict(zip(version.tensors, pool.map(take, itertools.count(), version.tensors), strict=True))
            with self._checking():
                largest_first = sorted(files, key=lambda name: -version.tensors[name].sums.count)
                sums = dict(zip(largest_first, pool.map(summed, largest_first), strict=True))
        self._keep(version, files, sums, {})

    def apply(self, version: Version, path_of: OfName, *, keep: bool = False) -> None:
        """Changes what is here by a delta. Arguments and errors as ``fill``; here must be the version's base.

        ``keep``: keeps the delta beside the mirror, for servers that hold its base (``kept_delta``).
        """
        state = self.state
        assert state is not None
        assert version.base is not None
        assert state.digest == version.base.digest
        (self.root / _STATE).unlink()
        kept_delta.forget(self.root)
        paths = {file: path_of(file) for file in version.files_of(version.delta)}
        sources = {file: safetensors_file.mapped(path) for file, path in paths.items()}
        pieces = _by_tensor(version.delta)

        def take(name: str) -> Checksum:
            held = state.tensors[name]
            sums = held.record.sums
            changing = [piece for piece in pieces[name] if piece.changed]
            if not changing:
                return sums
            flat = safetensors_file.mapped(self.root / held.file, writable=True)[name]
            for piece in changing:
                places, new = kept_delta.places_of(piece, sources[piece.file], flat.dtype)
                sums = changed_checksum(sums, flat[places], new, places)
                flat[places] = new
            return sums

        with ThreadPoolExecutor(THREADS) as pool, _usable(version):
            sums = dict(zip(version.tensors, pool.map(take, version.tensors), strict=True))
        self._keep(version, {name: state.tensors[name].file for name in sums}, sums, state.tensors)
        if keep:
            kept_delta.keep(self.root, version, paths)

    def clear(self) -> None:
        """Removes what it holds."""
        (self.root / _STATE).unlink(missing_ok=True)
        kept_delta.forget(self.root)
        for path in self.root.glob("*.safetensors"):
            path.unlink()

    def remove(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _keep(
        self, version: Version, files: Mapping[str, str], sums: Mapping[str, Checksum], before: Mapping[str, Held]
    ) -> None:
        """Compares the tensors' checksums with the version's, and notes what is held now; files of ``before`` stay."""
        _refuse([name for name in files if sums[name] != version.tensors[name].sums], f"other than in {version.tag}")

        def held(name: str) -> Held:
            record, known = version.tensors[name], before.get(name)
            if known is not None and known.record == record:
                return known
            return Held(files[name], record, safetensors_file.xxh3_of(self.root / files[name]))

        with self._checking(), ThreadPoolExecutor(THREADS) as pool:
            listed = dict(zip(files, pool.map(held, files), strict=True))
        manifest = {"tag": version.tag, "files": list(files.values())}
        (self.root / "manifest.json").write_text(json.dumps(manifest))
        new = self.root / f"{_STATE}.new"
        new.write_bytes(msgspec.json.encode(State(version.name, version.tag, version.dtype, listed)))
        new.replace(self.root / _STATE)

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.check_s += time.monotonic() - began


@contextlib.contextmanager
def _usable(version: Version) -> Iterator[None]:
    """Within it content that is not what its version says it is raises DamagedError."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise DamagedError(f"{version.name} cannot be used: {error}") from error


def _by_tensor(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.tensor].append(piece)
    return found


def _piece(sources: Mapping[str, Mapping[str, np.ndarray]], piece: Piece, dtype: np.dtype) -> np.ndarray:
    bits = sources[piece.file][piece.key]
    if bits.dtype != dtype or bits.size != piece.region.size:
        raise ValueError(f"{piece.file} has another {piece.key}")
    return bits


def _refuse(names: list[str], how: str) -> None:
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        raise DamagedError(f"{count} {how}: {', '.join(names[:4])}{more}")
