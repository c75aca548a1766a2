"""Files that appear whole or not at all, and directories that one process owns."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rljax.distributed.ownership import claim, provably_dead
from rljax.errors import writing

_OWNER = "owner.json"

# Of version 2 of control groups and of version 1: the line of /proc/self/cgroup, the folder, names of files and keys.
_GROUPS = (
    (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    (r"^\d+:[^:]*memory.*?:/(.*)$", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, and renames it to ``path`` if the ``with`` block ends without error.

    A reader of ``path`` finds the old content or the new content, never a part of it. After an error, or if the process
    is killed before, ``path`` is as it was. ``path`` may be a directory only if it does not exist yet.
    Raises OSError, which names a file, if the content cannot be written or renamed.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with writing(partial):
            yield partial
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()  # a full disk needs the room; a directory stays
        raise
    partial.replace(path)


@contextlib.contextmanager
def filled_directory(path: Path) -> Iterator[None]:
    """Makes a directory and its parents, and removes the new ones that are empty at the end of the ``with`` block.

    Raises OSError if the directory cannot be made.
    """
    new = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for each in new:
                each.rmdir()


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, which appears whole by a rename; text is encoded as UTF-8. Raises OSError."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file, which appears whole by a rename, and returns once it is on the disk. Raises OSError."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def memory_directory() -> Path:
    """Returns /dev/shm, a directory in this machine's memory, or the temporary directory if /dev/shm is not usable."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that processes of this machine can still take; None if the system does not say.

    A limit of the container or of Slurm (cgroups) counts if it is smaller. ``root`` is the directory of proc and sys.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        if found is not None:
            return min([int(found.group(1)) * 1024, *_free_in_groups(root)])
    return None


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yields the bytes that are left to the control group of this process and to each group above it with a limit."""
    own = root / "proc/self/cgroup"
    groups = own.read_text() if own.exists() else ""
    for line, folder, limit, usage, prefix in _GROUPS:
        found = re.search(line, groups, re.MULTILINE)
        name = PurePosixPath(found.group(1) if found is not None else "")
        for group in (root / folder / each for each in (name, *name.parents)):
            with contextlib.suppress(OSError, ValueError, KeyError):  # there is no such group, or it has no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                files = int(stat[f"{prefix}inactive_file"]) + int(stat[f"{prefix}active_file"])
                # The system gives the memory of files back when asked.
                yield int((group / limit).read_text()) - int((group / usage).read_text()) + files


def check_room(directory: Path, needed: int, setting: str) -> None:
    """Raises RuntimeError if the file system of ``directory`` has less than ``needed`` bytes free for weights.

    ``setting`` is the name of the option that sets the directory, which the message gives as the remedy.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        has, takes = (f"{count / 2**20:,.1f} MiB" for count in (free, needed))
        raise RuntimeError(
            f"{directory} has {has} free, versions of the weights take {takes}: "
            f"set {setting} to a larger one; a container gets more /dev/shm by --ipc=host or --shm-size"
        )


class OwnedDirectory:
    """A new directory, ``root`` in ``parent``, that this process owns for one run and removes in :meth:`close`.

    Only the user of this process can read it.
    """

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None) -> None:
        """Makes a directory ``prefix*`` in ``parent``. Removes older ones whose owner is provably dead.

        None for ``parent`` means ``memory_directory()``. Raises RuntimeError if ``parent`` cannot be written.
        """
        self.parent = Path(parent).absolute() if parent is not None else memory_directory()
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.parent, prefix, _OWNER)
            self.root = Path(tempfile.mkdtemp(prefix=prefix, dir=self.parent))
            self._owner = claim(self.root / _OWNER)
        except OSError as error:
            raise RuntimeError(f"cannot write under {self.parent}: {error}") from error

    def close(self) -> None:
        """Removes the directory; may be called twice."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._owner.release()


def remove_abandoned(parent: Path, prefix: str, owners: str) -> None:
    """Removes directories ``prefix*`` in ``parent`` whose owners are provably dead.

    ``owners`` is the glob pattern of the owners' records in such a directory. A directory without a record stays.
    """
    for root in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it belongs to another user, or was removed in the meantime
            records = list(root.glob(owners))
            if records and all(provably_dead(record) for record in records):
                shutil.rmtree(root, ignore_errors=True)
