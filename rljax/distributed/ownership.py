"""Who owns a path: a record that one living process holds, on local and on shared file systems.

The record is a small file: host, process, the process's start time, and a heartbeat, which is the file's modification
time, moved by a thread. Locks of the kernel (flock) are not used: on some shared file systems they hold on one machine
only. On the owner's own machine the table of processes says whether it lives; from anywhere else, its heartbeat does.

Example:
  with claim(run_dir / "owner.json") as owner:
      ...  # owner.held() says whether the record is still this process's
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rljax.errors import OwnedError, writing

HEARTBEAT_S = 10.0
STALE_S = 60.0
SILENT_S = 900.0
_POLL_S = 1.0  # between two looks at a heartbeat
_SETTLE_S = 0.5  # after a take-over, before it is believed
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Record:
    """What an owner wrote of itself.

    Attributes:
      host: the machine's name.
      machine: the boot of that machine and its space of process ids; "" where that cannot be told.
      pid: process id.
      started: when the process started, in the kernel's ticks since boot; 0 where that cannot be told.
      token: unique to this claim.
      since: when the claim was made, by the owner's clock.
    """

    host: str
    machine: str
    pid: int
    started: int
    token: str
    since: str = "an unknown time"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_UNREADABLE = Record("an unknown machine", "", 0, 0, "")


class Ownership:
    """A path that this process owns until :meth:`release`. Made by :func:`claim`; a context manager."""

    def __init__(self, path: Path, record: Record, heartbeat_s: float) -> None:
        self.path, self.record = path, record
        self._heartbeat_s = heartbeat_s
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rljax-heartbeat", daemon=True)
        self._thread.start()

    def held(self) -> bool:
        """Whether the record on disk is still this one: another takes it over when the heartbeat stops for long.

        Raises:
          OSError: the record cannot be read.
        """
        return read(self.path) == self.record

    def release(self) -> None:
        """Ends the heartbeat and removes the record if it is still this one; may be called twice."""
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                if self.held():
                    self.path.unlink()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(self._heartbeat_s):
            # A file system that fails for a moment is tried again; a record of another is left alone.
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                if _parse(file.read()) == self.record:
                    os.utime(file.fileno())  # no times given: the file server's clock, not this machine's


def claim(path: str | os.PathLike[str], *, stale_s: float = STALE_S, heartbeat_s: float = HEARTBEAT_S) -> Ownership:
    """Makes this process the one owner of ``path``, a file in a directory that exists.

    The record of an owner that is provably dead is taken over at once. Where that cannot be told (another machine) its
    heartbeat is watched for up to ``stale_s``, which is printed, and the record is taken over when it has not moved.
    Of several processes that claim at once, one succeeds.

    Args:
      path: of the record.
      stale_s: how long a heartbeat must stand still before its owner counts as dead (seconds).
      heartbeat_s: between two beats of this owner (seconds); well below the ``stale_s`` of every other claimer.

    Raises:
      OwnedError: another owner lives; the message names it.
      OSError: the directory cannot be written.
    """
    path = Path(path)
    pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    record = Record(socket.gethostname(), _machine(), pid, _started(pid) or 0, uuid.uuid4().hex, now)
    taken_over = False
    while True:
        if _create(path, record):
            if taken_over:
                time.sleep(_SETTLE_S)  # a slower claimer may have displaced this record by mistake
            if not taken_over or read(path) == record:
                return Ownership(path, record, heartbeat_s)
        other = read(path)
        if other is not None:
            if not _is_dead(path, other, SILENT_S) and not _stands_still(path, other, stale_s):
                raise OwnedError(f"{path} is held by {other}, which is alive, since {other.since}")
            taken_over = _take_away(path, other)


def read(path: str | os.PathLike[str]) -> Record | None:
    """The record at ``path``; None when there is none. One that cannot be parsed is of an unknown machine.

    Raises:
      OSError: the file is there and cannot be read.
    """
    try:
        return _parse(Path(path).read_bytes())
    except FileNotFoundError:
        return None


def provably_dead(path: str | os.PathLike[str], *, silent_s: float = SILENT_S) -> bool:
    """Whether the owner of the record at ``path`` is dead beyond doubt; False when there is no record.

    An owner on this machine is dead when its process is gone, or its process id belongs to a process that started at
    another time. Any other owner is dead when its heartbeat has not moved for ``silent_s`` (seconds), by the clock of
    the file system that holds the record.

    Raises:
      OSError: the record cannot be read, or its directory cannot be written (a file is made there to see the clock).
    """
    path = Path(path)
    record = read(path)
    return record is not None and _is_dead(path, record, silent_s)


def _is_dead(path: Path, record: Record, silent_s: float) -> bool:
    """As ``provably_dead``, of a record that was read: another may have taken its place at ``path`` since."""
    if _is_here(record):
        return _started(record.pid) not in (record.started, 0)
    with tempfile.TemporaryFile(dir=path.parent) as fresh:
        now = os.fstat(fresh.fileno()).st_mtime
    beat = _heartbeat(path)
    return beat is not None and now - beat > silent_s


def _stands_still(path: Path, record: Record, stale_s: float) -> bool:
    """Watches the heartbeat of ``record``: False as soon as it moves, or at once for an owner on this machine."""
    if _is_here(record):
        return False
    first, began = _heartbeat(path), time.monotonic()
    print(f"{path} is held by {record}: waiting up to {stale_s:g} s for a sign that it is alive", flush=True)
    while (left := began + stale_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left))
        beat = _heartbeat(path)
        if beat != first or beat is None:
            return beat is None  # moved: alive; gone: released
    return True


def _create(path: Path, record: Record) -> bool:
    """Puts ``record`` at ``path`` unless there is one. A hard link appears whole or not at all, on NFS too."""
    content = json.dumps(asdict(record)).encode()
    whole = path.with_name(f"{path.name}.{record.token}")
    try:
        with writing(path):
            whole.write_bytes(content)
        try:
            os.link(whole, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return _create_without_links(path, content)
            # The answer of a link over NFS may be lost, and the link there all the same.
            if whole.stat().st_nlink != 2:
                if isinstance(error, FileExistsError):
                    return False
                raise
        return True
    finally:
        whole.unlink(missing_ok=True)


def _create_without_links(path: Path, content: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _take_away(path: Path, record: Record) -> bool:
    """Removes ``record``, of a dead owner, from ``path``; puts back what another claimer wrote there meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        if read(path) != record:
            return False
        path.rename(aside)
    except FileNotFoundError:
        return False
    found = read(aside)
    if found != record:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    return found == record


def _heartbeat(path: Path) -> float | None:
    """Modification time; opened, because NFS asks the server again at an open and not at a stat."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> Record:
    try:
        fields: dict[str, Any] = json.loads(content)
        return Record(
            str(fields["host"]),
            str(fields["machine"]),
            int(fields["pid"]),
            int(fields["started"]),
            str(fields["token"]),
            str(fields["since"]),
        )
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE


def _is_here(record: Record) -> bool:
    """Whether this machine's table of processes knows the owner."""
    return record.machine != "" and record.machine == _machine()


def _machine() -> str:
    """This boot of this machine and its space of process ids. Host names repeat, and containers count from 1."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When process ``pid`` of this machine started (ticks since boot).

    None when it is gone or only a zombie, 0 when it is there and this user may not look at it.
    """
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
