"""The places where a run's versions are read: a shared directory, an HTTP server, or an object store."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

from rljax.weights.access import KEY_FILE
from rljax.weights.format import VERSION_FILE
from rljax.weights.source import open_store

log = logging.getLogger(__name__)

_START_S = 60.0  # longest that the HTTP server may take to listen
_LOG = "server.log"  # the HTTP server's messages, in the run's directory; it is not served


class Outlet(Protocol):
    """A place from which servers' machines read versions.

    Attributes:
      source: The place, for ``source.open_source``. "": servers read the run's directory themselves.
    """

    source: str

    def add(self, path: Path) -> None:
        """Offers what was written at ``path``: a version's directory, or the probe's file. Raises OSError."""

    def remove(self, name: str) -> None:
        """Withdraws the version ``name``. Raises OSError."""

    def close(self) -> None:
        """Releases everything at the end of the run."""


class SharedOutlet:
    """The run's directory, which the servers read themselves."""

    source = ""

    def __init__(self, root: Path) -> None:
        """Needs nothing of ``root``, the run's directory."""

    def add(self, path: Path) -> None:
        """Does nothing: what is at ``path`` can be read there."""

    def remove(self, name: str) -> None:
        """Does nothing: the directory's owner removes the version ``name``."""

    def close(self) -> None:
        """Does nothing."""


class DirectoryOutlet(SharedOutlet):
    """The run's directory, from which each server's machine pulls versions into its own memory."""

    def __init__(self, root: Path) -> None:
        """Takes the run's directory."""
        super().__init__(root)
        self.source = str(root)


class StoreOutlet:
    """A folder of an object store. A version's files are uploaded, its ``version.json`` last."""

    def __init__(self, root: Path, *, url: str) -> None:
        """Opens the store.

        Args:
          root: The run's directory, whose name is the name of the folder.
          url: The URL that the folder is made under, of any kind that fsspec knows.

        Raises:
          RuntimeError: Nothing is installed that knows such URLs.
        """
        self.source = f"{url.rstrip('/')}/{root.name}"
        try:
            self._fs, self._folder = open_store(self.source)
        except Exception as error:
            raise RuntimeError(f"weights cannot be served from {url}: {error}") from error

    def add(self, path: Path) -> None:
        """Uploads a file, or the files of a version."""
        if path.is_file():
            self._upload(path, path.name)
            return
        for file in sorted(path.iterdir(), key=lambda file: file.name == VERSION_FILE):
            self._upload(file, f"{path.name}/{file.name}")

    def remove(self, name: str) -> None:
        """Deletes the files of the version ``name``."""
        self._delete(f"{self._folder}/{name}")

    def close(self) -> None:
        """Deletes the run's folder."""
        self._delete(self._folder)

    def _upload(self, path: Path, name: str) -> None:
        try:
            self._fs.put_file(str(path), f"{self._folder}/{name}")
        except Exception as error:
            raise OSError(f"{self.source}/{name} cannot be written: {error}") from error

    def _delete(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


class HttpOutlet:
    """An HTTP server of the run's directory: a program of its own (``weights.server``), which ends with this process.

    It is started again if a signal ends it.

    Attributes:
      source: The URL of the server.
      process: The running program.
    """

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts the server.

        Args:
          root: The run's directory.
          host: The address that the server binds to.
          port: The port that the server binds to; 0: a free one.
          api_key_file: The file with the key that requests must bring; None: no key.

        Raises:
          RuntimeError: The server does not listen.
        """
        self._root, self._host, self._environment = root, host, dict(os.environ)
        self._environment.pop(KEY_FILE, None)
        if api_key_file is not None:
            self._environment[KEY_FILE] = str(api_key_file)
        self._closing, self._changing = False, threading.Lock()
        self._start(port)
        threading.Thread(target=self._restart_when_killed, name="rljax-weight-server", daemon=True).start()

    def add(self, path: Path) -> None:
        """Checks that the server runs, which reads ``path`` where it is. Raises OSError if it has ended."""
        with self._changing:
            if not self._runs():
                raise OSError(f"the server of weights ended with status {self.process.returncode}")

    def remove(self, name: str) -> None:
        """Does nothing: the directory's owner removes the version ``name``."""

    def close(self) -> None:
        """Ends the server; may be called twice."""
        with self._changing:
            self._closing = True
            self._end()

    def _start(self, port: int) -> None:
        words = [sys.executable, "-m", "rljax.weights.server", str(self._root)]
        log_file = self._root / _LOG
        with log_file.open("w") as messages:  # not a pipe, which would fill up: nobody reads it
            self.process = subprocess.Popen(
                [*words, "--host", self._host, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=self._environment,
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
