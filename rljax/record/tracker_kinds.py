"""The experiment trackers that rljax knows; each class is a ``rljax.record.trackers.Tracker``.

They ask no questions and send nothing that the user did not choose. W&B sends rows only if it is logged in and online.
trackio writes into files.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax.record.rows import Row
from rljax.record.trackers import END_S, TrackedRun


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
