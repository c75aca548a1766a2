"""Sends the record of a run to experiment trackers: Weights & Biases, trackio, MLflow, or a class of the user.

Each tracker has a thread, which reads the rows from ``metrics.jsonl``. So a slow tracker delays nothing and takes no
memory. If a tracker fails, a line says so, and it gets no more rows. A tracker that hangs is left behind at the end. A
run that continues goes on in the same run of the tracker, which first gets the rows that it lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pkgutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from rljax import user_code
from rljax.distributed.files import write_whole
from rljax.errors import OwnedError, install_words, parse_json
from rljax.record.rows import NONFINITE_KEYS, Row

SHIPPED: Mapping[str, str] = {
    "wandb": "rljax.record.tracker_kinds:WandbTracker",
    "trackio": "rljax.record.tracker_kinds:TrackioTracker",
    "mlflow": "rljax.record.tracker_kinds:MlflowTracker",
}
FOLDER = "trackers"  # the folder of a run directory with the id of each tracker's run, and the tracker's own files
READ_EVERY_S = 0.5
END_S = 10.0  # the longest time that the end of a run waits for its trackers
_LONGEST = 300  # the characters of a library's error that a message keeps


@dataclass(frozen=True)
class RecordConfig:
    """The experiment trackers that get the record of a run, in addition to the files of its directory."""

    trackers: tuple[str, ...] = ()
    """Trackers that get the configuration, each row, report.png and the summary: wandb, trackio, mlflow, or
    ``package.module:Class`` of your own. Each of the three needs the extra of its name, as in
    ``pip install '.[trackio]'`` in a checkout."""
    project: str = "rljax"
    """Project of the trackers that the run belongs to. MLflow calls it an experiment."""
    run_name: str = ""
    """Name of the run in the trackers. Empty: the name of the run directory."""

    def __post_init__(self) -> None:
        for name in self.trackers:
            if name not in SHIPPED and "" in name.partition(":"):
                known = ", ".join(SHIPPED)
                raise ValueError(f"trackers must name {known} or package.module:Class, got {name!r}")
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers must be different, got {list(self.trackers)}")
        if not self.project:
            raise ValueError("project must not be empty")


@dataclass(frozen=True)
class TrackedRun:
    """The facts from which a tracker is made."""

    project: str  # the project of the run in the tracker
    name: str  # the name of the run in the tracker
    id: str  # the id of the run, the same in each process that continues it
    stored_step: int  # the last step that the tracker is known to have; 0: none
    directory: Path  # the folder in the run directory for the tracker's own files; it exists
    config: dict[str, Any]  # the resolved configuration, nested as in config.yaml
    settings: dict[str, Any]  # the same values by dotted key


class Tracker(Protocol):
    """A run in an experiment tracker, made as ``Class(run: TrackedRun)`` and used by one thread only.

    Any method may raise, and then no method is called any more. The class may have two static methods. ``check()`` is
    called before the run starts, and raises ValueError if the tracker cannot be used. ``abandon()`` is called on
    another thread if the tracker did not end in time. It stops everything that would hold up the end of the process.
    """

    stored_step: int  # the last step that the tracker has for certain, steps of earlier processes included
    where: str  # the place at which a reader finds the run, for one line on the terminal

    def log(self, row: Row) -> None:
        """Takes the row of a step: its bools, strings and numbers, with NaN for numbers that are not finite."""

    def finish(self, summary: Mapping[str, Any], figures: Mapping[str, Path], failed: bool) -> None:
        """Takes the summary and the PNG files by name, and ends the run in the tracker.

        Both are empty if the run failed, or if the tracker already got them at this step.
        """


MakeTracker = Callable[[TrackedRun], Tracker]


class Trackers:
    """The trackers of a run, as a context around it. A thread feeds each of them from :meth:`start` on.

    At the end of the block each tracker gets the summary and the figures. All trackers together have ``END_S`` seconds
    for that. After an error in the block the trackers mark the run as failed.
    """

    def __init__(self, config: RecordConfig) -> None:
        """Finds the trackers. Raises ValueError if one is not installed, cannot be imported or refuses its check."""
        self._config = config
        self._makers = {kind: _find(kind) for kind in config.trackers}
        self._feeds: list[_Feed] = []
        self._left_s: Callable[[], float] = lambda: math.inf

    def start(
        self,
        run_dir: Path,
        config: dict[str, Any],
        settings: dict[str, Any],
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Opens the trackers on threads of their own, which then read the rows of ``run_dir``.

        ``config`` is the resolved configuration, nested as in config.yaml, and ``settings`` has its values by dotted
        key. ``left_s`` returns the seconds until the process has to end.
        """
        self._left_s = left_s
        name = self._config.run_name or run_dir.resolve().name
        run = TrackedRun(self._config.project, name, "", 0, run_dir / FOLDER, config, settings)
        self._feeds = [_Feed(kind, make, run, run_dir) for kind, make in self._makers.items()]
        for feed in self._feeds:
            feed.start()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OwnedError) or isinstance(getattr(error, "__cause__", None), OwnedError):
            for feed in self._feeds:  # another process goes on with the run
                feed.leave()
            return
        seconds = max(min(self._left_s(), END_S), 1.0) if not isinstance(error, KeyboardInterrupt) else 1.0
        ends_at = time.monotonic() + seconds
        for feed in self._feeds:
            feed.end(ends_at - seconds / 2, failed=error is not None)
        for feed in self._feeds:
            feed.join(max(ends_at - time.monotonic(), 0.0))
            feed.leave()


