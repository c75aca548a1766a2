"""Writes the parts of tensors that one process holds: whole, or as what changed since the version before."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash

from rljax.weights.delta import Delta, encode
from rljax.weights.format import FileRecord, Piece, Region, bytes_of, file_header
from rljax.weights.sums import bits_of

SEEN_AFTER_S = 30.0  # longest until a file of another process is seen, as on NFS
_FILE_BYTES = 256 * 2**20  # of one dense file, unless one tensor is larger
_THREADS = min(8, os.cpu_count() or 1)
_SAMPLE = 65_536  # elements of a tensor that StreamWriter compares between versions


Kind = Literal["dense", "delta"]


class Part(NamedTuple):
    """A part of the tensor with this Hugging Face name, as a process holds it."""

    tensor: str
    shape: tuple[int, ...]  # of the whole tensor
    region: Region
    array: np.ndarray  # in the dtype that servers load; nobody changes it any more


MakeParts = Callable[[Any], Iterable[Part]]
"""A function from what is published to the parts of it that this process holds."""


class PartsSummary(msgspec.Struct, frozen=True):
    """The sums over a version's parts."""

    dtypes: tuple[str, ...]  # each once
    elements: int
    dense_bytes: int
    changed: float | None  # the elements that differ from the version before; None where there is no such version
    delta_bytes: int | None  # None where there is no delta
    shapes: dict[str, tuple[int, ...]]  # of the whole tensors by name


class WrittenFiles(msgspec.Struct, frozen=True):
    """The pieces that were written, and the record of each file that has them, by its name."""

    pieces: tuple[Piece, ...] = ()
    files: dict[str, FileRecord] = {}


class Writer(Protocol):
    """Writes the parts of a version that this process holds, or those of all processes."""

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Takes the parts of the next version, and compares them with the version before. Raises OSError.

        The tensors have the form that the writer was made for. A writer may write into ``directory`` already.
        """

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts whole, or before that what changed since the version before. Raises OSError."""

    def forget(self, directory: Path) -> None:
        """Gives up the version in ``directory``; the next version is compared with nothing."""

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of all versions but ``names``, where the directory's owner does not."""
        return


