"""Writes the parts of tensors that one process holds: dense files, and what changed since the version before."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from rljax.weights import safetensors_file
from rljax.weights.delta import Delta, encode
from rljax.weights.region import Region
from rljax.weights.sums import bits_of
from rljax.weights.version import FileRecord, Piece

_FILE_BYTES = 256 * 2**20  # of one dense file, unless one tensor is larger
_THREADS = min(8, os.cpu_count() or 1)

T = TypeVar("T")
U = TypeVar("U")


class Part(NamedTuple):
    """A part of a tensor, as a process holds it.

    Attributes:
      tensor: Hugging Face name.
      shape: of the whole tensor.
      region: where in it the part is.
      array: the part, in the dtype that servers load; not changed by anybody from now on.
    """

    tensor: str
    shape: tuple[int, ...]
    region: Region
    array: np.ndarray


class Taken(msgspec.Struct, frozen=True):
    """What a version's parts are, before anything is written.

    Attributes:
      dtypes: of the parts, each once.
      elements: of all parts.
      dense_bytes: of all parts (bytes).
      changed: elements that differ from the version before; None where there is none to compare with.
      delta_bytes: of the delta (bytes); None likewise.
      shapes: of the tensors, by name.
    """

    dtypes: tuple[str, ...]
    elements: int
    dense_bytes: int
    changed: int | None
    delta_bytes: int | None
    shapes: dict[str, tuple[int, ...]]


class Pieces(msgspec.Struct, frozen=True):
    """What was written: pieces, and the files that have them."""

    pieces: tuple[Piece, ...]
    files: dict[str, FileRecord]


class Writer(Protocol):
    """Writes the parts of a version, of this process or of all."""

    def take(self, tensors: Any) -> Taken:
        """See PartWriter."""

    def write_dense(self, directory: Path) -> Pieces:
        """See PartWriter."""

    def write_delta(self, directory: Path) -> Pieces:
        """See PartWriter."""

    def forget(self, directory: Path) -> None:
        """The next version is compared with nothing: the one in ``directory`` has not become one."""

    def keep_only(self, names: Collection[str]) -> None:
        """Of versions by name, these are all that anybody still needs."""


class PartWriter:
    """Of one process. Keeps its parts of the newest version in memory, which the next one's delta is against."""

    def __init__(self, parts: Callable[[Any], Iterable[Part]], name: str = "0") -> None:
        """Takes what it needs.

        Args:
          parts: this process's parts of what ``take`` is given.
          name: begins the names of its files; each process of a run has another.
        """
        self._parts_of, self._name = parts, name
        self._parts: list[Part] = []
        self._deltas: list[Delta] | None = None

    def take(self, tensors: Any) -> Taken:
        """The parts of the next version, and the delta to it."""
        before = {(part.tensor, part.region): part.array for part in self._parts}
        is_first, self._parts = not before, []
        deltas: list[Delta | None] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for part, delta in _in_order(pool, self._parts_of(tensors), lambda part: _delta(before, part)):
                self._parts.append(part)
                deltas.append(delta)
                before.pop((part.tensor, part.region), None)
        dense_bytes = sum(part.array.nbytes for part in self._parts)
        known = [delta for delta in deltas if delta is not None]
        has_delta = not is_first and not before and len(known) == len(deltas)
        self._deltas = known if has_delta else None
        return Taken(
            tuple(sorted({part.array.dtype.name for part in self._parts})),
            sum(part.array.size for part in self._parts),
            dense_bytes,
            sum(delta.changed for delta in known) if has_delta else None,
            sum(delta.num_bytes for delta in known) if has_delta else None,
            {part.tensor: part.shape for part in self._parts},
        )

    def write_dense(self, directory: Path) -> Pieces:
        """Writes the parts that were taken; a delta to them is written before, or not at all. Raises OSError."""
        self._deltas = None
        groups: list[list[Part]] = []
        room = 0
        for part in self._parts:
            if part.array.nbytes > room:
                groups.append([])
                room = _FILE_BYTES
            groups[-1].append(part)
            room -= part.array.nbytes
        numbered = list(enumerate(groups))

        def write(number_group: tuple[int, list[Part]]) -> tuple[list[Piece], str, FileRecord]:
            number, group = number_group
            file = f"{self._name}-{number:04d}-dense.safetensors"
            keyed = {f"{number:06d}": part for number, part in enumerate(group)}
            content = {key: (part.array.dtype.name, part.array.shape, part.array) for key, part in keyed.items()}
            written = safetensors_file.write(directory / file, content)
            pieces = [Piece(part.tensor, part.region, file, key) for key, part in keyed.items()]
            return pieces, file, FileRecord(*written)

        with ThreadPoolExecutor(_THREADS) as pool:
            done = list(pool.map(write, numbered))
        return Pieces(tuple(itertools.chain(*(pieces for pieces, _, _ in done))), {file: it for _, file, it in done})

    def write_delta(self, directory: Path) -> Pieces:
        """Writes the delta to the parts that were taken. Raises OSError."""
        assert self._deltas is not None
        file, content, pieces = f"{self._name}-delta.safetensors", {}, []
        for number, (part, delta) in enumerate(zip(self._parts, self._deltas, strict=True)):
            key = f"{number:06d}"
            pieces.append(Piece(part.tensor, part.region, file, key, delta.changed, delta.gap_type))
            if delta.changed:
                content[f"{key}.gaps"] = ("uint8", (len(delta.gaps),), delta.gaps)
                content[f"{key}.values"] = ("uint8", (len(delta.values),), delta.values)
        self._deltas = None
        return Pieces(tuple(pieces), {file: FileRecord(*safetensors_file.write(directory / file, content))})

    def forget(self, directory: Path) -> None:
        """See Writer."""
        del directory
        self._parts, self._deltas = [], None

    def keep_only(self, names: Collection[str]) -> None:
        """See Writer: whoever made the directories removes them."""


