"""Files of the versions that several processes write, each its part: where each process puts them, and who has them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from rljax.errors import ConfigError
from rljax.rollout.servers.publishing import HttpServed
from rljax.rollout.types import PublishConfig, RolloutConfig
from rljax.weights.addresses import own_address
from rljax.weights.api_key import find_key_file
from rljax.weights.directory import OwnedDirectory
from rljax.weights.object_store import StoreServed
from rljax.weights.writer import PartWriter, Pieces, Taken

_SEEN_S = 30.0  # that a file of another process may take to be seen, as on NFS (seconds)


class PartFiles:
    """Files that one process writes into the directory of a version that process 0 has made.

    Of process 0, whose directory it is; and of all, where all see it.
    """

    def __init__(self, writer: PartWriter) -> None:
        """``writer`` is this process's."""
        self._writer = writer

    def take(self, params: Any) -> Taken:
        """See PartWriter."""
        return self._writer.take(params)

    def write(self, kind: str, version: Path) -> Pieces:
        """Writes this process's parts of a version.

        Args:
          kind: ``dense`` or ``delta``.
          version: the version's directory on process 0.

        Raises:
          OSError: they cannot be written, or not be had from where they are.
        """
        return self._writer.write_delta(version) if kind == "delta" else self._writer.write_dense(version)

    def wait(self, version: Path, written: Pieces) -> None:
        """Returns when process 0 sees the files of all that are in its directory. Raises OSError where it does not."""
        deadline = time.monotonic() + _SEEN_S
        unseen = {name: record.bytes for name, record in written.files.items() if not record.at}
        while unseen:
            unseen = {name: size for name, size in unseen.items() if not _is_there(version / name, size)}
            if unseen and time.monotonic() > deadline:
                raise OSError(
                    f"process 0 does not see {sorted(unseen)[0]}, which another process wrote: rollout.transfer_dir "
                    "must be a directory that all of them see"
                )
            if unseen:
                time.sleep(0.05)

    def forget(self, version: Path) -> None:
        """The next version is compared with nothing, and what was written of this one is removed."""
        self._writer.forget(version)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of all versions but those, where process 0 does not."""

    def close(self) -> None:
        """The run is over; may be called twice."""


class HttpPartFiles(PartFiles):
    """Files that a process other than 0 keeps in a directory of its own, and serves from its own machine."""

    def __init__(self, writer: PartWriter, directory: OwnedDirectory, served: HttpServed) -> None:
        """``served`` serves what is in ``directory``; both are taken over."""
        super().__init__(writer)
        self._directory, self._served = directory, served

    def write(self, kind: str, version: Path) -> Pieces:
        """See PartFiles."""
        own = self._directory.root / version.name
        own.mkdir(exist_ok=True)
        written = super().write(kind, own)
        self._served.add(own)
        at = self._served.source
        files = {name: msgspec.structs.replace(record, at=at) for name, record in written.files.items()}
        return Pieces(written.pieces, files)

    def forget(self, version: Path) -> None:
        """See PartFiles."""
        super().forget(version)
        shutil.rmtree(self._directory.root / version.name, ignore_errors=True)

    def keep_only(self, names: Collection[str]) -> None:
        """See PartFiles."""
        for path in self._directory.root.glob("v*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """See PartFiles."""
        self._served.close()
        self._directory.close()


class StorePartFiles(PartFiles):
    """Files that each process uploads, into the folder of process 0's run; none of them stays here."""

    def __init__(self, writer: PartWriter, directory: OwnedDirectory | None, url: str) -> None:
        """The files go to the object store at ``url`` through ``directory``, which is taken over.

        None: through that of the version, on process 0.
        """
        super().__init__(writer)
        self._directory, self._url = directory, url

    def write(self, kind: str, version: Path) -> Pieces:
        """See PartFiles."""
        own = version if self._directory is None else self._directory.root / version.name
        own.mkdir(exist_ok=True)
        try:
            written = super().write(kind, own)
            StoreServed(version.parent, url=self._url).add(own)
        finally:
            for file in own.iterdir():
                file.unlink()
            if self._directory is not None:
                own.rmdir()
        return written

    def wait(self, version: Path, written: Pieces) -> None:
        """See PartFiles: a file that was uploaded can be read by all."""

    def close(self) -> None:
        """See PartFiles."""
        if self._directory is not None:
            self._directory.close()


def make_parts(
    writer: PartWriter, publish: PublishConfig, rollout: RolloutConfig, index: int, coordinator: str
) -> PartFiles:
    """Those of process ``index`` of several.

    Args:
      writer: of this process's parts.
      publish: where versions are served from.
      rollout: with ``transfer_dir`` and ``api_key_file``.
      index: of this process.
      coordinator: ``HOST:PORT`` by which it reaches process 0.

    Raises:
      ConfigError: they cannot be kept, or not be served.
    """
    if index == 0 or publish.store == "directory":
        return StorePartFiles(writer, None, publish.store) if "://" in publish.store else PartFiles(writer)
    try:
        directory = OwnedDirectory(rollout.transfer_dir)
        try:
            if publish.store != "http":
                return StorePartFiles(writer, directory, publish.store)
            host = own_address(publish.host, coordinator.rpartition(":")[0].strip("[]"))
            port = publish.port and publish.port + index
            if port >= 65536:
                raise ValueError(f"publish.port + {index} must be in 0..65535, got {port}")
            key_file = find_key_file(rollout.api_key_file)
            return HttpPartFiles(
                writer, directory, HttpServed(directory.root, host=host, port=port, api_key_file=key_file)
            )
        except BaseException:
            directory.close()
            raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"process {index} cannot hand over its part of the weights: {error}") from error


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
