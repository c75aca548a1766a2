"""The queue of trajectories from another program: files hold them, and each step takes its groups."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rljax.data.files import read_rows
from rljax.rollout.external.rows import RowLimits, Trajectory, read_trajectories, typed_rows
from rljax.weights.access import private_address

SUFFIXES = (".jsonl", ".parquet")
WaitingGroup = list[tuple[str, Trajectory]]  # trajectories of one group name, each behind the name of its file


class TrajectoryQueue:
    """The trajectories that wait for a step in the files of one directory, and the versions that they may have.

    Files are read in the order of their names, each once and whole. Trajectories with one group name fill one group
    after another. The state says which rows were used. So a resumed run uses all remaining rows, and no row twice. A
    thread may add trajectories while another takes them.

    Attributes:
      directory: The directory of the files.
      limits: The limits of each row.
      version: The version of the trainer's policy.
      highest: The highest version that any process of the run may have published; None: it is not known.
      dropped_rows: The number of rows that ``take`` has dropped as too old since its caller set this to 0.
    """

    def __init__(self, directory: Path, limits: RowLimits, *, group_size: int, max_staleness: int) -> None:
        """Starts without a trajectory, and reads nothing yet. ``group_size`` trajectories make a group.

        A group with a token that is more than ``max_staleness`` versions older than the trainer is dropped.
        """
        self.directory, self.limits = directory, limits
        self.version, self.dropped_rows = 0, 0
        self.highest: int | None = None
        self.group_size, self._max_staleness = group_size, max_staleness
        self._changed = threading.Condition()
        self._open: dict[str, WaitingGroup] = {}  # the groups with too few trajectories, by name
        self._complete: list[WaitingGroup] = []
        self._unread: Iterator[str] = iter(())  # the names that the last listing of the directory has left
        self._used: dict[str, set[int]] = {}  # the used rows of each begun file, by name, in the order of reading
        self._left: dict[str, set[int]] = {}  # the unused rows of each begun file that this process has read, by name
        self._finished: dict[str, int] = {}  # the last step that used rows of each file without unused rows, by name

    def start(self, version: int, highest: int | None) -> None:
        """Sets the versions, and reads the unused rows of the files that an earlier process has begun.

        A file that is gone is named on stderr. Raises ValueError if a row of these files cannot be used.
        """
        with self._changed:
            self.version, self.highest = version, highest
            for name, used in list(self._used.items()):
                path = self.directory / name
                if path.exists():
                    self._add(name, [one for one in self.read(name) if not used.intersection(one.rows)])
                else:
                    print(f"warning: {path} is gone; its unused rows are not trained on", file=sys.stderr)
                    del self._used[name]

    def expect(self, version: int) -> None:
        """Records that policy ``version`` is being published, so that trajectories may name it from now on."""
        with self._changed:
            self.highest = None if self.highest is None else max(self.highest, version)

    def publish(self, version: int) -> None:
        """Records that ``version`` is the trainer's newest policy."""
        with self._changed:
            self.version = version

    def check_versions(self, trajectories: Iterable[Trajectory], where: str) -> None:
        """Raises ValueError if a token names a policy version above ``highest``, unless that is unknown.

        ``where`` is the name of the file or the request, for the message.
        """
        for trajectory in trajectories:
            if self.highest is not None and trajectory.newest_version > self.highest:
                raise ValueError(
                    f"{where}: row {trajectory.rows[0]}: version is {trajectory.newest_version}, but the newest policy "
                    f"of the run is {self.highest}"
                )

    def read(self, name: str) -> list[Trajectory]:
        """Returns the trajectories of a file. Raises ValueError if any row of it cannot be used."""
        path = self.directory / name
        return read_trajectories(typed_rows(read_rows(path), str(path), self.limits), str(path), self.limits)

    def read_file(self) -> bool:
        """Adds the trajectories of the next file of the directory. Returns whether there was one.

        Raises ValueError if a row of it cannot be used, and OSError if the directory cannot be listed.
        """
        with self._changed:
            if (name := next(self._unread, None)) is None:
                found = {name for name in os.listdir(self.directory) if name.endswith(SUFFIXES) and name[0] != "."}
                names = sorted(found - self._finished.keys() - self._left.keys())
                self._unread = (name for name in names if (self.directory / name).exists())
                name = next(self._unread, None)
            if name is None:
                return False
            trajectories = self.read(name)
            self.check_versions(trajectories, str(self.directory / name))
            self._add(name, trajectories)
            return True

    def add(self, trajectories: Sequence[Trajectory], most: int, write: Callable[[], str]) -> bool:
        """Adds trajectories, unless new groups would then wait beyond ``most``. Returns whether they were added.

        ``most`` holds for complete groups and for incomplete ones, each by itself: a group that never becomes complete
        takes no place of a complete one. Rows that only complete groups are always added. ``write`` writes the
        trajectories to a file and returns its name. It is called before they are added.
        """
        with self._changed:
            sizes = Counter({name: len(members) for name, members in self._open.items()})
            sizes.update(trajectory.group for trajectory in trajectories)
            begun = sum(-(-size // self.group_size) for size in sizes.values()) - len(self._open)
            complete = len(self._complete) + sum(size // self.group_size for size in sizes.values())
            incomplete = sum(size % self.group_size > 0 for size in sizes.values())
            if begun and (complete > most or incomplete > max(most, len(self._open))):
                return False
            self._add(write(), trajectories)
            self._changed.notify_all()
            return True

    def take(self, count: int, step: int) -> list[list[Trajectory]] | None:
        """Takes the ``count`` groups of a step, or returns None while fewer are ready. Drops groups that are too old.

        The trainer's policy has version ``step`` - 1. Groups are taken in the order in which they became complete.
        """
        with self._changed:
            self.version = step - 1
            oldest = self.version - self._max_staleness
            for group in [one for one in (*self._complete, *self._open.values()) if _oldest(one) < oldest]:
                self._use(group, step)
                self.dropped_rows += sum(len(one.rows) for _, one in group)
            self._complete = [group for group in self._complete if _oldest(group) >= oldest]
            self._open = {name: group for name, group in self._open.items() if _oldest(group) >= oldest}
            ready = [group for group in self._complete if _newest(group) <= self.version][:count]
            if len(ready) < count:
                return None
            self._complete = [group for group in self._complete if not any(group is one for one in ready)]
            for group in ready:
                self._use(group, step)
            return [[one for _, one in group] for group in ready]

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of groups that wait: (ready, newer, incomplete).

        Ready and newer groups are complete; a newer one has a token of a policy that is newer than the trainer's.
        """
        with self._changed:
            ready = sum(_newest(group) <= self.version for group in self._complete)
            return ready, len(self._complete) - ready, len(self._open)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds for another thread's ``add``. Returns whether it added trajectories."""
        with self._changed:
            return self._changed.wait(timeout_s)

    def delete_finished(self, step: int) -> list[str]:
        """Deletes the files whose last row was used at ``step`` or before, forgets them, and returns their names."""
        with self._changed:
            names = [name for name, last in self._finished.items() if last <= step]
            for name in names:
                (self.directory / name).unlink(missing_ok=True)
                del self._finished[name]
            return names

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of the used rows in JSON types.

        It has the finished files with their last step, and the begun files with their used rows.
        """
        with self._changed:
            begun = [[name, sorted(used)] for name, used in self._used.items()]
            return {"finished": dict(self._finished), "begun": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a record of ``state_dict``. It must be called before ``start``."""
        self._finished = {name: int(step) for name, step in state["finished"].items()}
        self._used = {name: set(used) for name, used in state["begun"]}

    def _add(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Adds the trajectories of a file to their groups. A file without a trajectory is finished."""
        self._left[name] = {number for trajectory in trajectories for number in trajectory.rows}
        self._used.setdefault(name, set())
        self._finish_if_used(name, self.version)
        for trajectory in trajectories:
            group = self._open.setdefault(trajectory.group, [])
            group.append((name, trajectory))
            if len(group) == self.group_size:
                self._complete.append(self._open.pop(trajectory.group))

    def _use(self, group: WaitingGroup, step: int) -> None:
        """Records that ``step`` has used or dropped the rows of a group."""
        for name, trajectory in group:
            self._left[name].difference_update(trajectory.rows)
            self._used[name].update(trajectory.rows)
            self._finish_if_used(name, step)

    def _finish_if_used(self, name: str, step: int) -> None:
        if not self._left[name]:
            del self._left[name], self._used[name]
            self._finished[name] = step


def _oldest(group: WaitingGroup) -> int:
    return min(one.oldest_version for _, one in group)


def _newest(group: WaitingGroup) -> int:
    return max(one.newest_version for _, one in group)


def is_address(trajectories: str) -> bool:
    """Returns whether the value of ``rollout.trajectories`` is an address. Otherwise it is a directory."""
    return "://" in trajectories


def parse_address(url: str) -> tuple[str, int]:
    """Returns the host and the port of ``http://HOST:PORT``.

    Raises ValueError if ``url`` has another form, or machines outside a private network may reach the host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"rollout.trajectories: {url!r} is not an address: {error}") from error
    if parts.scheme != "http" or not host or port is None or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(
            f"rollout.trajectories must be a directory or http://HOST:PORT (PORT 0: a free one), got {url}"
        )
    private_address(host)
    return host, port
