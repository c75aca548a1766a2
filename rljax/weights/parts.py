"""The files of a version that several processes write: each process keeps its part, uploads it, or serves it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from rljax.distributed.files import OwnedDirectory
from rljax.errors import ConfigError
from rljax.weights.access import own_address
from rljax.weights.outlets import HttpOutlet, StoreOutlet
from rljax.weights.store import PREFIX
from rljax.weights.writer import PartsSummary, PartWriter, WrittenFiles

SEEN_AFTER_S = 30.0  # longest until a file of another process is seen, as on NFS


class PartFiles:
    """One process's files of each version, written into the version's directory on process 0.

    Process 0 uses this class for its own directory. The others use it, too, if all of them see that directory.
    """

    def __init__(self, writer: PartWriter) -> None:
        """Takes the writer of this process's parts."""
        self._writer = writer

    def collect(self, params: Any) -> PartsSummary:
        """Takes this process's parts of the next version, and makes the delta to them."""
        return self._writer.collect(params)

    def write(self, kind: str, version: Path) -> WrittenFiles:
        """Writes this process's parts of a version.

        Args:
          kind: "dense" or "delta".
          version: The version's directory on process 0.

        Raises:
          OSError: The files cannot be written, or not be handed over.
        """
        return self._writer.write_delta(version) if kind == "delta" else self._writer.write_dense(version)

    def wait(self, version: Path, written: WrittenFiles) -> None:
        """Waits until process 0 sees all files that are in the version's directory. Raises OSError if it does not."""
        deadline = time.monotonic() + SEEN_AFTER_S
        unseen = {name: record.bytes for name, record in written.files.items() if not record.at}
        while unseen:
            unseen = {name: size for name, size in unseen.items() if not _has_size(version / name, size)}
            if unseen and time.monotonic() > deadline:
                raise OSError(
                    f"process 0 does not see {sorted(unseen)[0]}, which another process wrote: rollout.transfer_dir "
                    "must be a directory that all of them see"
                )
            if unseen:
                time.sleep(0.05)

    def forget(self, version: Path) -> None:
        """Gives up a version; the next version is compared with nothing."""
        self._writer.forget(version)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes nothing: process 0 removes the directories of all versions but ``names``."""

    def close(self) -> None:
        """Releases everything at the end of the run; may be called twice."""


class HttpPartFiles(PartFiles):
    """Files that a process other than 0 keeps in a directory of its own, and serves from its own machine.

    Attributes:
      directory: The directory with the files.
      outlet: The server of that directory.
    """

    def __init__(self, writer: PartWriter, directory: OwnedDirectory, outlet: HttpOutlet) -> None:
        """Takes over a directory and the outlet that serves it."""
        super().__init__(writer)
        self.directory, self.outlet = directory, outlet

    def write(self, kind: str, version: Path) -> WrittenFiles:
        """Writes the parts into this process's directory; their records say where they are served."""
        own = self.directory.root / version.name
        own.mkdir(exist_ok=True)
        written = super().write(kind, own)
        self.outlet.add(own)
        at = self.outlet.source
        files = {name: msgspec.structs.replace(record, at=at) for name, record in written.files.items()}
        return WrittenFiles(written.pieces, files)

    def forget(self, version: Path) -> None:
        """Gives up a version, and removes what was written of it."""
        super().forget(version)
        shutil.rmtree(self.directory.root / version.name, ignore_errors=True)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of all versions but ``names``."""
        for path in self.directory.root.glob("v*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Ends the outlet and removes the directory; may be called twice."""
        self.outlet.close()
        self.directory.close()


class StorePartFiles(PartFiles):
    """Files that each process uploads into the folder of process 0's run. None of them stays on this machine."""

    def __init__(self, writer: PartWriter, directory: OwnedDirectory | None, url: str) -> None:
        """Takes what it needs.

        Args:
          writer: The writer of this process's parts.
          directory: The directory that the files pass through, which is taken over. None: the version's own directory,
            on process 0.
          url: The URL of the object store.
        """
        super().__init__(writer)
        self._directory, self._url = directory, url

    def write(self, kind: str, version: Path) -> WrittenFiles:
        """Writes the parts, uploads them, and removes them here."""
        own = version if self._directory is None else self._directory.root / version.name
        own.mkdir(exist_ok=True)
        try:
            written = super().write(kind, own)
            StoreOutlet(version.parent, url=self._url).add(own)
        finally:
            for file in own.iterdir():
                file.unlink()
            if self._directory is not None:
                own.rmdir()
        return written

    def wait(self, version: Path, written: WrittenFiles) -> None:
        """Returns at once: everybody can read a file that was uploaded."""

    def close(self) -> None:
        """Removes the directory that files pass through."""
        if self._directory is not None:
            self._directory.close()


def make_parts(
    writer: PartWriter,
    store: str,
    parent: str | os.PathLike[str] | None,
    *,
    host: str,
    port: int,
    api_key_file: Path | None,
    index: int,
    coordinator: str,
) -> PartFiles:
    """Makes the part files of one process of several.

    Args:
      writer: The writer of this process's parts.
      store: "directory", "http", or the URL of an object store (``PublishConfig.store``).
      parent: The directory in which this process may make its own; None: this machine's memory.
      host: The address that process 0 binds to.
      port: The port that process 0 binds to, and process i with i added; 0: free ones.
      api_key_file: The file with the key that whoever pulls over HTTP brings; None: no key.
      index: The index of this process.
      coordinator: The ``HOST:PORT`` by which this process reaches process 0.

    Raises:
      ConfigError: The files cannot be kept, or not be served.
    """
    if index == 0 or store == "directory":
        return StorePartFiles(writer, None, store) if "://" in store else PartFiles(writer)
    try:
        directory = OwnedDirectory(PREFIX, parent)
        try:
            if store != "http":
                return StorePartFiles(writer, directory, store)
            own_host = own_address(host, coordinator.rpartition(":")[0].strip("[]"))
            own_port = port and port + index
            if own_port >= 65536:
                raise ValueError(f"publish.port + {index} must be in 0..65535, got {own_port}")
            outlet = HttpOutlet(directory.root, host=own_host, port=own_port, api_key_file=api_key_file)
            return HttpPartFiles(writer, directory, outlet)
        except BaseException:
            directory.close()
            raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"process {index} cannot hand over its part of the weights: {error}") from error


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False
