"""Trajectories that wait until their group is complete and a step takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rljax.rollout.external.rows import Trajectory


class PlacedTrajectory(NamedTuple):
    """A trajectory and the file that holds it."""

    file: str
    trajectory: Trajectory


class GroupCounts(NamedTuple):
    """The numbers of groups that wait."""

    ready: int  # complete groups, whose policies are not newer than the trainer's
    newer: int  # complete groups with a token of a policy that is newer than the trainer's
    incomplete: int  # groups with too few trajectories yet


class WaitingGroups:
    """The trajectories that no step has taken yet, in groups of ``group_size``.

    Trajectories with the same group name fill one group after another.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._open: dict[str, list[PlacedTrajectory]] = {}
        self._complete: list[list[PlacedTrajectory]] = []

    def add(self, file: str, trajectories: Iterable[Trajectory]) -> None:
        """Adds the trajectories of a file, in their order."""
        for trajectory in trajectories:
            group = self._open.setdefault(trajectory.group, [])
            group.append(PlacedTrajectory(file, trajectory))
            if len(group) == self._group_size:
                self._complete.append(self._open.pop(trajectory.group))

    def count_with(self, trajectories: Sequence[Trajectory] = ()) -> int:
        """Returns the number of groups that wait, incomplete ones included, if ``trajectories`` were added."""
        sizes = {name: len(members) for name, members in self._open.items()}
        for trajectory in trajectories:
            sizes[trajectory.group] = sizes.get(trajectory.group, 0) + 1
        return len(self._complete) + sum(-(-size // self._group_size) for size in sizes.values())

    def counts(self, version: int) -> GroupCounts:
        """Returns the numbers of groups that wait, for a trainer whose policy is ``version``."""
        ready = sum(_is_ready(group, version) for group in self._complete)
        return GroupCounts(ready, len(self._complete) - ready, len(self._open))

    def drop_older(self, oldest: int) -> list[PlacedTrajectory]:
        """Drops each group with a token of a policy before version ``oldest``. Returns their trajectories."""
        stale = [group for group in (*self._complete, *self._open.values()) if _oldest(group) < oldest]
        self._complete = [group for group in self._complete if _oldest(group) >= oldest]
        self._open = {name: group for name, group in self._open.items() if _oldest(group) >= oldest}
        return [item for group in stale for item in group]

    def take(self, count: int, version: int) -> list[list[PlacedTrajectory]]:
        """Takes up to ``count`` groups that are ready for policy ``version``, in the order of their completion."""
        taken: list[list[PlacedTrajectory]] = []
        left: list[list[PlacedTrajectory]] = []
        for group in self._complete:
            (taken if len(taken) < count and _is_ready(group, version) else left).append(group)
        self._complete = left
        return taken


def _oldest(group: Sequence[PlacedTrajectory]) -> int:
    return min(item.trajectory.oldest_version for item in group)


def _is_ready(group: Sequence[PlacedTrajectory], version: int) -> bool:
    return all(item.trajectory.newest_version <= version for item in group)
