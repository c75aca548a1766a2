"""Ownership of a path by one living process, on local and on shared file systems.

The owner writes a record: a small file with its host, its process id and the start time of the process. A thread of the
owner renews the file's modification time, which is its heartbeat. Kernel locks (flock) are not used, because on some
shared file systems they hold on one machine only. On the owner's machine the process table shows whether the owner
lives. On any other machine the heartbeat shows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rljax.errors import OwnedError, writing

HEARTBEAT_S = 10.0
STALE_S = 60.0
SILENT_S = 900.0
_POLL_S = 1.0  # The time between two looks at a heartbeat.
_SETTLE_S = 0.5  # The time after a take-over until the record is read again.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Record:
    """The record that an owner writes about itself."""

    host: str
    machine: str  # the identity of the machine's boot and of its process namespace; "" if unknown
    pid: int
    started: int  # the start time of the process, in kernel ticks since boot; 0 if unknown
    token: str  # a string that is unique to this claim
    since: str = "an unknown time"  # the time of the claim, on the owner's clock

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_UNREADABLE = Record("an unknown machine", "", 0, 0, "")


class Ownership:
    """The ownership of a path, from :func:`claim` until :meth:`release`, which the end of a ``with`` block calls."""

    def __init__(self, path: Path, record: Record, heartbeat_s: float) -> None:
        self.path, self.record, self._heartbeat_s = path, record, heartbeat_s
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rljax-heartbeat", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Returns whether the record at the path is still this process's. Raises OSError if it cannot be read."""
        return read(self.path) == self.record

    def has_record(self) -> bool:
        """Returns whether any record is at the path. It looks twice, because a record may be absent for a moment.

        Raises OSError if the record cannot be read.
        """
        for pause_s in (0.0, _SETTLE_S):
            time.sleep(pause_s)
            if read(self.path) is not None:
                return True
        return False

    def folder(self) -> Path | None:
        """Returns the present path of the record's folder, which may have been moved; None if it was removed.

        Raises OSError if the file system does not say. It must not be called after :meth:`release`.
        """
        for find in (lambda: self.path.parent, Path(f"/proc/self/fd/{self._folder}").readlink):
            try:
                if os.path.samestat((place := find()).stat(), os.fstat(self._folder)):
                    return place
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return None

    def release(self) -> None:
        """Ends the heartbeat, and removes the record if it is still this process's. It may be called twice."""
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                path = (self.folder() or self.path.parent) / self.path.name
                if read(path) == self.record:
                    path.unlink()
            os.close(self._folder)

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(self._heartbeat_s):
            # A file system may fail for a moment, so the next beat tries again. Another owner's record is left alone.
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                if _parse(file.read()) == self.record:
                    os.utime(file.fileno())  # The file server takes its own clock.


def claim(path: str | os.PathLike[str], *, stale_s: float = STALE_S, heartbeat_s: float = HEARTBEAT_S) -> Ownership:
    """Makes this process the only owner of ``path``, the file of the owner's record. Its directory must exist.

    The record of an owner that is provably dead is taken over at once. If the owner is on another machine, this prints
    a line and watches its heartbeat for up to ``stale_s`` seconds. It takes the record over if the heartbeat does not
    move. If several processes claim a path at the same time, one succeeds. ``heartbeat_s`` is the time between two
    beats of this owner (seconds). It must be well below the ``stale_s`` of every other process.

    Raises:
      OwnedError: Another owner lives. The message names it.
      OSError: The directory cannot be written.
    """
    path = Path(path)
    pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    record = Record(socket.gethostname(), _machine(), pid, _started(pid) or 0, uuid.uuid4().hex, now)
    taken_over = False
    while True:
        if _create(path, record):
            if taken_over:
                time.sleep(_SETTLE_S)  # A slower process may have removed this record by mistake.
            if not taken_over or read(path) == record:
                return Ownership(path, record, heartbeat_s)
        other = read(path)
        if other is not None:
            if not _is_dead(path, other, SILENT_S) and not _stands_still(path, other, stale_s):
                raise OwnedError(f"{path} is held by {other}, which is alive, since {other.since}")
            taken_over = _take_away(path, other)


