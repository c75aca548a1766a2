"""Copies of checkpoints in an object store: s3://, gs://, or any other URL that fsspec knows.

Under the URL each copy has a folder that is named by its step. It holds the files of the checkpoint, the other files
that a resume needs, and a manifest with the size and SHA-256 of each file. The manifest is written last and deleted
first, so a folder without a manifest is no copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rljax.run.stop import StopRequest
from rljax.weights.source import open_store

MANIFEST = "manifest.json"
"""The file of a copy that lists its files."""
STARTED = "started.json"
"""The file under the URL that says which machine began to copy there, and when."""
_LONGEST = 300  # the characters of a library's error that a message keeps


class StoreError(OSError):
    """The store cannot be reached, or refuses. The message is one line that names its URL."""


class DamagedCopyError(StoreError):
    """A copy does not read back as it was written."""


class StoppedUploadError(Exception):
    """The upload is not wanted any more; the ``check`` of an upload raises it."""


class FileRecord(NamedTuple):
    """The entry of a file in a manifest.

    Attributes:
      size: The size of the file, in bytes.
      sha256: The SHA-256 of its content, in hexadecimal.
    """

    size: int
    sha256: str


class Store:
    """The copies under one URL.

    The library that fsspec uses for the URL decides time limits and retries.

    Attributes:
      url: The URL, without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        """Makes the client, and sends nothing yet.

        Raises:
          StoreError: No installed library knows such URLs.
        """
        self.url = url.rstrip("/")
        with self._told("cannot be opened (pip install 'rljax[store]' for s3://, gcsfs for gs://)"):
            self._fs, self._root = open_store(self.url)

    def begin(self) -> None:
        """Writes a note of who copies there from now on. Raises StoreError if the store cannot be written."""
        note = {"host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
        with self._told("cannot be written"):
            self._fs.pipe_file(f"{self._root}/{STARTED}", json.dumps(note).encode())

    def steps(self) -> list[int]:
        """Returns the steps of the copies, oldest first. Raises StoreError if the store cannot be listed."""
        with self._told("cannot be listed"):
            return [step for step in self._folders() if self._fs.exists(self._path(step, MANIFEST))]

    def upload(self, step: int, folder: Path, keep: int, check: Callable[[], None] = lambda: None) -> None:
        """Copies the files of ``folder``, and deletes all copies but the ``keep`` newest up to this step.

        Copies of later steps are deleted: the run has gone on from before them. A copy that is already there is kept.

        Args:
          step: The step of the checkpoint.
          folder: The folder of the files; nothing in it changes meanwhile.
          keep: The number of copies to keep, at least 1.
          check: A function that is called before each file and before the manifest. It may raise StoppedUploadError.

        Raises:
          StoreError: The store refuses, or cannot be reached.
        """
        records = {name: _record(folder / name) for name in _names(folder)}
        with self._told(f"checkpoint {step} could not be uploaded"):
            if self._written(step) != records:
                self._delete(step)
                for name in records:
                    check()
                    self._fs.put_file(str(folder / name), self._path(step, name))
                self._compare_sizes(step, records)
                check()
                content = json.dumps({"step": step, "files": {name: [*each] for name, each in records.items()}})
                self._fs.pipe_file(self._path(step, MANIFEST), content.encode())
        with self._told("copies of older checkpoints could not be deleted"):
            kept = [other for other in self.steps() if other <= step][-keep:]
            for other in self._folders():
                if other not in kept:
                    self._delete(other)

    def download(self, step: int, folder: Path, names: tuple[str, ...] = (), stop: StopRequest | None = None) -> None:
        """Writes the files of a copy into ``folder``, and compares their sizes and checksums with its manifest.

        Args:
          step: The step of the copy, one of ``steps``.
          folder: The folder of the files, which is made if it is missing.
          names: The names of the files to download. Empty: all of them.
          stop: The stop request of the run, which is told of each file. None: nobody is told.

        Raises:
          DamagedCopyError: A file is missing, or differs from the manifest.
          StoreError: The store refuses, or cannot be reached.
        """
        with self._told(f"checkpoint {step} could not be downloaded"):
            records = self._manifest(step)
            self._compare_sizes(step, records)
            for name in names or records:
                if name not in records:
                    raise self._damaged(step, f"it has no {name}")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(self._path(step, name), str(target))
                if _record(target) != records[name]:
                    raise self._damaged(step, f"other content than was written in {name}")
                if stop is not None:
                    stop.at("download")

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{step}/{name}"

    def _folders(self) -> list[int]:
        """Returns the steps that have a folder, oldest first."""
        names = [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def _manifest(self, step: int) -> dict[str, FileRecord]:
        """Reads the manifest of a copy. Raises DamagedCopyError if it cannot be read."""
        try:
            content = json.loads(self._fs.cat_file(self._path(step, MANIFEST)))
            if content["step"] != step:
                raise self._damaged(step, f"its manifest is of step {content['step']!r:.60}")
            records = {name: FileRecord(int(size), str(sha256)) for name, (size, sha256) in content["files"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(step, "its manifest cannot be read") from error
        outside = [name for name in records if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
        if outside or not records:
            raise self._damaged(step, "its manifest names files of another place, or none")
        return records

    def _written(self, step: int) -> dict[str, FileRecord] | None:
        """Reads the manifest of a copy; None if there is none that can be read."""
        try:
            return self._manifest(step)
        except (FileNotFoundError, DamagedCopyError):
            return None

    def _compare_sizes(self, step: int, records: dict[str, FileRecord]) -> None:
        """Raises DamagedCopyError if the store lists other sizes than ``records``."""
        folder = self._path(step, "")
        found = self._fs.find(folder.rstrip("/"), detail=True)
        sizes = {path.rpartition(folder)[2]: info["size"] for path, info in found.items()}
        for name, record in records.items():
            if sizes.get(name) != record.size:
                got = "is missing" if name not in sizes else f"has {sizes[name]} bytes"
                raise self._damaged(step, f"{name} {got}, not {record.size} bytes")

    def _delete(self, step: int) -> None:
        for path, whole in ((self._path(step, MANIFEST), False), (f"{self._root}/{step}", True)):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=whole)

    def _damaged(self, step: int, what: str) -> DamagedCopyError:
        return DamagedCopyError(f"checkpoint {step} in {self.url} is damaged: {what}")

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Turns any error of a library in the block into a StoreError, since each library has errors of its own."""
        try:
            yield
        except (StoreError, StoppedUploadError):
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
            raise StoreError(f"{self.url}: {what}: {why}") from error


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
