"""Writes the parts of tensors that one process holds: whole, or as their changes since the version before."""

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
from rljax.weights.format import FileRecord, Piece, TensorRegion, bytes_of, file_header
from rljax.weights.sums import bits_of

SEEN_AFTER_S = 30.0  # the longest wait until another process's file is seen; NFS shows it late
_FILE_BYTES = 256 * 2**20  # the most bytes of one dense file, unless one tensor is larger
_THREADS = min(8, os.cpu_count() or 1)
_SAMPLE = 65_536  # the most elements of a tensor that StreamWriter compares between versions


Kind = Literal["dense", "delta"]


class Part(NamedTuple):
    """A part of the tensor with this Hugging Face name, as a process holds it."""

    tensor: str
    shape: tuple[int, ...]  # the shape of the whole tensor
    region: TensorRegion
    array: np.ndarray  # the part in the dtype that servers load; it no longer changes


MakeParts = Callable[[Any], Iterable[Part]]
"""A function from the published tensors to the parts that this process holds."""


class PartsSummary(msgspec.Struct, frozen=True):
    """The sums over a version's parts."""

    dtypes: tuple[str, ...]  # the dtypes of all parts, each once
    elements: int  # the number of elements
    dense_bytes: int  # the size of the elements
    changed: float | None  # the elements that differ from the version before; None if there is no such version
    delta_bytes: int | None  # the size of the delta; None if there is none
    shapes: dict[str, tuple[int, ...]]  # the shapes of the whole tensors by name


class WrittenFiles(msgspec.Struct, frozen=True):
    """The pieces that were written, and the records of their files by file name."""

    pieces: tuple[Piece, ...] = ()
    files: dict[str, FileRecord] = {}


class Writer(Protocol):
    """An object that writes the parts of a version: this process's parts, or the parts of all processes."""

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Takes the parts of the next version, and compares them with the version before. Raises OSError.

        The tensors have the form that the writer was made for. The writer may already write into ``directory`` now.
        """

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts: whole, or as their changes since the version before. Raises OSError.

        If a version gets both, the delta is written first.
        """

    def forget(self, directory: Path) -> None:
        """Gives up the version in ``directory``. The next version then counts as the first one."""

    def keep_only(self, names: Collection[str]) -> None:
        """Removes this writer's files outside the run's directory, for all versions except ``names``."""
        return


class PartWriter(Writer):
    """A Writer of one process. It keeps the parts of the newest version in memory; the next delta is against them.

    If there are several processes, each has its own, and all write into the version's directory, which all of them see.
    """

    def __init__(self, parts: MakeParts, name: str = "0") -> None:
        """Stores the maker of the parts, and the beginning of the files' names, which differs between processes."""
        self._parts_of, self._name = parts, name
        self._parts: list[Part] = []
        self._deltas: list[Delta] | None = None

    def collect(self, tensors: Any, directory: Path | None = None) -> PartsSummary:
        """Takes the parts of the next version, and computes the delta to it. Nothing is written yet."""
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
        """Writes the collected parts whole, several in a file, or writes the delta to them. Raises OSError."""
        if kind == "dense":
            self._deltas = None
            return self._write_dense(directory)
        deltas, self._deltas = self._deltas, None
        assert deltas is not None
        return self._write_delta(directory, deltas)

    def wait(self, directory: Path, written: WrittenFiles) -> None:
        """Waits until process 0 sees the files that all processes wrote into ``directory``.

        Raises OSError if a file is not seen within ``SEEN_AFTER_S`` seconds.
        """
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
        """Forgets the parts of the version in ``directory``. The next version then counts as the first one."""
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
    """A Writer of whole tensors, with one of them in memory at a time. It writes no deltas.

    It counts the changed elements of a tensor from a sample of at most 65,536 evenly spaced elements, which it keeps.
    """

    def __init__(self) -> None:
        self._samples: dict[str, np.ndarray] = {}
        self._written = WrittenFiles()

    def collect(self, tensors: Iterable[tuple[str, np.ndarray]], directory: Path) -> PartsSummary:
        """Writes each tensor, given as (Hugging Face name, array), into a file of its own. Raises OSError."""
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
        """Returns the files that :meth:`collect` has written. ``kind`` must be "dense"."""
        assert kind == "dense"
        return self._written

    def forget(self, directory: Path) -> None:
        """Forgets the version in ``directory``. The next version then counts as the first one."""
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
    """Yields whole tensors, given as pairs (Hugging Face name, array), as parts."""
    for name, array in named:
        yield Part(name, array.shape, TensorRegion.whole(array.shape), array)


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
    """Adds up the summaries of several processes, or of several parts, to one summary."""
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
    """Returns one ``WrittenFiles`` with all pieces and files of ``written``."""
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
        key = part.tensor if part.region == TensorRegion.whole(part.shape) else f"{number:06d}"
        pieces.append(Piece(part.tensor, part.region, file, key))
    content = {piece.key: part.array for piece, part in zip(pieces, parts, strict=True)}
    return WrittenFiles(tuple(pieces), {file: write_file(directory / file, content)})


def _delta(before: Mapping[tuple[str, TensorRegion], np.ndarray], part: Part) -> Delta | None:
    """Returns the delta to a part; None if the version before has no such part of the same size and dtype."""
    old = before.get((part.tensor, part.region))
    if old is None or (old.dtype, old.size) != (part.array.dtype, part.array.size):
        return None
    return encode(bits_of(old).reshape(-1), bits_of(part.array).reshape(-1))


def _few_ahead(
    pool: ThreadPoolExecutor, parts: Iterable[Part], before: Mapping[tuple[str, TensorRegion], np.ndarray]
) -> Iterator[tuple[Part, Future[Delta | None]]]:
    """Yields each part with the future of its delta. Threads compute the deltas, at most a few parts ahead."""
    waiting: list[tuple[Part, Future[Delta | None]]] = []
    for part in parts:
        waiting.append((part, pool.submit(_delta, before, part)))
        if len(waiting) > _THREADS:
            yield waiting.pop(0)
    yield from waiting