def whole_parts(named: Iterable[tuple[str, np.ndarray]]) -> Iterator[Part]:
    """Of a process that holds all tensors."""
    for name, array in named:
        yield Part(name, array.shape, Region.whole(array.shape), array)


def _delta(before: dict[tuple[str, Region], np.ndarray], part: Part) -> Delta | None:
    """None where there is nothing of this size and dtype to compare with."""
    old = before.get((part.tensor, part.region))
    if old is None or (old.dtype, old.size) != (part.array.dtype, part.array.size):
        return None
    return encode(bits_of(old).reshape(-1), bits_of(part.array).reshape(-1))


def _in_order(pool: ThreadPoolExecutor, items: Iterable[T], act: Callable[[T], U]) -> Iterator[tuple[T, U]]:
    """Each item with what ``act`` makes of it in another thread, few items ahead."""
    waiting: list[tuple[T, Future[U]]] = []
    for item in items:
        waiting.append((item, pool.submit(act, item)))
        if len(waiting) > _THREADS:
            first, future = waiting.pop(0)
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def all_taken(taken: Sequence[Taken]) -> Taken:
    """What several processes took, as one."""
    changed, delta_bytes = ([getattr(each, name) for each in taken] for name in ("changed", "delta_bytes"))
    return Taken(
        tuple(sorted({dtype for each in taken for dtype in each.dtypes})),
        sum(each.elements for each in taken),
        sum(each.dense_bytes for each in taken),
        None if None in changed else sum(changed),
        None if None in delta_bytes else sum(delta_bytes),
        {name: shape for each in taken for name, shape in each.shapes.items()},
    )


def joined(written: Sequence[Pieces]) -> Pieces:
    """What several processes wrote, as one."""
    files: dict[str, FileRecord] = {}
    for each in written:
        files |= each.files
    return Pieces(tuple(itertools.chain(*(each.pieces for each in written))), files)
