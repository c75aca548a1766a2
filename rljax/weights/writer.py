"""Writes the parts of tensors that one process holds: all their elements, or only the changed ones."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from rljax.distributed.files import OwnedDirectory
from rljax.errors import ConfigError
from rljax.weights.access import own_address
from rljax.weights.delta import Delta, encode
from rljax.weights.format import PREFIX, FileRecord, Piece, TensorRegion, write_tensors
from rljax.weights.outlets import HttpOutlet, Outlet, StoreOutlet
from rljax.weights.publish_config import PublishConfig
from rljax.weights.sums import bits_of

SEEN_AFTER_S = 30.0  # the longest wait until another process's file is seen; NFS shows it late
_FILE_BYTES = 256 * 2**20  # the most bytes of one dense file, unless one tensor is larger
_THREADS = min(8, os.cpu_count() or 1)
_SAMPLE = 65_536  # the most elements of a tensor that StreamWriter compares between versions

Kind = Literal["dense", "delta"]


class Part(NamedTuple):
    """A part of a tensor, as a process holds it."""

    tensor: str  # the Hugging Face name of the tensor
    shape: tuple[int, ...]  # the shape of the whole tensor
    region: TensorRegion
    array: np.ndarray  # the part in the dtype that servers load; it no longer changes


MakeParts = Callable[[Any], Iterable[Part]]
"""A function from the published tensors to the parts that this process holds."""


class PartsSummary(msgspec.Struct, frozen=True):
    """The sums over a version's parts."""

    dtypes: tuple[str, ...]  # the dtypes of all parts, each once
    elements: int  # the number of elements
    dense_bytes: int  # the size of the elements (bytes)
    changed: float | None  # the number of elements that differ from the version before; None if it is not known
    delta_bytes: int | None  # the size of the delta (bytes); None if there is none
    shapes: dict[str, tuple[int, ...]]  # the shapes of the whole tensors by name


class WrittenFiles(msgspec.Struct, frozen=True):
    """The pieces that were written, and the records of their files by file name."""

    pieces: tuple[Piece, ...] = ()
    files: dict[str, FileRecord] = {}


class Writer(Protocol):
    """An object that writes the parts of a version: this process's parts, or the parts of all processes."""

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Takes the tensors of the next version, and compares them with the version before. Raises OSError.

        What ``tensors`` must be depends on the class. Some classes write the files into ``directory`` already here.
        """

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts: whole ("dense"), or the changes since the version before. Raises OSError.

        If a version gets both, the delta is written first.
        """

    def keep_only(self, names: Collection[str]) -> None:
        """Gives up all versions except ``names``, and removes the files that this writer holds of the others.

        If the newest version is given up, the next one counts as the first one.
        """


class PartWriter(Writer):
    """A Writer of one of several processes, or of the only one.

    It keeps the parts of the newest version in memory, because the next delta is against them. It writes into the
    version's directory, which all processes see, or into a ``directory`` of its own. ``outlet`` offers the files.
    """

    def __init__(
        self, parts: MakeParts, name: str = "0", outlet: Outlet | None = None, directory: OwnedDirectory | None = None
    ) -> None:
        """Stores ``parts``, which makes the parts, and the beginning of file names, which differs between processes."""
        self._parts_of, self._name = parts, name
        self.outlet, self.directory = outlet or Outlet(), directory
        self._version = ""  # the name of the newest version, whose parts and deltas these are
        self._parts: list[Part] = []
        self._deltas: list[Delta | None] = []

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Takes the parts of the next version, and computes the delta to it. Nothing is written yet."""
        self._version = directory.name
        before = {(part.tensor, part.region): part.array for part in self._parts}
        self._parts, self._deltas = [], []
        with ThreadPoolExecutor(_THREADS) as pool:
            for part, delta in _few_ahead(pool, self._parts_of(tensors), before):
                self._parts.append(part)
                self._deltas.append(delta.result())
                before.pop((part.tensor, part.region), None)
        return merge_summaries(
            [
                _summary(part, delta and delta.changed, delta and len(delta.gaps) + len(delta.values))
                for part, delta in zip(self._parts, self._deltas, strict=True)
            ]
        )

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts or the delta to them, and offers the files. Raises OSError.

        If this process serves its files itself, the records of the files name its server.
        """
        own = directory if self.directory is None else self.directory.root / directory.name
        own.mkdir(exist_ok=True)
        written = self._write_dense(own) if kind == "dense" else self._write_delta(own)
        self._deltas = []
        self.outlet.add(own, directory.parent.name)
        at = "" if self.directory is None else self.outlet.url
        files = {name: msgspec.structs.replace(record, at=at) for name, record in written.files.items()}
        return WrittenFiles(written.pieces, files)

    def wait(self, directory: Path, written: WrittenFiles) -> None:
        """Waits until process 0 sees the files that other processes wrote into ``directory``.

        Raises OSError if a file is not seen within ``SEEN_AFTER_S`` seconds.
        """
        deadline = time.monotonic() + SEEN_AFTER_S
        shown = {} if self.outlet.takes_files else written.files
        for name in sorted(name for name, record in shown.items() if not record.at):
            path = directory / name
            while not (path.is_file() and path.stat().st_size == written.files[name].bytes):
                if time.monotonic() > deadline:
                    remedy = "rollout.transfer_dir must be a directory that all of them see"
                    raise OSError(f"process 0 does not see {name}, which another process wrote: {remedy}")
                time.sleep(0.05)

    def keep_only(self, names: Collection[str]) -> None:
        """Gives up all versions except ``names``."""
        if self._version not in names:
            self._parts, self._deltas = [], []
        for path in () if self.directory is None else self.directory.root.glob("v*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Ends the outlet and removes this process's directory; may be called twice."""
        self.outlet.close()
        if self.directory is not None:
            self.directory.close()

    def _write_dense(self, directory: Path) -> WrittenFiles:
        groups, room = list[list[Part]](), 0
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

    def _write_delta(self, directory: Path) -> WrittenFiles:
        file, content, pieces = f"{self._name}-delta.safetensors", {}, []
        for number, (part, delta) in enumerate(zip(self._parts, self._deltas, strict=True)):
            assert delta is not None
            key = f"{number:06d}"
            pieces.append(Piece(part.tensor, part.region, file, key, delta.changed, delta.gap_type))
            if delta.changed:
                for kind in ("gaps", "values"):
                    bits = np.frombuffer(getattr(delta, kind), np.uint8)
                    content[f"{key}.{kind}"] = ("uint8", bits.shape, bits)
        with open(directory / file, "wb") as opened:
            return WrittenFiles(tuple(pieces), {file: write_tensors(opened, content)})


def make_part_writer(
    parts: MakeParts,
    publish: PublishConfig,
    parent: str | os.PathLike[str] | None,
    *,
    api_key_file: Path | None,
    index: int,
    coordinator: str,
) -> PartWriter:
    """Makes the writer of one of several processes, the one with number ``index``.

    Args:
      parts: A function from the published tensors to the parts that this process holds.
      publish: The settings of the publish, with another store than "shared". With "http" this process serves at an
        address that reaches the same machines as ``host``, and at ``port`` + ``index``.
      parent: The directory in which a process other than 0 makes a directory for its files, unless the store is
        "directory". None means this machine's memory.
      api_key_file: The file of the key that every HTTP request must bring, or None.
      coordinator: The HOST:PORT at which this process reaches process 0.

    Raises:
      ConfigError: This process cannot make its directory, or cannot serve it.
    """
    try:
        outlet = StoreOutlet(publish.store) if "://" in publish.store else Outlet()
        if index == 0 or publish.store == "directory":
            return PartWriter(parts, str(index), outlet)
        directory = OwnedDirectory(PREFIX, parent)
        try:
            if publish.store == "http":
                own_host = own_address(publish.host, coordinator.rpartition(":")[0].strip("[]"))
                own_port = publish.port and publish.port + index
                if own_port >= 65536:
                    raise ValueError(f"publish.port + {index} must be in 0..65535, got {own_port}")
                outlet = HttpOutlet(directory.root, host=own_host, port=own_port, api_key_file=api_key_file)
            return PartWriter(parts, str(index), outlet, directory)
        except BaseException:
            directory.close()
            raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"process {index} cannot hand over its part of the weights: {error}") from error


