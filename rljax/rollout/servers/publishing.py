"""How weights come to the servers, as ``PublishConfig`` says."""

from __future__ import annotations

import functools
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rljax.rollout.types import PublishConfig
from rljax.weights.api_key import KEY_FILE
from rljax.weights.directory import WeightDirectory
from rljax.weights.files import WeightFiles
from rljax.weights.object_store import StoreServed
from rljax.weights.versions import DirectoryServed, Served, VersionFiles
from rljax.weights.writer import Writer

log = logging.getLogger(__name__)

_START_S = 60.0
_LOG = "server.log"  # in the run's directory; not served


def make_files(
    config: PublishConfig, transfer_dir: str | None, api_key_file: Path | None, writer: Writer | None = None
) -> WeightDirectory:
    """Where a run's versions are written, and what serves them.

    Args:
      config: as it says.
      transfer_dir: ``RolloutConfig.transfer_dir``.
      writer: of several processes that hold the tensors, where versions are pulled; None: this one has them.
      api_key_file: with the key that whoever pulls over HTTP brings; None: no key.

    Raises:
      RuntimeError: the directory, or what serves it, cannot be used.
    """
    if config.store == "shared":
        return WeightFiles(transfer_dir)
    serve: Callable[[Path], Served] = DirectoryServed
    if config.store == "http":
        serve = functools.partial(HttpServed, host=config.host, port=config.port, api_key_file=api_key_file)
    elif config.store != "directory":
        serve = functools.partial(StoreServed, url=config.store)
    return VersionFiles(transfer_dir, anchor_every=config.anchor_every, serve=serve, writer=writer)


class HttpServed:
    """See ``versions.Served``: a program of its own, which ends with this one; started again where it was killed."""

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts it. Raises RuntimeError where it does not listen."""
        self._root, self._host, self._environment = root, host, dict(os.environ)
        self._environment.pop(KEY_FILE, None)
        if api_key_file is not None:
            self._environment[KEY_FILE] = str(api_key_file)
        self._closing, self._changing = False, threading.Lock()
        self._start(port)
        threading.Thread(target=self._mind, name="rljax-weight-server", daemon=True).start()

    def add(self, directory: Path) -> None:
        """See ``versions.Served``: files are served from where they are. Raises OSError where the program has ended."""
        with self._changing:
            if not self._runs():
                raise OSError(f"the server of weights ended with status {self._running.returncode}")

    def remove(self, name: str) -> None:
        """See ``versions.Served``."""

    def close(self) -> None:
        """See ``versions.Served``; may be called twice."""
        with self._changing:
            self._closing = True
            self._end()

    def _start(self, port: int) -> None:
        words = [sys.executable, "-m", "rljax.weights.server", str(self._root)]
        log_file = self._root / _LOG
        with log_file.open("w") as said:  # no pipe: nobody would empty it
            self._running = subprocess.Popen(
                [*words, "--host", self._host, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=self._environment,
            )
        assert self._running.stdout is not None
        speaks, _, _ = select.select([self._running.stdout], [], [], _START_S)
        source = self._running.stdout.readline().strip() if speaks else ""
        if not source:
            self._end()
            lines = log_file.read_text().strip().splitlines() or [f"no answer within {_START_S:g} s"]
            raise RuntimeError(f"weights cannot be served on {self._host}:{port}: {lines[-1]}")
        self.source = source

    def _mind(self) -> None:
        goes_on = True
        while goes_on:
            self._running.wait()
            with self._changing:
                goes_on = not self._closing and self._runs()

    def _runs(self) -> bool:
        """Whether the program runs, now that it was started again if a signal ended it."""
        status = self._running.poll()
        if status is None or status >= 0:
            return status is None
        log.warning("the server of weights at %s was ended by signal %d and is started again", self.source, -status)
        self._end()
        try:
            self._start(int(self.source.rpartition(":")[2]))
        except (OSError, RuntimeError) as error:
            log.warning("%s", error)
        return self._running.poll() is None

    def _end(self) -> None:
        if self._running.poll() is None:
            self._running.kill()
        for stream in (self._running.stdin, self._running.stdout):
            if stream is not None:
                stream.close()
        self._running.wait()
