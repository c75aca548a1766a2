"""The weights that a server's worker may load: versions in directories that a trainer has shown, and in mirrors.

The plugins load this module inside servers, where there is no jax.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljax.distributed.files import memory_directory, remove_abandoned
from rljax.distributed.ownership import claim
from rljax.weights.delta import KeptDelta, kept
from rljax.weights.format import PROTOCOL, VERSION_FILE, Region, read_version
from rljax.weights.mirror import Mirror
from rljax.weights.source import open_source

MIRROR_DIR = "RLJAX_MIRROR_DIR"
"""The environment variable that names a directory for mirrors; by default they are in memory."""

_PREFIX = "rljax-mirror-"
_USERS = "users"
_PROBE_S = 10.0  # longest to wait for a source that does not answer


class WorkerWeights:
    """The versions that one worker may load."""

    def __init__(self) -> None:
        self._roots: frozenset[Path] = frozenset()
        self._pulls: Pulls | None = None

    @property
    def pulls(self) -> Pulls:
        """The pulls from the source that the last trainer has shown. Raises ValueError if none was shown."""
        if self._pulls is None:
            raise ValueError("no trainer has shown from where weights are pulled")
        return self._pulls

    def show(self, probe_path: str, probe_text: str, protocol: int, source: str = "") -> None:
        """Takes the place of a trainer's versions, after a proof that both sides see the same one.

        Args:
          probe_path: The path of a file that the trainer wrote. With a ``source`` it is read there by its name.
          probe_text: The text that the file must have.
          protocol: The number of the trainer's protocol.
          source: The place that weights are pulled from. "": they are read in the probe's directory.

        Raises:
          ValueError: The protocols differ, or this process does not see the trainer's file.
        """
        if protocol != PROTOCOL:
            raise ValueError(
                f"rljax protocol: the trainer speaks {protocol}, this server {PROTOCOL}; install the same rljax on both"
            )
        probe = Path(probe_path)
        if source:
            with contextlib.closing(open_source(source, _PROBE_S)) as opened:
                text = opened.read(probe.name).decode()
            if text != probe_text:
                raise ValueError(f"{source} is not where this trainer's weights are")
            if self._pulls is None or self._pulls.source != source:
                if self._pulls is not None:
                    self._pulls.close()
                self._pulls = Pulls(source, probe_text)
            return
        if not probe.is_file() or probe.read_text() != probe_text:
            raise ValueError(f"this server does not see the trainer's file {probe}: one shared directory is needed")
        self._roots |= {probe.resolve().parent}

    @contextlib.contextmanager
    def version(self, path: str, tag: str) -> Iterator[tuple[Path, list[str]]]:
        """Yields a version's directory and the names of its safetensors files, which do not change in the block.

        With "" for ``path`` that is this machine's mirror, which was brought to the version before.

        Raises:
          ValueError: The version has another tag than ``tag``, cannot be loaded from its files, or lies in no directory
            that a trainer has shown.
        """
        if not path:
            mirror = self.pulls.mirror
            with mirror.locked(shared=True):
                yield mirror.root, _loadable_files(mirror.root, tag)
            return
        directory = Path(path).resolve()
        if directory.parent not in self._roots:
            raise ValueError(f"{directory} lies in no directory that a trainer has shown at its handshake")
        yield directory, _loadable_files(directory, tag)

    def mirrored(self) -> tuple[str, KeptDelta | None]:
        """Returns the digest of the version in this machine's mirror, and the delta to it if it was kept.

        It is called in the block of ``version("", tag)``, so that neither changes. Raises ValueError.
        """
        mirror = self.pulls.mirror
        version = mirror.version
        return ("", None) if version is None else (version.digest, kept(mirror.root, version.name))


class Pulls:
    """The pulls of one server process. Each is a program of its own, so that the server goes on without a delay.

    ``mirror`` is the mirror of ``source`` that all server processes of this machine share.
    """

    def __init__(self, source: str, run_tag: str) -> None:
        """Joins the users of the mirror of the run ``run_tag``, and removes mirrors whose users are all dead.

        Raises OSError if the mirror cannot be written.
        """
        parent = Path(os.environ.get(MIRROR_DIR) or memory_directory())
        remove_abandoned(parent, _PREFIX, f"{_USERS}/*")
        self.source = source
        self.mirror = Mirror(parent / f"{_PREFIX}{hashlib.sha256(run_tag.encode()).hexdigest()[:16]}")
        users = self.mirror.root / _USERS
        users.mkdir(exist_ok=True)
        self._user = claim(users / f"{os.getpid()}.json")
        self._name = ""
        self._running: subprocess.Popen[str] | None = None
        self._result: dict[str, Any] = {}  # of the pull of ``_name``, once it has ended

    def begin(self, name: str, *, keep_delta: bool = False) -> None:
        """Starts to pull the version ``name`` (``pull.pull``), unless that pull runs already."""
        if self._name != name or self._running is None:
            self._stop()
            words = [sys.executable, "-m", "rljax.weights.pull", self.source, name, str(self.mirror.root)]
            words += ["--keep-delta"] * keep_delta
            self._running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self._name, self._result = name, {}

    def result(self, name: str) -> dict[str, Any] | None:
        """Returns the fields of ``pull.Pulled`` and ``error`` ("" after success) of the pull of ``name``.

        It is None while the pull runs, and may be asked for several times.
        """
        if self._name != name:
            return {"error": f"{name} is not being pulled", "seconds": 0.0}
        if self._running is not None:
            if self._running.poll() is None:
                return None
            printed, messages = self._running.communicate()
            status, self._running = self._running.returncode, None
            failed = {"error": messages.strip()[-500:] or f"the pull ended with status {status}", "seconds": 0.0}
            self._result = failed if status else {**json.loads(printed), "error": ""}
        return self._result

    def close(self) -> None:
        """Ends a pull that runs, and leaves the mirror; the last user removes it. May be called twice."""
        self._stop()
        self._user.release()
        with contextlib.suppress(FileNotFoundError):  # another user that left has removed it
            if not any((self.mirror.root / _USERS).iterdir()):
                self.mirror.remove()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def _loadable_files(directory: Path, tag: str) -> list[str]:
    """Returns the files of a dense version that any safetensors reader can load: tensors whole, under their names."""
    try:
        version = read_version(directory)
    except OSError as error:
        raise ValueError(f"{directory / VERSION_FILE} cannot be read: {error.strerror}") from error
    if version.tag != tag:
        raise ValueError(f"{directory} holds {version.tag}, the update is for {tag}")
    for piece in version.dense:
        whole = piece.region == Region.whole(version.tensors[piece.tensor].shape)
        if not whole or piece.key != piece.tensor or version.files[piece.file].at:
            raise ValueError(f"{directory} does not have {piece.tensor} whole, under its name, in a file of its own")
    if not version.dense:
        raise ValueError(f"{directory} is a delta, and must be pulled")
    return version.files_of(version.dense)
