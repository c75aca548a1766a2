"""Weights that servers' machines pull: deltas, and dense versions now and then, from wherever they are served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from rljax.errors import NotWrittenError
from rljax.weights.checksum import Checksum
from rljax.weights.directory import WeightDirectory, WeightVersion, only_dtype
from rljax.weights.version import Base, TensorRecord, Version, format_of, write_version
from rljax.weights.writer import PartWriter, Pieces, Writer, whole_parts


class Served(Protocol):
    """Where versions can be pulled from.

    Attributes:
      source: for ``source.open_source``.
    """

    source: str

    def add(self, directory: Path) -> None:
        """A version has been written there, or the probe's text. Raises OSError."""

    def remove(self, name: str) -> None:
        """A version is not needed any more. Raises OSError."""

    def close(self) -> None:
        """The run is over."""


class DirectoryServed:
    """The run's own directory, which servers' machines see."""

    def __init__(self, root: Path) -> None:
        """Nothing has to be done."""
        self.source = str(root)

    def add(self, directory: Path) -> None:
        """See Served."""

    def remove(self, name: str) -> None:
        """See Served."""

    def close(self) -> None:
        """See Served."""


class VersionFiles(WeightDirectory):
    """The versions of one run since the newest anchor, which is dense; every version but the first is a delta, too."""

    def __init__(
        self,
        parent: str | os.PathLike[str] | None = None,
        *,
        anchor_every: int = 16,
        serve: Callable[[Path], Served] = DirectoryServed,
        writer: Writer | None = None,
    ) -> None:
        """See WeightDirectory.

        Args:
          parent: as there.
          anchor_every: versions from one dense one to the next.
          serve: makes, of the run's directory, where versions are pulled from.
          writer: writes what ``write`` is given; None: whole tensors, by this process.

        Raises:
          RuntimeError: the directory cannot be written, or not be served.
        """
        super().__init__(parent)
        self._writer, self._anchor_every = writer or PartWriter(whole_parts), anchor_every
        self._chain: list[Version] = []  # from the newest anchor on
        try:
            self._serve = serve(self.root)
        except BaseException:
            super().close()
            raise
        self.source = self._serve.source

    def probe(self) -> tuple[Path, str]:
        """See WeightDirectory."""
        path, text = super().probe()
        self._serve.add(path)
        return path, text

    def write(
        self, named_tensors: Iterable[tuple[str, np.ndarray]], policy_version: int, sums: Mapping[str, Checksum]
    ) -> WeightVersion:
        """See WeightDirectory. Keeps the tensors in memory, which the next delta is against."""
        directory, tag = self._new_path(policy_version), self.tag(policy_version)
        delta = dense = Pieces((), {})
        try:
            taken = self._writer.take(named_tensors)
            dtype = only_dtype(taken.dtypes)
            if unlike := sums.keys() ^ taken.shapes.keys():
                raise ValueError(f"tensors without a checksum, or checksums without a tensor: {sorted(unlike)[:4]}")
            directory.mkdir()
            has_delta = taken.delta_bytes is not None and taken.delta_bytes < taken.dense_bytes
            if has_delta:
                delta = self._writer.write_delta(directory)
            if not has_delta or len(self._chain) - self._anchor() >= self._anchor_every:
                dense = self._writer.write_dense(directory)
            files = delta.files | dense.files
            version = Version(
                directory.name,
                tag,
                dtype,
                {name: TensorRecord(taken.shapes[name], sums[name]) for name in sums},
                files,
                dense.pieces,
                delta.pieces,
                Base(self._chain[-1].name, self._chain[-1].digest) if delta.pieces else None,
                format_of(files),
            )
            write_version(directory, version)
            self._serve.add(directory)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            self._writer.forget(directory)
            if isinstance(error, OSError):
                raise NotWrittenError(f"cannot write weights to {directory}: {error}") from error
            raise
        self._chain.append(version)
        fraction = np.nan if taken.changed is None else taken.changed / taken.elements
        num_bytes = version.num_bytes(version.delta or version.dense)
        return WeightVersion(directory, tag, dtype, num_bytes, fraction, self.source)

    def keep_only(self, version: WeightVersion) -> None:
        """See WeightDirectory: those before the newest anchor."""
        self._chain = self._chain[self._anchor() :]
        kept = {each.name for each in self._chain}
        old = [path for path in self.root.glob("v*") if path.name not in kept]
        for path in old:
            shutil.rmtree(path)
            self._serve.remove(path.name)
        if old:
            self._writer.keep_only(kept)

    def _anchor(self) -> int:
        """Where in the chain the newest anchor is."""
        return max(place for place, each in enumerate(self._chain) if each.dense)

    def close(self) -> None:
        """See WeightDirectory."""
        self._serve.close()
        super().close()
