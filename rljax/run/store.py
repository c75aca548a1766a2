"""Copies of a run in an object store: s3://, gs://, or any other URL that fsspec knows.

Under the URL each copy has a folder that is named by its step. It holds the files of the checkpoint, the other files
that a resume needs, and a manifest with the size and SHA-256 of each file. The manifest is written last and deleted
first, so a folder without a manifest is not a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rljax.errors import ConfigError, OwnedError, install_words
from rljax.run.config import Config
from rljax.run.directory import check_same_run, saved_steps
from rljax.run.stop import StopRequest
from rljax.weights.source import open_store

MANIFEST = "manifest.json"  # the file of a copy that lists its files
STARTED = "started.json"  # the file under the URL that says which machine began to copy there, and when
CHECKPOINT = "checkpoint"  # the folder of a copy that holds the checkpoint
RECORD = ("config.yaml", "metrics.jsonl")  # the other files of a copy, which a resume needs
_LONGEST = 300  # the characters of a library's error that a message keeps
_LOOK_S = 1.0  # between two looks at the checkpoints
_AGAIN_S = 60.0  # before a failed upload is tried again
_FINISH_S = 3.0  # the part of the grace that a run needs after its last upload


class StoreError(OSError):
    """The store cannot be reached, or refuses. The message is one line that names its URL."""


class DamagedCopyError(StoreError):
    """A copy does not read back as it was written."""


class StoppedUploadError(Exception):
    """The upload is not wanted any more; the ``check`` of an upload raises it."""


class FileRecord(NamedTuple):
    """The size of a file in bytes and the SHA-256 of its content, in a manifest."""

    size: int
    sha256: str


class Store:
    """The copies under one ``url``. The library that fsspec uses for the URL decides time limits and retries."""

    def __init__(self, url: str) -> None:
        """Makes the client, and sends nothing yet. Raises StoreError if no installed library knows such URLs."""
        self.url = url.rstrip("/")
        with self._told(f"cannot be opened ({install_words('store')}; gcsfs for gs://)"):
            self._fs, self._root = open_store(self.url)

    def begin(self) -> None:
        """Writes a note that this machine copies from now on. Raises StoreError if the store cannot be written."""
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
        The function ``check`` is called before each file and before the manifest, and may raise StoppedUploadError.
        Raises StoreError if the store refuses, or cannot be reached.
        """
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        records = {path.relative_to(folder).as_posix(): _record(path) for path in files}
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

        ``step`` is one of ``steps``. Without ``names`` all files are downloaded. Each file counts as progress for
        ``stop``. Raises DamagedCopyError if a file is missing or differs, and StoreError if the store refuses or cannot
        be reached.
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


def start_from_store(config: Config, run_dir: Path, stop: StopRequest | None = None) -> Store | None:
    """Opens the store of ``checkpoint.upload``, and downloads the newest whole copy that is newer than the checkpoints.

    Returns None if the run has no store. Raises StoreError if the store cannot be used. Raises ConfigError if it holds
    another run, or if no copy in it is whole and the run directory has no checkpoint.
    """
    if not config.checkpoint.upload:
        return None
    store = Store(config.checkpoint.upload)
    store.begin()
    here, there = max(saved_steps(run_dir), default=0), store.steps()
    if there and not here and config.run.resume != "auto":
        holds = f"already holds a run, to step {there[-1]}, and run.resume = {config.run.resume}"
        remedy = "give another checkpoint.upload, or run.resume = auto to go on"
        raise ConfigError(f"run.resume: {store.url} {holds}; {remedy}")
    # A copy of a checkpoint that was set aside may have the same damage.
    later = [step for step in there if step > here and not (run_dir / "damaged" / str(step)).exists()]
    for step in reversed(later):
        try:
            _fetch(store, step, config, run_dir, stop)
        except DamagedCopyError as error:
            print(f"warning: {error}; the one before it is tried", file=sys.stderr)
            continue
        print(f"going on from checkpoint {step} of {store.url}")
        return store
    if later and not here:
        raise ConfigError(f"no checkpoint in {store.url} is whole; give another checkpoint.upload")
    return store