class StreamWriter(Writer):
    """A Writer of whole tensors, with one of them in memory at a time. It writes no deltas.

    It counts the changed elements of a tensor from a sample of at most 65,536 evenly spaced elements, which it keeps.
    """

    def __init__(self) -> None:
        self._version = ""
        self._samples: dict[str, np.ndarray] = {}
        self._written = WrittenFiles()

    def collect(self, tensors: Iterable[tuple[str, np.ndarray]], directory: Path) -> PartsSummary:
        """Writes each tensor, given as (Hugging Face name, array), into a file of its own. Raises OSError."""
        self._version, is_first = directory.name, not self._samples
        written, summaries = list[WrittenFiles](), list[PartsSummary]()
        try:
            for part in whole_parts(tensors):
                written.append(_write_parts(directory, f"{len(written):05d}.safetensors", [part]))
                changed = self._changed_share(part) * part.array.size
                summaries.append(_summary(part, None if is_first else changed, None))
        finally:  # The other processes of a run gather all tensors now, and this one must, too (acts.to_the_end).
            getattr(tensors, "close", lambda: None)()
        self._written = merge_written(written)
        return merge_summaries(summaries)

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Returns the files that :meth:`collect` has written. ``kind`` must be "dense"."""
        assert kind == "dense"
        return self._written

    def keep_only(self, names: Collection[str]) -> None:
        """Gives up all versions except ``names``."""
        if self._version not in names:
            self._samples = {}

    def _changed_share(self, part: Part) -> float:
        """Returns the share of a tensor that differs from the version before, and keeps a sample for the next one."""
        flat = part.array.reshape(-1)
        sample = bits_of(flat[:: -(-flat.size // _SAMPLE)].copy() if flat.size else flat)
        before, self._samples[part.tensor] = self._samples.get(part.tensor), sample
        if before is None or before.shape != sample.shape:
            return 1.0
        return float(np.mean(before != sample)) if sample.size else 0.0


def whole_parts(named: Iterable[tuple[str, np.ndarray]]) -> Iterator[Part]:
    """Yields a ``Part`` for each pair (Hugging Face name, whole array)."""
    for name, array in named:
        yield Part(name, array.shape, TensorRegion.whole(array.shape), array)


def _summary(part: Part, changed: float | None, delta_bytes: int | None) -> PartsSummary:
    dtype, shapes = part.array.dtype.name, {part.tensor: part.shape}
    return PartsSummary((dtype,), part.array.size, part.array.nbytes, changed, delta_bytes, shapes)


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


def _write_parts(directory: Path, file: str, parts: Sequence[Part]) -> WrittenFiles:
    """Writes parts into one dense file. A whole tensor is stored under its own name, so that any reader finds it."""
    pieces, content = [], {}
    for number, part in enumerate(parts):
        key = part.tensor if part.region == TensorRegion.whole(part.shape) else f"{number:06d}"
        pieces.append(Piece(part.tensor, part.region, file, key))
        content[key] = (part.array.dtype.name, part.array.shape, part.array)
    with open(directory / file, "wb") as opened:
        return WrittenFiles(tuple(pieces), {file: write_tensors(opened, content)})


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