def read(path: str | os.PathLike[str]) -> Record | None:
    """Returns the record at ``path``, or None if there is none. Raises OSError if the file cannot be read.

    A record that cannot be parsed becomes the record of an unknown machine.
    """
    try:
        return _parse(Path(path).read_bytes())
    except FileNotFoundError:
        return None


def provably_dead(path: str | os.PathLike[str], *, silent_s: float = SILENT_S) -> bool:
    """Returns whether the owner of the record at ``path`` is certainly dead; False if there is no record.

    An owner on this machine is dead if its process is gone, or if another process has its process id, by the start
    time. Any other owner is dead if its heartbeat has not moved for ``silent_s``, on the clock of the file system that
    has the record (seconds). Raises OSError if the record cannot be read, or no file can be made beside it to read that
    clock.
    """
    path = Path(path)
    record = read(path)
    return record is not None and _is_dead(path, record, silent_s)


def _is_dead(path: Path, record: Record, silent_s: float) -> bool:
    """Returns whether the owner of ``record`` is dead. Another record may be at ``path`` by now."""
    if _is_here(record):
        return _started(record.pid) not in (record.started, 0)
    with tempfile.TemporaryFile(dir=path.parent) as fresh:
        now = os.fstat(fresh.fileno()).st_mtime
    beat = _heartbeat(path)
    return beat is not None and now - beat > silent_s


def _stands_still(path: Path, record: Record, stale_s: float) -> bool:
    """Watches the heartbeat of ``record``. Returns False once it moves, and at once for an owner on this machine."""
    if _is_here(record):
        return False
    first, began = _heartbeat(path), time.monotonic()
    print(f"{path} is held by {record}: waiting up to {stale_s:g} s for a sign that it is alive", flush=True)
    while (left := began + stale_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))
        beat = _heartbeat(path)
        if beat != first or beat is None:
            return beat is None  # A beat that moved means alive; a record that is gone was released.
    return True


def _create(path: Path, record: Record) -> bool:
    """Writes ``record`` to ``path`` unless a record exists. A hard link appears whole or not at all, also on NFS."""
    content = msgspec.json.encode(record)
    whole = path.with_name(f"{path.name}.{record.token}")
    try:
        with writing(path):
            whole.write_bytes(content)
        try:
            os.link(whole, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                with path.open("xb") as file:
                    file.write(content)
            elif whole.stat().st_nlink != 2:  # NFS may lose the answer to a link that was made.
                raise
        return True
    except FileExistsError:
        return False
    finally:
        whole.unlink(missing_ok=True)


def _take_away(path: Path, record: Record) -> bool:
    """Removes the record of a dead owner, and returns whether it was removed.

    If another process has written its own record meanwhile, that record is put back.
    """
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        if read(path) != record:
            return False
        path.rename(aside)
    except FileNotFoundError:
        return False
    removed = read(aside)
    if removed != record:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    return removed == record


def _heartbeat(path: Path) -> float | None:
    """Returns a record's modification time, or None if there is no record.

    The file is opened, because NFS asks the server at an open and not at a stat.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> Record:
    try:
        return msgspec.json.decode(content, type=Record)
    except msgspec.MsgspecError:
        return _UNREADABLE


def _is_here(record: Record) -> bool:
    """Returns whether the owner is on this machine, whose process table then shows whether it lives."""
    return record.machine != "" and record.machine == _machine()


def _machine() -> str:
    """Returns the identity of this boot and process namespace. Host names repeat, and containers count from 1."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Returns the start time of a process here, in ticks since boot; None if it is gone, 0 if it may not be read."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return None if fields[0] in "ZX" else int(fields[19])
