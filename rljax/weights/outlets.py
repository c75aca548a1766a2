"""The places where a run's versions are read: a shared directory, an HTTP server, or an object store.

If several processes write a version, each process keeps, uploads or serves the files that it wrote.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec

from rljax.distributed.child import Child
from rljax.distributed.files import OwnedDirectory
from rljax.errors import ConfigError
from rljax.weights.access import KEY_FILE, listen, own_address, serving_key
from rljax.weights.format import PREFIX, VERSION_FILE
from rljax.weights.publish_config import PublishConfig
from rljax.weights.source import open_store
from rljax.weights.writer import Kind, MakeParts, PartWriter, WrittenFiles

log = logging.getLogger(__name__)


class Outlet:
    """A place from which the machines of the servers read versions. Here it is the run's directory, which they share.

    ``source`` is the argument of ``source.open_source``. It is empty where servers read the run's directory themselves.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = str(source)

    def add(self, path: Path) -> None:
        """Offers ``path``, which is written: a version's directory, or the file of the probe. Raises OSError."""

    def remove(self, name: str) -> None:
        """Withdraws the version ``name``. The owner of the run's directory removes its files. Raises OSError."""

    def close(self) -> None:
        """Releases everything at the end of the run; may be called twice."""


class StoreOutlet(Outlet):
    """A folder of an object store. A version's files are uploaded, its ``version.json`` last."""

    def __init__(self, root: Path, *, url: str) -> None:
        """Opens the folder under ``url`` that has the name of ``root``, the run's directory.

        Raises RuntimeError if the store cannot be opened, for example because no package for such URLs is installed.
        """
        super().__init__(f"{url.rstrip('/')}/{root.name}")
        try:
            self._fs, self._folder = open_store(self.source)
        except Exception as error:
            raise RuntimeError(f"weights cannot be served from {url}: {error}") from error

    def add(self, path: Path) -> None:
        """Uploads a file, or moves the files of a version into the store. Raises OSError."""
        files = [path] if path.is_file() else sorted(path.iterdir(), key=lambda file: file.name == VERSION_FILE)
        for file in files:
            name = file.relative_to(path.parent)
            try:
                self._fs.put_file(str(file), f"{self._folder}/{name}")
            except Exception as error:
                raise OSError(f"{self.source}/{name} cannot be written: {error}") from error
            if file.suffix == ".safetensors":
                file.unlink()

    def remove(self, name: str) -> None:
        """Deletes the files of the version ``name``."""
        self._delete(f"{self._folder}/{name}")

    def close(self) -> None:
        """Deletes the run's folder."""
        self._delete(self._folder)

    def _delete(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


class HttpOutlet(Outlet):
    """An HTTP server of a directory: a child process (``weights.server``), which is replaced whenever it ends.

    ``source`` is the URL. This process holds the socket, so requests wait until a new server answers them.
    """

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts the server of ``root`` at the address ``host`` and a port (0: a free one).

        Every request must bring the key in ``api_key_file``, if there is one. Raises RuntimeError if the server does
        not start.
        """
        try:
            key_file = serving_key(host, api_key_file, f"{KEY_FILE} must name a key file")
            self._listening, source = listen(host, port)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"weights cannot be served on {host}:{port}: {error}") from error
        super().__init__(source)
        self._failure: RuntimeError | None = None
        settings = root, host, self._listening.fileno(), key_file
        self._child = Child(
            "server of weights", "rljax.weights.server:serve", settings, files=[self._listening.fileno()]
        )
        try:
            self._child.wait_until_ready()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._keep, name="rljax-weight-server", daemon=True).start()

    def add(self, path: Path) -> None:
        """Does nothing, because ``path`` is served from where it is. Raises OSError if no server can be started."""
        if self._failure is not None:
            raise OSError(str(self._failure))

    def close(self) -> None:
        """Ends the server; may be called twice."""
        self._child.stop()
        self._listening.close()

    def _keep(self) -> None:
        def warn(end: str) -> None:
            log.warning("the server of weights at %s %s; another one is started", self.source, end)

        try:
            self._child.keep(warn)
        except RuntimeError as error:
            self._failure = error


class OfferingPartWriter(PartWriter):
    """A writer of one of several processes that offers its files itself: it serves them, or uploads them.

    ``directory`` has the files, unless it is None: then they are in the version's directory. ``outlet`` serves them. If
    it is None, they are uploaded into the folder of process 0's run under ``url``, and no file stays on this machine.
    """

    def __init__(
        self,
        parts: MakeParts,
        name: str,
        directory: OwnedDirectory | None,
        *,
        outlet: HttpOutlet | None = None,
        url: str = "",
    ) -> None:
        super().__init__(parts, name)
        self.directory, self.outlet, self._url = directory, outlet, url

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes and offers the parts of this process. The records of served files name this process's server."""
        own = directory if self.directory is None else self.directory.root / directory.name
        own.mkdir(exist_ok=True)
        written = super().write(kind, own)
        outlet = self.outlet or StoreOutlet(directory.parent, url=self._url)
        outlet.add(own)
        at = "" if self.outlet is None else self.outlet.source
        files = {name: msgspec.structs.replace(record, at=at) for name, record in written.files.items()}
        return WrittenFiles(written.pieces, files)

    def wait(self, directory: Path, written: WrittenFiles) -> None:
        """Returns at once, because the files of other processes do not come into process 0's directory."""

    def forget(self, directory: Path) -> None:
        """Gives up a version and removes this process's files of it."""
        super().forget(directory)
        if self.directory is not None:
            shutil.rmtree(self.directory.root / directory.name, ignore_errors=True)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes this process's files of all versions except ``names``."""
        for path in () if self.directory is None else self.directory.root.glob("v*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Ends the outlet and removes the directory; may be called twice."""
        for each in (self.outlet, self.directory):
            if each is not None:
                each.close()


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
      publish: The place that has the versions, which is not shared. With the store "http" this process serves at an
        address that reaches the same machines as ``host``, and at ``port`` + ``index``.
      parent: The directory in which a process other than 0 makes a directory for its files, unless the store is
        "directory". None means this machine's memory.
      api_key_file: The file of the key that every HTTP request must bring, or None.
      coordinator: The HOST:PORT at which this process reaches process 0.

    Raises:
      ConfigError: This process cannot make its directory, or cannot serve it.
    """
    name, store = str(index), publish.store
    if index == 0 or store == "directory":
        return OfferingPartWriter(parts, name, None, url=store) if "://" in store else PartWriter(parts, name)
    try:
        directory = OwnedDirectory(PREFIX, parent)
        try:
            if store != "http":
                return OfferingPartWriter(parts, name, directory, url=store)
            own_host = own_address(publish.host, coordinator.rpartition(":")[0].strip("[]"))
            own_port = publish.port and publish.port + index
            if own_port >= 65536:
                raise ValueError(f"publish.port + {index} must be in 0..65535, got {own_port}")
            outlet = HttpOutlet(directory.root, host=own_host, port=own_port, api_key_file=api_key_file)
            return OfferingPartWriter(parts, name, directory, outlet=outlet)
        except BaseException:
            directory.close()
            raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"process {index} cannot hand over its part of the weights: {error}") from error
