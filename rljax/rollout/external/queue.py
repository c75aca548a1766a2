"""The trajectories between another program and the trainer: checked, kept on the disk, and taken by steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rljax.rollout.external.files import TrajectoryFiles
from rljax.rollout.external.groups import GroupCounts, WaitingGroups
from rljax.rollout.external.rows import Trajectory


class PostedGroups(NamedTuple):
    """The groups of a step."""

    groups: list[list[Trajectory]]
    dropped_rows: int  # the number of rows that were dropped as too old since the batch before


class TrajectoryQueue:
    """The trajectories that wait for a step, and the policy versions that they may have.

    A thread may add trajectories while another takes them. ``version`` is the version of the trainer's policy.
    ``highest`` is the highest version that any process of the run may have published; None: it is not known.
    """

    def __init__(self, files: TrajectoryFiles, *, group_size: int, max_staleness: int) -> None:
        """Starts without a trajectory. ``files`` hold the trajectories, ``group_size`` of which make a group.

        A group with a token that is more than ``max_staleness`` versions older than the trainer is dropped.
        """
        self._files, self._groups, self._max_staleness = files, WaitingGroups(group_size), max_staleness
        self._changed = threading.Condition()
        self.dropped_rows = 0  # the number of rows dropped since the last batch was taken
        self.version = 0
        self.highest: int | None = None

    def start(self, version: int, highest: int | None) -> None:
        """Sets the versions, and reads the unused rows of the files that an earlier process has begun.

        Raises ValueError if a row of these files cannot be used.
        """
        with self._changed:
            self.version, self.highest = version, highest
            for name, trajectories in self._files.resume():
                self._add(name, trajectories)

    def expect(self, version: int) -> None:
        """Records that policy ``version`` is being published, so that trajectories may name it from now on."""
        with self._changed:
            self.highest = None if self.highest is None else max(self.highest, version)

    def publish(self, version: int) -> None:
        """Records that ``version`` is the trainer's newest policy."""
        with self._changed:
            self.version = version

    def check_versions(self, trajectories: Iterable[Trajectory], where: str) -> None:
        """Raises ValueError if a token was sampled with a policy version that does not exist.

        ``where`` is the name of the file or the request, for the message.
        """
        for trajectory in trajectories:
            if self.highest is not None and trajectory.newest_version > self.highest:
                raise ValueError(
                    f"{where}: row {trajectory.rows[0]}: version is {trajectory.newest_version}, but the newest policy "
                    f"of the run is {self.highest}"
                )

    def read_file(self) -> bool:
        """Reads the next file of the directory. Returns whether there was one.

        Raises ValueError if a row of it cannot be used, and OSError if the directory cannot be listed.
        """
        with self._changed:
            name = self._files.next_unread()
            if name is None:
                return False
            trajectories = self._files.read(name)
            self.check_versions(trajectories, str(self._files.directory / name))
            self._add(name, trajectories)
            return True

    def add_if(
        self, is_wanted: Callable[[int, int], bool], trajectories: Sequence[Trajectory], write: Callable[[], str]
    ) -> bool:
        """Adds trajectories if ``is_wanted`` allows it. Returns whether they were added.

        ``is_wanted`` is a function of the number of groups that wait now, and the number with ``trajectories``.
        ``write`` writes these to a file and returns its name. It is called before they are added.
        """
        with self._changed:
            if not is_wanted(self._groups.count_with(), self._groups.count_with(trajectories)):
                return False
            self._add(write(), trajectories)
            self._changed.notify_all()
            return True

    def take(self, count: int, step: int) -> PostedGroups | None:
        """Takes the ``count`` groups of a step, or returns None while fewer are ready. Drops groups that are too old.

        The trainer's policy has version ``step`` - 1.
        """
        with self._changed:
            self.version = step - 1
            stale = self._groups.drop_older(self.version - self._max_staleness)
            self._files.use(stale, step)
            self.dropped_rows += sum(len(item.trajectory.rows) for item in stale)
            if self._groups.counts(self.version).ready < count:
                return None
            taken = self._groups.take(count, self.version)
            self._files.use((item for group in taken for item in group), step)
            batch = PostedGroups([[item.trajectory for item in group] for group in taken], self.dropped_rows)
            self.dropped_rows = 0
            return batch

    def counts(self) -> GroupCounts:
        """Returns the numbers of groups that wait."""
        with self._changed:
            return self._groups.counts(self.version)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds for another thread to add trajectories. Returns whether one did."""
        with self._changed:
            return self._changed.wait(timeout_s)

    def delete_finished(self, step: int) -> None:
        """Deletes the files whose last row was used at ``step`` or before."""
        with self._changed:
            self._files.delete_finished(step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of the used rows in JSON types."""
        with self._changed:
            return self._files.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a record of ``state_dict``. It must be called before ``start``."""
        self._files.load_state_dict(state)

    def _add(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        self._files.begin(name, trajectories, self.version)
        self._groups.add(name, trajectories)