def _fetch(store: Store, step: int, config: Config, run_dir: Path, stop: StopRequest | None) -> None:
    """Downloads a copy into the run directory. The files of an interrupted download do not count as a checkpoint."""
    partial = run_dir / "checkpoints.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        store.download(step, partial, RECORD, stop)
        check_same_run(config, partial, store.url)
        store.download(step, partial, stop=stop)
        for name in RECORD:
            (partial / name).replace(run_dir / name)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (partial / CHECKPOINT).rename(run_dir / "checkpoints" / str(step))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Uploads:
    """The uploads of a run, a context manager: a thread copies each newest complete checkpoint to the store.

    Leaving the context waits, within limits, until the newest one is uploaded. A failure is printed in one line on
    stderr. Further failures are not printed until an upload has succeeded.
    """

    def __init__(
        self,
        store: Store,
        run_dir: Path,
        *,
        keep: int,
        wait_s: float,
        check_owner: Callable[[], None] = lambda: None,
        stop: StopRequest | None = None,
    ) -> None:
        """Prepares the thread, which starts when the context is entered.

        The store keeps ``keep`` copies. Leaving the context takes ``wait_s`` seconds at most, and after a request to
        ``stop`` not longer than the grace. The function ``check_owner`` raises OwnedError once another process owns the
        directory, which ends the uploads.
        """
        self._store, self._run_dir, self._keep, self._wait_s = store, run_dir, keep, wait_s
        self._check_owner, self._stop = check_owner, stop or StopRequest()
        self._links = run_dir / "checkpoints.upload"
        self._ending = threading.Event()
        self._uploaded: int | None = None
        self._failed, self._failed_at, self._is_failing = -1, -math.inf, False
        self._thread = threading.Thread(target=self._work, name="rljax-uploads", daemon=True)

    def __enter__(self) -> Uploads:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ending.set()
        wait_s = 0.0 if kind is not None and issubclass(kind, KeyboardInterrupt) else self._wait_s
        deadline = time.monotonic() + wait_s
        while self._thread.is_alive():
            left_s = min(deadline - time.monotonic(), self._stop.left_s() - _FINISH_S)
            if left_s <= 0:
                break
            self._stop.at("upload")
            self._thread.join(min(left_s, 0.2))
        newest = self._newest()
        if self._thread.is_alive() and newest != self._uploaded:
            print(f"warning: no time was left to upload checkpoint {newest} to {self._store.url}", file=sys.stderr)
        elif newest is not None and newest == self._uploaded:
            print(f"checkpoint {newest} is in {self._store.url}", file=sys.stderr)

    def _newest(self) -> int | None:
        return max(saved_steps(self._run_dir), default=None)

    def _work(self) -> None:
        is_last = False
        with contextlib.suppress(OwnedError):  # the loop of the run says so
            while not is_last:
                is_last = self._ending.wait(_LOOK_S)
                step = self._newest()
                again = step != self._failed or is_last or time.monotonic() - self._failed_at > _AGAIN_S
                if step is not None and step != self._uploaded and again:
                    is_last &= self._upload(step)
        shutil.rmtree(self._links, ignore_errors=True)

    def _upload(self, step: int) -> bool:
        """Uploads the checkpoint of ``step``; returns False if a later one is wanted instead."""

        def check() -> None:
            if self._ending.is_set() and self._newest() != step:
                raise StoppedUploadError
            try:
                self._check_owner()
            except OwnedError as error:
                raise StoppedUploadError from error

        self._check_owner()
        try:
            _link_files(self._run_dir, step, self._links)
            self._store.upload(step, self._links, self._keep, check)
        except StoppedUploadError:
            return False
        except OSError as error:
            if step not in saved_steps(self._run_dir):  # it was deleted or moved aside while it was linked
                return False
            if not self._is_failing:
                why = error if isinstance(error, StoreError) else f"checkpoint {step} could not be uploaded: {error}"
                print(f"\nwarning: {why}; it is tried again", file=sys.stderr)
            self._failed, self._failed_at, self._is_failing = step, time.monotonic(), True
        else:
            self._uploaded, self._is_failing = step, False
        return True


def _link_files(run_dir: Path, step: int, folder: Path) -> None:
    """Fills ``folder`` with the files to upload: links, which outlive the checkpoint, and the record so far."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copyfile(source, target)

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run_dir / "checkpoints" / str(step), folder / CHECKPOINT, copy_function=link)
    shutil.copyfile(run_dir / "config.yaml", folder / "config.yaml")
    with (run_dir / "metrics.jsonl").open("rb") as rows, (folder / "metrics.jsonl").open("wb") as kept:
        kept.writelines(itertools.islice(rows, step))  # line n is the row of step n


@contextlib.contextmanager
def uploading(
    store: Store | None, config: Config, check_owner: Callable[[], None], stop: StopRequest
) -> Iterator[None]:
    """Uploads the complete checkpoints of the run inside the block; without a store it does nothing."""
    if store is None:
        yield
        return
    keep, wait_s = config.checkpoint.keep, config.checkpoint.upload_wait_s
    with Uploads(store, Path(config.run.dir), keep=keep, wait_s=wait_s, check_owner=check_owner, stop=stop):
        yield


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
