"""How weights come to the servers, as ``PublishConfig`` says."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rljax.rollout.api_key import KEY_FILE
from rljax.rollout.types import PublishConfig
from rljax.rollout.weights.directory import WeightDirectory
from rljax.rollout.weights.files import WeightFiles
from rljax.rollout.weights.object_store import StoreServed
from rljax.rollout.weights.versions import DirectoryServed, Served, VersionFiles
from rljax.rollout.weights.writer import Writer

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
    """See ``versions.Served``: a program of its own, which ends with this one."""

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts it. Raises RuntimeError where it does not listen."""
        words = [sys.executable, "-m", "rljax.rollout.served.weight_server", str(root)]
        environment = {name: value for name, value in os.environ.items() if name != KEY_FILE}
        if api_key_file is not None:
            environment[KEY_FILE] = str(api_key_file)
        log = root / _LOG
        with log.open("w") as said:  # no pipe: nobody would empty it
            self._running = subprocess.Popen(
                [*words, "--host", host, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
            )
        assert self._running.stdout is not None
        speaks, _, _ = select.select([self._running.stdout], [], [], _START_S)
        self.source = self._running.stdout.readline().strip() if speaks else ""
        if not self.source:
            self.close()
            lines = log.read_text().strip().splitlines() or [f"no answer within {_START_S:g} s"]
            raise RuntimeError(f"weights cannot be served on {host}:{port}: {lines[-1]}")

    def add(self, directory: Path) -> None:
        """See ``versions.Served``: files are served from where they are. Raises OSError where the program has ended."""
        if self._running.poll() is not None:
            raise OSError(f"the server of weights ended with status {self._running.returncode}")

    def remove(self, name: str) -> None:
        """See ``versions.Served``."""

    def close(self) -> None:
        """See ``versions.Served``; may be called twice."""
        if self._running.poll() is None:
            self._running.kill()
        for stream in (self._running.stdin, self._running.stdout):
            if stream is not None:
                stream.close()
        self._running.wait()
