"""Sends the record of a run to experiment trackers: Weights & Biases, trackio, or a class of the user.

A thread gives the rows to the trackers, so an error or a pause of a tracker costs the run nothing. A tracker that fails
gets no more rows, and a line says so. A run that continues goes on in the same run of the tracker. The trackers that
rljax knows ask no questions and send nothing that the user did not choose. W&B sends rows only if it is logged in and
online. trackio writes into files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import queue
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from rljax import user_code
from rljax.distributed.files import write_whole
from rljax.errors import OwnedError, install_words, parse_json
from rljax.record.rows import Row

FOLDER = "trackers"  # the folder of a run directory with the id of each tracker's run, and the tracker's own files
END_S = 10.0  # the longest time that the end of a run waits for its trackers
WAITING = 1000  # the most rows that wait for a tracker
_INFINITE = (math.inf, -math.inf)
_LONGEST = 300  # the characters of a library's error that a message keeps


@dataclass(frozen=True)
class RecordConfig:
    """The experiment trackers that get the record of a run, in addition to the files of its directory."""

    trackers: tuple[str, ...] = ()
    """Trackers that get the configuration, each row, report.png and the summary: wandb, trackio, or
    ``package.module:Class`` or ``FILE.py:Class`` of your own. wandb and trackio need the extra of their name, as in
    ``pip install '.[trackio]'`` in a checkout."""
    project: str = "rljax"
    """Project of the trackers that the run belongs to."""
    run_name: str = ""
    """Name of the run in the trackers. Empty: the name of the run directory."""

    def __post_init__(self) -> None:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers must be different, got {list(self.trackers)}")
        if not self.project:
            raise ValueError("project must not be empty")

    def check_names(self) -> None:
        """Raises ValueError for a name that no tracker can have. An older run's file may have one."""
        for name in self.trackers:
            if name not in SHIPPED and "" in name.partition(":"):
                known = f"{', '.join(SHIPPED)}, package.module:Class or FILE.py:Class"
                example = "mlflow_tracker.py:MlflowTracker of the repository's examples"
                raise ValueError(f"record.trackers must name {known}, such as {example}, got {name!r}")


@dataclass(frozen=True)
class TrackedRun:
    """The facts from which a tracker is made."""

    project: str  # the project of the run in the tracker
    name: str  # the name of the run in the tracker
    id: str  # the id of the run, the same in each process that continues it
    directory: Path  # the folder in the run directory for the tracker's own files; it exists
    config: dict[str, Any]  # the resolved configuration, nested as in config.yaml
    settings: dict[str, Any]  # the same values by dotted key


class Tracker(Protocol):
    """A run in an experiment tracker, made as ``Class(run: TrackedRun)`` and used by one thread only.

    Any method may raise, and then no method is called any more. The class may have two static methods. ``check()`` is
    called before the run starts, and raises ValueError if the tracker cannot be used. ``abandon()`` is called on
    another thread if the tracker failed or did not end in time. It stops all that would hold up the process's end.
    """

    where: str  # the place at which a reader finds the run, for one line on the terminal

    def log(self, row: Row) -> None:
        """Takes the row of a step: its bools, strings and numbers, with NaN for numbers that are not finite.

        A run that continues may give a step again.
        """

    def finish(self, summary: Mapping[str, Any], figures: Mapping[str, Path], failed: bool) -> None:
        """Takes the summary and the PNG files by name, and ends the run in the tracker; both are empty if it failed."""


