"""The weights that a worker of a server may load: from a trainer's directory, or pulled into this machine's mirror.

The plugins load this module inside servers, where there is no jax.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.msgpack import Decoder

from rljax.distributed.child import Child
from rljax.distributed.files import check_room, memory_directory, remove_abandoned
from rljax.distributed.ownership import claim
from rljax.errors import describe
from rljax.weights.format import PROTOCOL, VERSION_FILE, TensorRegion, read_version
from rljax.weights.mirror import Mirror
from rljax.weights.pull import Pulled
from rljax.weights.source import open_source

MIRROR_DIR = "RLJAX_MIRROR_DIR"
"""The environment variable that names a directory for mirrors; by default they are in memory."""

_PREFIX = "rljax-mirror-"
_USERS = "users"
_PROBE_S = 10.0  # the longest wait for a source that does not answer
_PULL_S = 3600.0  # the longest time of a pull; the trainer gives a server up before
_PULLED = Decoder(Pulled)


class WorkerWeights:
    """The versions of the weights that one worker of a server may load."""

    def __init__(self) -> None:
        self._roots: frozenset[Path] = frozenset()
        self._pulls: Pulls | None = None

    @property
    def pulls(self) -> Pulls:
        """The pulls from the source that :meth:`show` got last. Raises ValueError if it never got one."""
        if self._pulls is None:
            raise ValueError("no trainer has shown from where weights are pulled")
        return self._pulls

    def show(self, probe_path: str, probe_text: str, protocol: int, source: str = "", version_bytes: int = 0) -> None:
        """Stores where a trainer's versions are, after a check that this process can read them.

        For the check it reads the trainer's file ``probe_path``, which must hold ``probe_text``. If ``source`` is
        empty, weights are read in the directory of that file. Otherwise they and the file are pulled from ``source`` by
        name.

        Raises:
          ValueError: The protocols differ, or this process does not read ``probe_text``.
          RuntimeError: The mirror is empty and has no room for two versions of ``version_bytes``: a version and the
            files from which it is made.
          OSError: The source cannot be read, or the mirror cannot be written.
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
            self._pulls.forget()
            if self._pulls.mirror.version is None:
                check_room(self._pulls.mirror.root, 2 * version_bytes, MIRROR_DIR)
            return
        if not probe.is_file() or probe.read_text() != probe_text:
            raise ValueError(f"this server does not see the trainer's file {probe}: one shared directory is needed")
        self._roots |= {probe.resolve().parent}

    @contextlib.contextmanager
    def version(self, path: str, tag: str) -> Iterator[tuple[Path, list[str]]]:
        """Yields a version's directory and the names of its safetensors files.

        An empty ``path`` means this machine's own mirror, which must hold the version already. The mirror does not
        change during the ``with`` block.

        Raises:
          ValueError: The version has another tag than ``tag``, cannot be loaded from its files, or lies in no directory
            that :meth:`show` has stored.
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


class Pulls:
    """The pulls of one server process. A child process makes them, so that the server is not delayed.

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
        self._user = claim(users / f"{os.getpid()}-{uuid.uuid4().hex}.json")  # containers may have equal ids
        # A worker of vLLM on a CPU is bound to a few processors, and waits there without leaving time to others.
        processors = os.sched_getaffinity(os.getppid()) if hasattr(os, "sched_getaffinity") else set()
        settings = (source, self.mirror.root)
        self._start = functools.partial(Child, "pull", "rljax.weights.pull:answer", settings, processors=processors)
        self._child = self._start()
        self._thread = threading.Thread()  # asks for the pull of ``_name``
        self._name, self._result = "", Pulled()

    def pulled(self, name: str) -> dict[str, Any] | None:
        """Returns the fields of ``pull.Pulled``, or None while the version ``name`` is being pulled.

        The first call with a name starts its pull (``pull.pull``) and ends any other pull. After an error, and after
        :meth:`forget`, the next call starts it again.
        """
        if self._name != name:
            if self._thread.is_alive():
                self._child.stop()
                self._thread.join()
                self._child = self._start()
            self._name = name
            self._thread = threading.Thread(target=self._pull, args=(name,), name="pull", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            return None
        if self._result.error:
            self.forget()
        return asdict(self._result)

    def forget(self) -> None:
        """Forgets the last pull, because the mirror may have changed since. A pull that runs goes on."""
        if not self._thread.is_alive():
            self._name = ""

    def close(self) -> None:
        """Ends a running pull and leaves the mirror, which its last user removes. May be called twice."""
        self._child.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._child.frames.close()
        self._user.release()
        with contextlib.suppress(FileNotFoundError):  # another user that left has removed it
            if not any((self.mirror.root / _USERS).iterdir()):
                shutil.rmtree(self.mirror.root, ignore_errors=True)

    def _pull(self, name: str) -> None:
        try:
            self._result = self._child.ask((name,), _PULL_S, _PULLED)
        except Exception as error:
            self._result = Pulled(error=f"the pull failed: {describe(error)}")


def _loadable_files(directory: Path, tag: str) -> list[str]:
    """Returns the names of the files of a dense version in which each tensor is whole and has its own name as key.

    Raises ValueError if the version has another tag than ``tag`` or is not of this form.
    """
    try:
        version = read_version(directory)
    except OSError as error:
        raise ValueError(f"{directory / VERSION_FILE} cannot be read: {error.strerror}") from error
    if version.tag != tag:
        raise ValueError(f"{directory} holds {version.tag}, the update is for {tag}")
    for piece in version.dense:
        whole = piece.region == TensorRegion.whole(version.tensors[piece.tensor].shape)
        if not whole or piece.key != piece.tensor or version.files[piece.file].at:
            raise ValueError(f"{directory} does not have {piece.tensor} whole, under its name, in a file of its own")
    if not version.dense:
        raise ValueError(f"{directory} is a delta, and must be pulled")
    return version.files_of(version.dense)