class PartWriter(Writer):
    """A Writer of one process. It keeps the parts of the newest version in memory; the next delta is against them.

    Of several processes each has one, which writes into the version's directory where all of them see it.
    """

    def __init__(self, parts: MakeParts, name: str = "0") -> None:
        """Takes the maker of the parts, and the beginning of the files' names, which differs between processes."""
        self._parts_of, self._name = parts, name
        self._parts: list[Part] = []
        self._deltas: list[Delta] | None = None

    def collect(self, tensors: Any, directory: Path | None = None) -> PartsSummary:
        """Takes the parts of the next version, and makes the delta to it; nothing is written yet."""
        before = {(part.tensor, part.region): part.array for part in self._parts}
        is_first, self._parts = not before, []
        deltas: list[Delta | None] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for part, delta in _few_ahead(pool, self._parts_of(tensors), before):
                self._parts.append(part)
                deltas.append(delta.result())
                before.pop((part.tensor, part.region), None)
        known = [delta for delta in deltas if delta is not None]
        has_delta = not is_first and not before and len(known) == len(deltas)
        self._deltas = known if has_delta else None
        if not has_delta:
            return _summary(self._parts, None, None)
        delta_bytes = sum(len(delta.gaps) + len(delta.values) for delta in known)
        return _summary(self._parts, sum(delta.changed for delta in known), delta_bytes)

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts whole, several to a file, or the delta to them. Raises OSError."""
        if kind == "dense":
            self._deltas = None
            return self._write_dense(directory)
        deltas, self._deltas = self._deltas, None
        assert deltas is not None
        return self._write_delta(directory, deltas)

    def wait(self, directory: Path, written: WrittenFiles) -> None:
        """Waits until process 0 sees what all processes wrote into ``directory``. Raises OSError if it does not."""
        deadline = time.monotonic() + SEEN_AFTER_S
        for name in sorted(name for name, record in written.files.items() if not record.at):
            path = directory / name
            while not (path.is_file() and path.stat().st_size == written.files[name].bytes):
                if time.monotonic() > deadline:
                    raise OSError(
                        f"process 0 does not see {name}, which another process wrote: rollout.transfer_dir must be a "
                        "directory that all of them see"
                    )
                time.sleep(0.05)

    def forget(self, directory: Path) -> None:
        """Forgets the parts of the version in ``directory``, so that the next version is compared with nothing."""
        self._parts, self._deltas = [], None

    def close(self) -> None:
        """Releases everything at the end of the run; may be called twice."""

    def _write_dense(self, directory: Path) -> WrittenFiles:
        groups: list[list[Part]] = []
        room = 0
        for part in self._parts:
            if part.array.nbytes > room:
                groups.append([])
                room = _FILE_BYTES
            groups[-1].append(part)
            room -= part.array.nbytes

        def write(number: int, group: Sequence[Part]) -> WrittenFiles:
            return _write_parts(directory, f"{self._name}-{number:04d}-dense.safetensors", group)

        with ThreadPoolExecutor(_THREADS) as pool:
            return merge_written(list(pool.map(write, itertools.count(), groups)))

    def _write_delta(self, directory: Path, deltas: Sequence[Delta]) -> WrittenFiles:
        file, content, pieces = f"{self._name}-delta.safetensors", {}, []
        for number, (part, delta) in enumerate(zip(self._parts, deltas, strict=True)):
            key = f"{number:06d}"
            pieces.append(Piece(part.tensor, part.region, file, key, delta.changed, delta.gap_type))
            if delta.changed:
                content[f"{key}.gaps"] = np.frombuffer(delta.gaps, np.uint8)
                content[f"{key}.values"] = np.frombuffer(delta.values, np.uint8)
        return WrittenFiles(tuple(pieces), {file: write_file(directory / file, content)})


class StreamWriter(Writer):
    """A Writer of whole tensors that has one of them in memory at a time, and writes no deltas.

    It keeps a sample of each tensor, to count the changed elements: a tensor of more than 65,536 elements counts by
    that many, evenly spaced.
    """

    def __init__(self) -> None:
        self._samples: dict[str, np.ndarray] = {}
        self._written = WrittenFiles()

    def collect(self, tensors: Iterable[tuple[str, np.ndarray]], directory: Path) -> PartsSummary:
        """Writes each of the (Hugging Face name, array) into a file of its own. Raises OSError."""
        is_first = not self._samples
        written: list[WrittenFiles] = []
        summaries: list[PartsSummary] = []
        for part in whole_parts(tensors):
            written.append(_write_parts(directory, f"{len(written):05d}.safetensors", [part]))
            changed = self._changed_share(part) * part.array.size
            summaries.append(_summary([part], None if is_first else changed, None))
        self._written = merge_written(written)
        return merge_summaries(summaries)

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Returns what :meth:`collect` has written: the version is dense."""
        assert kind == "dense"
        return self._written

    def forget(self, directory: Path) -> None:
        """Forgets the version in ``directory``, so that the next version is compared with nothing."""
        self._samples, self._written = {}, WrittenFiles()

    def _changed_share(self, part: Part) -> float:
        """Returns the share of a tensor that differs from the version before, and keeps a sample for the next one."""
        flat = part.array.reshape(-1)
        sample = bits_of(flat[:: -(-flat.size // _SAMPLE)].copy() if flat.size else flat)
        before, self._samples[part.tensor] = self._samples.get(part.tensor), sample
        if before is None or before.shape != sample.shape:
            return 1.0
        return float(np.mean(before != sample)) if sample.size else 0.0


def whole_parts(named: Iterable[tuple[str, np.ndarray]]) -> Iterator[Part]:
    """Yields the parts of a process that holds all tensors, from their (Hugging Face name, array)."""
    for name, array in named:
        yield Part(name, array.shape, Region.whole(array.shape), array)


def _summary(parts: Sequence[Part], changed: float | None, delta_bytes: int | None) -> PartsSummary:
    return PartsSummary(
        tuple(sorted({part.array.dtype.name for part in parts})),
        sum(part.array.size for part in parts),
        sum(part.array.nbytes for part in parts),
        changed,
        delta_bytes,
        {part.tensor: part.shape for part in parts},
    )


def merge_summaries(summaries: Sequence[PartsSummary]) -> PartsSummary:
    """Returns the summary of all processes' parts from those of each process."""
    changed, delta_bytes = ([getattr(each, name) for each in summaries] for name in ("changed", "delta_bytes"))
    return PartsSummary(
        tuple(sorted({dtype for each in summaries for dtype in each.dtypes})),
        sum(each.elements for each in summaries),
        sum(each.dense_bytes for each in summaries),
        None if None in changed else sum(changed),
        None if None in delta_bytes else sum(delta_bytes),
        {name: shape for each in summaries for name, shape in each.shapes.items()},
    )


def merge_written(written: Sequence[WrittenFiles]) -> WrittenFiles:
    """Returns the pieces and files of all of ``written`` as one."""
    files = {name: record for each in written for name, record in each.files.items()}
    return WrittenFiles(tuple(itertools.chain(*(each.pieces for each in written))), files)


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> FileRecord:
    """Writes a safetensors file of tensors by key, in this order, and returns its size and hash. Raises OSError."""
    hasher, size = xxhash.xxh3_64(), 0
    header = file_header({key: (array.dtype.name, array.shape) for key, array in tensors.items()})
    with open(path, "wb") as file:
        for array in (np.frombuffer(header, np.uint8), *tensors.values()):
            data = bytes_of(array)
            file.write(data.data)
            hasher.update(data.data)
            size += data.nbytes
    return FileRecord(size, hasher.hexdigest())


def _write_parts(directory: Path, file: str, parts: Sequence[Part]) -> WrittenFiles:
    """Writes parts into one dense file. A whole tensor is stored under its own name, so that any reader finds it."""
    pieces = []
    for number, part in enumerate(parts):
        key = part.tensor if part.region == Region.whole(part.shape) else f"{number:06d}"
        pieces.append(Piece(part.tensor, part.region, file, key))
    content = {piece.key: part.array for piece, part in zip(pieces, parts, strict=True)}
    return WrittenFiles(tuple(pieces), {file: write_file(directory / file, content)})


def _delta(before: Mapping[tuple[str, Region], np.ndarray], part: Part) -> Delta | None:
    """Returns the delta to a part; None where the version before has no part of this size and dtype."""
    old = before.get((part.tensor, part.region))
    if old is None or (old.dtype, old.size) != (part.array.dtype, part.array.size):
        return None
    return encode(bits_of(old).reshape(-1), bits_of(part.array).reshape(-1))


def _few_ahead(
    pool: ThreadPoolExecutor, parts: Iterable[Part], before: Mapping[tuple[str, Region], np.ndarray]
) -> Iterator[tuple[Part, Future[Delta | None]]]:
    """Yields each part with the delta to it, which other threads compute, few parts ahead."""
    waiting: list[tuple[Part, Future[Delta | None]]] = []
    for part in parts:
        waiting.append((part, pool.submit(_delta, before, part)))
        if len(waiting) > _THREADS:
            yield waiting.pop(0)
    yield from waiting
