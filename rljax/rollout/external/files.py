"""A directory with files of trajectories, and the record of the rows that steps have used."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax.data.files import read_rows
from rljax.rollout.external.groups import PlacedTrajectory
from rljax.rollout.external.rows import RowLimits, Trajectory, read_trajectories

SUFFIXES = (".jsonl", ".parquet")


class TrajectoryFiles:
    """The files of one directory. Each file is read once and whole, in the order of their names.

    The state says which rows were used. So a resumed run uses each of the other rows, and no row twice.
    """

    def __init__(self, directory: Path, limits: RowLimits) -> None:
        """Sets the directory and the limits of each row. It reads nothing yet."""
        self.directory, self._limits = directory, limits
        self._used: dict[str, set[int]] = {}  # the used rows of each begun file, by name, in the order of reading
        self._left: dict[str, set[int]] = {}  # the unused rows of each begun file that this process has read, by name
        self._finished: dict[str, int] = {}  # the last step that used rows of each file without unused rows, by name

    def next_unread(self) -> str | None:
        """Returns the name of the first file that was not read yet, or None.

        Raises OSError if the directory cannot be listed.
        """
        names = (path.name for path in self.directory.iterdir() if path.suffix in SUFFIXES)
        return min((name for name in names if name[0] != "." and not self.knows(name)), default=None)

    def knows(self, name: str) -> bool:
        """Returns whether the file with this name was read."""
        return name in self._finished or name in self._left

    def read(self, name: str) -> list[Trajectory]:
        """Returns the trajectories of a file. Raises ValueError if any row of it cannot be used."""
        path = self.directory / name
        return read_trajectories(read_rows(path), str(path), self._limits)

    def begin(self, name: str, trajectories: Sequence[Trajectory], step: int) -> None:
        """Records that all trajectories of a file wait. A file without trajectories is finished at ``step``."""
        self._left[name] = {number for trajectory in trajectories for number in trajectory.rows}
        self._used.setdefault(name, set())
        self._finish_if_used(name, step)

    def use(self, items: Iterable[PlacedTrajectory], step: int) -> None:
        """Records that ``step`` has used or dropped the trajectories ``items``."""
        for item in items:
            self._left[item.file].difference_update(item.trajectory.rows)
            self._used[item.file].update(item.trajectory.rows)
            self._finish_if_used(item.file, step)

    def resume(self) -> Iterator[tuple[str, list[Trajectory]]]:
        """Yields the name and the unused trajectories of each file that an earlier process has begun, in their order.

        A file that is gone is named on stderr. Raises ValueError if a row of a file cannot be used.
        """
        for name, used in list(self._used.items()):
            if name in self._left:
                continue
            if not (self.directory / name).exists():
                print(f"warning: {self.directory / name} is gone; its unused rows are not trained on", file=sys.stderr)
                del self._used[name]
                continue
            yield name, [trajectory for trajectory in self.read(name) if not used.intersection(trajectory.rows)]

    def delete_finished(self, step: int) -> None:
        """Deletes the files whose last row was used at ``step`` or before, and forgets them."""
        for name in [name for name, last in self._finished.items() if last <= step]:
            (self.directory / name).unlink(missing_ok=True)
            del self._finished[name]

    def state_dict(self) -> dict[str, Any]:
        """Returns the record in JSON types.

        It has the finished files with their last step, and the begun files with their used rows.
        """
        return {
            "finished": dict(self._finished),
            "begun": [[name, sorted(used)] for name, used in self._used.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a record of ``state_dict``. It must be called before any file is read."""
        self._finished = {name: int(step) for name, step in state["finished"].items()}
        self._used = {name: set(used) for name, used in state["begun"]}

    def _finish_if_used(self, name: str, step: int) -> None:
        if not self._left[name]:
            del self._left[name], self._used[name]
            self._finished[name] = step