@dataclass
class _State:
    """The file by which a process that continues the run finds it in a tracker."""

    path: Path
    project: str
    id: str
    stored_step: int = 0  # the last step that the tracker has for certain
    ended_step: int = 0  # the last step at which the tracker got the summary; 0: it got none

    @classmethod
    def read(cls, path: Path, project: str) -> _State:
        """Reads the file. If it has no state of this project, a new state is made and written."""
        if path.exists():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                kept = parse_json(path.read_bytes())
                if kept["project"] == project:
                    return cls(path, **{key: kept[key] for key in ("project", "id", "stored_step", "ended_step")})
        state = cls(path, project, uuid.uuid4().hex)
        state.keep()
        return state

    def keep(self, tracker: Tracker | None = None) -> None:
        """Writes the file. With a ``tracker`` it first takes over the last step that the tracker has."""
        self.stored_step = tracker.stored_step if tracker else self.stored_step
        kept = {key: value for key, value in dataclasses.asdict(self).items() if key != "path"}
        write_whole(self.path, json.dumps(kept) + "\n")


class _Feed(threading.Thread):
    """The thread of one tracker. The process may end while the tracker hangs."""

    def __init__(self, kind: str, make: MakeTracker, run: TrackedRun, run_dir: Path) -> None:
        super().__init__(name=f"tracker {kind}", daemon=True)
        self._kind, self._make, self._run, self._run_dir = kind, make, run, run_dir
        # Another process that takes the directory over replaces the file, so its rows are never read here.
        self._file = (run_dir / "metrics.jsonl").open("rb")
        self._given, self._rows_until, self._failed = 0, math.inf, False
        self._ending, self._left, self._is_over, self._has_told = threading.Event(), False, False, False

    def run(self) -> None:
        """Opens the tracker and gives it rows until the end. An error becomes one line."""
        try:
            with self._file:
                self._feed()
        except BaseException as error:  # a library may raise anything, SystemExit included
            self._tell(f"failed and gets no more rows: {_in_one_line(error)}")
        self._is_over = True

    def end(self, rows_until: float, *, failed: bool) -> None:
        """Asks the thread to give the last rows and the summary, and to end.

        Rows are given until ``time.monotonic()`` reaches ``rows_until``. ``failed`` says whether the run failed.
        """
        self._rows_until, self._failed = rows_until, failed
        self._ending.set()

    def leave(self) -> None:
        """Leaves the tracker behind. If it was asked to end and has not ended, a line says so."""
        if self._ending.is_set() and not self._is_over:
            self._tell(f"did not end in time, it has the rows up to step {self._given}")
            with contextlib.suppress(Exception):  # of a process that has just ended, or of a user's class
                getattr(self._make, "abandon", lambda: None)()
        self._left = True
        self._ending.set()

    def _feed(self) -> None:
        self._run.directory.mkdir(exist_ok=True)
        state = _State.read(self._run.directory / f"{self._kind}.json", self._run.project)
        tracker = self._make(dataclasses.replace(self._run, id=state.id, stored_step=state.stored_step))
        self._given = tracker.stored_step
        if not self._left:
            tqdm.write(f"tracked by {self._kind}: {tracker.where}", file=sys.stderr)
        skipped = 0
        while not self._ending.is_set():
            skipped += self._give(tracker, state)
            self._ending.wait(READ_EVERY_S)
        skipped += self._give(tracker, state)
        if skipped:
            self._tell(f"was too slow, it lacks the last {skipped} rows, those after step {self._given}")
        if self._left:
            return
        has_none = self._failed or self._given == state.ended_step
        summary, figures = ({}, {}) if has_none else _results(self._run_dir)
        tracker.finish(summary, figures, self._failed)
        state.ended_step = self._given if summary else state.ended_step
        state.keep(tracker)

    def _give(self, tracker: Tracker, state: _State) -> int:
        """Gives the new rows of the file to the tracker. Returns the number of rows for which there was no time."""
        skipped = 0
        while not self._left and (line := self._file.readline()):
            if not line.endswith(b"\n"):  # the rest of the line is written later
                self._file.seek(-len(line), os.SEEK_CUR)
                break
            row = _shown(parse_json(line))
            if row["step"] <= self._given:
                continue
            if skipped or time.monotonic() > self._rows_until:
                skipped += 1
                continue
            tracker.log(row)
            self._given = row["step"]
            if tracker.stored_step > state.stored_step and not self._left:
                state.keep(tracker)
        return skipped

    def _tell(self, what: str) -> None:
        if not self._left and not self._has_told:
            self._has_told = True
            tqdm.write(f"warning: record.trackers: {self._kind} {what}; metrics.jsonl has all", file=sys.stderr)


def _find(kind: str) -> MakeTracker:
    """Returns the class of a tracker after its check. Raises ValueError, in one line, if it cannot be used."""
    if kind in SHIPPED:
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder of this name, such as wandb's own, is not a package
            raise ValueError(f"record.trackers: {kind} is not installed: {install_words(kind)}")
    try:
        tracker = pkgutil.resolve_name(SHIPPED[kind]) if kind in SHIPPED else user_code.load(kind)
        if (check := getattr(tracker, "check", None)) is not None:
            check()
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"record.trackers: {kind}: {_in_one_line(error)}") from error
    return tracker


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_LONGEST]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _results(run_dir: Path) -> tuple[Row, dict[str, Path]]:
    summary, picture = run_dir / "summary.json", run_dir / "report.png"
    found = parse_json(summary.read_bytes()) if summary.exists() else {}
    return found, {"report": picture} if picture.exists() else {}


def _shown(row: Row) -> Row:
    """Returns the values of a row for a tracker: without None, and with NaN for each value that was not finite."""
    values = {key: value for key, value in row.items() if value is not None and key != NONFINITE_KEYS}
    return values | dict.fromkeys(row.get(NONFINITE_KEYS, ()), math.nan)