class WandbTracker:
    """A run of Weights & Biases. Offline (``WANDB_MODE=offline``) it writes files, which ``wandb sync`` uploads."""

    @staticmethod
    def check() -> None:
        """Raises ValueError if W&B would ask for a login."""
        import wandb

        is_online = wandb.setup().settings.mode in ("online", "shared", "run")
        has_key = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        if is_online and not has_key and not wandb.login(prompt=False, verify=False):
            remedy = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to keep the record in files"
            raise ValueError(f"no login: {remedy}")

    @staticmethod
    def abandon() -> None:
        """Kills W&B's own process, because Python would wait for its end. Its files can be uploaded later."""
        for children in Path("/proc/self/task").glob("*/children"):
            for process in children.read_text().split():
                if Path(f"/proc/{process}/comm").read_text().strip() == "wandb-core":
                    os.kill(int(process), signal.SIGKILL)

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._image = wandb.Image
        # The interval is the seconds between two writes of the rows to the disk.
        times: dict[str, Any] = {"finish_timeout": END_S / 2, "x_transaction_log_flush_interval": 1.0}
        settings = wandb.Settings(silent=True, console="off", save_code=False, reinit="create_new", **times)
        names: dict[str, Any] = {"project": run.project, "name": run.name, "id": run.id}
        folder = os.environ.get("WANDB_DIR") or run.directory
        self._run = wandb.init(**names, resume="allow", dir=folder, config=run.config, settings=settings)
        self.where = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def log(self, row: Row) -> None:
        """Takes the row of a step. W&B drops the row of a step that it already has."""
        self._run.log(row, step=row["step"], commit=True)

    def finish(self, summary: Mapping[str, Any], figures: Mapping[str, Path], failed: bool) -> None:
        """Puts summary and figures into the run's summary, because a picture in the history would count as a step."""
        if summary:
            self._run.summary.update({"summary": dict(summary)})
        for name, path in figures.items():
            self._run.summary.update({name: self._image(str(path))})
        self._run.finish(exit_code=int(failed))


class TrackioTracker:
    """A run in trackio's local store. ``trackio show`` opens it, and nothing is sent to a Hugging Face Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        class LocalRun(trackio.Run):
            """A run that writes in the calling thread, and that asks the Hugging Face hub for no user's name."""

            failure = ""

            def _get_username(self) -> None:
                return None

            def _start_background_thread(self, *args: Any, **options: Any) -> bool:
                return False

            def _warn_once(self, key: str, message: str) -> None:
                self.failure = self.failure or message

        self._image, self._table = trackio.Image, trackio.Table
        self._run = LocalRun(None, run.project, None, name=run.name, run_id=run.id, config=run.settings)
        self._last = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.id) or 0
        self.where = f"trackio show --project {run.project!r}"

    def log(self, row: Row) -> None:
        """Takes the row of a step that the run lacks. The key ``step`` is trackio's own."""
        if row["step"] > self._last:
            self._last = row["step"]
            self._log({key: value for key, value in row.items() if key != "step"}, self._last)

    def finish(self, summary: Mapping[str, Any], figures: Mapping[str, Path], failed: bool) -> None:
        """Writes the summary and the figures as an entry at the last step, and ends the run. ``failed`` is not used."""
        shown = {name: self._image(str(path)) for name, path in figures.items()}
        if summary:
            cells = [[name, json.dumps(value)] for name, value in summary.items()]
            shown["summary"] = self._table(columns=["name", "value"], data=cells)
        if shown:
            self._log(shown, self._last)
        self._run.finish()

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)
        if self._run.failure:
            raise RuntimeError(self._run.failure)


