"""The places where a run's versions are read: a shared directory, an HTTP server, or an object store.

If several processes write a version, each process keeps, uploads or serves the files that it wrote.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec

from rljax.distributed.files import OwnedDirectory
from rljax.errors import ConfigError
from rljax.weights.access import KEY_FILE, own_address
from rljax.weights.format import PREFIX, VERSION_FILE
from rljax.weights.publish_config import PublishConfig
from rljax.weights.source import open_store
from rljax.weights.writer import Kind, MakeParts, PartWriter, WrittenFiles

log = logging.getLogger(__name__)

_START_S = 60.0  # the longest time that the HTTP server may take until it listens
_LOG = "server.log"  # the HTTP server's messages, in the run's directory; it is not served


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
        """Uploads a file, or the files of a version. Raises OSError."""
        files = [path] if path.is_file() else sorted(path.iterdir(), key=lambda file: file.name == VERSION_FILE)
        for file in files:
            name = file.relative_to(path.parent)
            try:
                self._fs.put_file(str(file), f"{self._folder}/{name}")
            except Exception as error:
                raise OSError(f"{self.source}/{name} cannot be written: {error}") from error

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
    """An HTTP server of the run's directory: a program of its own (``weights.server``), which ends with this process.

    It is started again if a signal ends it. ``process`` is the running program, and ``source`` the URL of the server.
    """

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts the server of ``root`` at the address ``host`` and a port (0: a free one).

        With ``api_key_file`` every request must bring the key in that file. Raises RuntimeError if the server does not
        start.
        """
        self._root, self._host, self._environment = root, host, dict(os.environ)
        self._environment.pop(KEY_FILE, None)
        if api_key_file is not None:
            self._environment[KEY_FILE] = str(api_key_file)
        self._closing, self._changing = False, threading.Lock()
        self._start(port)
        threading.Thread(target=self._restart_when_killed, name="rljax-weight-server", daemon=True).start()

    def add(self, path: Path) -> None:
        """Checks that the server runs; it serves ``path`` from where it is. Raises OSError if the server has ended."""
        with self._changing:
            if not self._runs():
                raise OSError(f"the server of weights ended with status {self.process.returncode}")

    def close(self) -> None:
        """Ends the server; may be called twice."""
        with self._changing:
            self._closing = True
            self._end()

    def _start(self, port: int) -> None:
        words = [sys.executable, "-m", "rljax.weights.server", str(self._root)]
        words += ["--host", self._host, "--port", str(port)]
        pipe, log_file = subprocess.PIPE, self._root / _LOG
        with log_file.open("w") as messages:  # not a pipe, which would fill up: nobody reads it
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=messages, text=True, env=self._environment
            )
        assert self.process.stdout is not None
        answers, _, _ = select.select([self.process.stdout], [], [], _START_S)
        source = self.process.stdout.readline().strip() if answers else ""
        if not source:
            self._end()
            lines = log_file.read_text().strip().splitlines() or [f"no answer within {_START_S:g} s"]
            raise RuntimeError(f"weights cannot be served on {self._host}:{port}: {lines[-1]}")
        self.source = source

    def _restart_when_killed(self) -> None:
        goes_on = True
        while goes_on:
            self.process.wait()
            with self._changing:
                goes_on = not self._closing and self._runs()

    def _runs(self) -> bool:
        """Returns whether the server runs, after starting it again if a signal ended it."""
        status = self.process.poll()
        if status is None or status >= 0:
            return status is None
        log.warning("the server of weights at %s was ended by signal %d and is started again", self.source, -status)
        self._end()
        try:
            self._start(int(self.source.rpartition(":")[2]))
        except (OSError, RuntimeError) as error:
            log.warning("%s", error)
        return self.process.poll() is None

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()


# ---- the writers of several processes ----


class HttpPartWriter(PartWriter):
    """A writer of a process other than 0, which serves its files from a directory that it takes over."""

    def __init__(self, parts: MakeParts, name: str, directory: OwnedDirectory, outlet: HttpOutlet) -> None:
        super().__init__(parts, name)
        self.directory, self.outlet = directory, outlet

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the parts into this process's directory. Their file records name this process's server."""
        own = self.directory.root / directory.name
        own.mkdir(exist_ok=True)
        written = super().write(kind, own)
        self.outlet.add(own)
        at = self.outlet.source
        files = {name: msgspec.structs.replace(record, at=at) for name, record in written.files.items()}
        return WrittenFiles(written.pieces, files)

    def forget(self, directory: Path) -> None:
        """Gives up a version and removes this process's files of it."""
        super().forget(directory)
        shutil.rmtree(self.directory.root / directory.name, ignore_errors=True)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes this process's files of all versions except ``names``."""
        for path in self.directory.root.glob("v*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Ends the outlet and removes the directory; may be called twice."""
        self.outlet.close()
        self.directory.close()


class StorePartWriter(PartWriter):
    """A writer that uploads its files into the folder of process 0's run. No file stays on this machine."""

    def __init__(self, parts: MakeParts, name: str, directory: OwnedDirectory | None, url: str) -> None:
        """Takes over ``directory``, which holds files before their upload to ``url``. None: the version's directory."""
        super().__init__(parts, name)
        self._directory, self._url = directory, url

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the parts of this process, uploads the files, and removes the local copies."""
        own = directory if self._directory is None else self._directory.root / directory.name
        own.mkdir(exist_ok=True)
        try:
            written = super().write(kind, own)
            StoreOutlet(directory.parent, url=self._url).add(own)
        finally:
            for file in own.iterdir():
                file.unlink()
            if self._directory is not None:
                own.rmdir()
        return written

    def wait(self, directory: Path, written: WrittenFiles) -> None:
        """Returns at once, because every process can read an uploaded file."""

    def close(self) -> None:
        """Removes the directory that holds files before their upload."""
        if self._directory is not None:
            self._directory.close()


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
        return StorePartWriter(parts, name, None, store) if "://" in store else PartWriter(parts, name)
    try:
        directory = OwnedDirectory(PREFIX, parent)
        try:
            if store != "http":
                return StorePartWriter(parts, name, directory, store)
            own_host = own_address(publish.host, coordinator.rpartition(":")[0].strip("[]"))
            own_port = publish.port and publish.port + index
            if own_port >= 65536:
                raise ValueError(f"publish.port + {index} must be in 0..65535, got {own_port}")
            outlet = HttpOutlet(directory.root, host=own_host, port=own_port, api_key_file=api_key_file)
            return HttpPartWriter(parts, name, directory, outlet)
        except BaseException:
            directory.close()
            raise
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"process {index} cannot hand over its part of the weights: {error}") from error