SHIPPED: dict[str, Callable[[TrackedRun], Tracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}


class Trackers:
    """The trackers of a run: a context manager around the run, and a ``Report`` that its ``Recorder`` calls.

    One thread gives the rows to all trackers. When the context ends, each tracker gets the summary and the figures. All
    trackers together have ``END_S`` seconds for that. After an error in the context they mark the run as failed.
    """

    def __init__(self, config: RecordConfig) -> None:
        """Finds the trackers. Raises ValueError if one is not installed, cannot be imported or refuses its check."""
        config.check_names()
        self._config = config
        self._makers = {kind: _find(kind) for kind in config.trackers}
        self._fed: list[str] = []  # the trackers that get rows; one that fails leaves
        self._open: list[str] = []  # the trackers that have not ended
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._left_s: Callable[[], float] = lambda: math.inf
        self._failed = False

    def start(
        self, run_dir: Path, config: dict[str, Any], settings: dict[str, Any], left_s: Callable[[], float]
    ) -> None:
        """Opens the trackers on their thread.

        ``config`` is the resolved configuration, nested as in config.yaml, and ``settings`` has its values by dotted
        key. ``left_s`` returns the seconds until the process has to end.
        """
        self._left_s, self._fed, self._open = left_s, [*self._makers], [*self._makers]
        name = self._config.run_name or run_dir.resolve().name
        run = TrackedRun(self._config.project, name, "", run_dir / FOLDER, config, settings)
        self._thread = threading.Thread(target=self._feed, args=(run,), daemon=True)
        if self._fed:
            self._thread.start()

    def __call__(self, row: Row, _: Mapping[str, np.ndarray]) -> None:
        """Hands the row of a step to the trackers. If too many rows wait already, the trackers get no more."""
        if self._rows.qsize() >= WAITING:
            self._leave("it was too slow", *self._fed)
        if self._fed:
            values = {key: math.nan if value in _INFINITE else value for key, value in row.items() if value is not None}
            self._rows.put(values)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OwnedError) or isinstance(getattr(error, "__cause__", None), OwnedError):
            return  # another process goes on with the run
        if self._fed:
            self._failed = error is not None
            self._rows.put(None)
            self._thread.join(1.0 if isinstance(error, KeyboardInterrupt) else max(min(self._left_s(), END_S), 1.0))
        for kind in [*self._open]:
            self._leave("it did not end in time", kind)
            with contextlib.suppress(Exception):  # of a process that has just ended, or of a user's class
                getattr(self._makers[kind], "abandon", lambda: None)()

    def _feed(self, run: TrackedRun) -> None:
        """Makes the trackers and gives them each row, and at the end the results."""
        trackers: dict[str, Tracker] = {}
        for kind, make in self._makers.items():
            with self._told(kind):
                run.directory.mkdir(exist_ok=True)
                own_id = _id_of(run.directory / f"{kind.replace('/', '_')}.json", run.project)
                trackers[kind] = make(dataclasses.replace(run, id=own_id))
                tqdm.write(f"tracked by {kind}: {trackers[kind].where}", file=sys.stderr)
        while (row := self._rows.get()) is not None:
            for kind in [*self._fed]:
                with self._told(kind):
                    trackers[kind].log(row)
        for kind in [*self._fed]:
            with self._told(kind):
                summary, picture = (run.directory.parent / name for name in ("summary.json", "report.png"))
                results = parse_json(summary.read_bytes()) if summary.exists() and not self._failed else {}
                figures = {"report": picture} if picture.exists() and not self._failed else {}
                trackers[kind].finish(results, figures, self._failed)
                self._open.remove(kind)

    @contextlib.contextmanager
    def _told(self, kind: str) -> Iterator[None]:
        """Turns an error of the block into one line on stderr. The tracker then gets no more rows."""
        try:
            yield
        except BaseException as error:  # a library may raise anything, SystemExit included
            self._leave(_in_one_line(error), kind)

    def _leave(self, why: str, *kinds: str) -> None:
        for kind in kinds:
            if kind in self._fed:
                self._fed.remove(kind)
                said = f"warning: record.trackers: {kind} gets no more rows: {why}; metrics.jsonl has all"
                tqdm.write(said, file=sys.stderr)


def _id_of(path: Path, project: str) -> str:
    """Returns the id of the run in a tracker, which the file keeps. Another project gets another id."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = parse_json(path.read_bytes())
        if kept["project"] == project:
            return str(kept["id"])
    made = uuid.uuid4().hex
    write_whole(path, json.dumps({"project": project, "id": made}) + "\n")
    return made


def _find(kind: str) -> Callable[[TrackedRun], Tracker]:
    """Returns the class of a tracker after its check. Raises ValueError, in one line, if it cannot be used."""
    if kind in SHIPPED:
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder of this name, such as wandb's own, is not a package
            raise ValueError(f"record.trackers: {kind} is not installed: {install_words(kind)}")
    try:
        tracker = SHIPPED[kind] if kind in SHIPPED else user_code.load(kind)
        if (check := getattr(tracker, "check", None)) is not None:
            check()
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"record.trackers: {kind}: {_in_one_line(error)}") from error
    return tracker


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_LONGEST]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
