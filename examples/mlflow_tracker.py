"""A tracker of one's own that keeps the record of a run in MLflow, named in the configuration as ``FILE.py:Class``.

    pip install 'mlflow-skinny>=3.17,<4' 'sqlalchemy>=2.0,<3' 'alembic>=1.13,<2'
    rljax train quickstart --record.trackers examples/mlflow_tracker.py:MlflowTracker

It writes to MLFLOW_TRACKING_URI, by default ``mlflow.db`` of the current folder, and ``record.project`` is the
experiment. MLflow sends no counts of its use unless MLFLOW_DISABLE_TELEMETRY=false is set.
"""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import

import mlflow

from rljax.record.trackers import TrackedRun


class MlflowTracker:
    """A run of MLflow. A process that goes on with the run of rljax finds it by the tag ``rljax.run``."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(run.project).experiment_id
        known = self._client.search_runs([experiment], f"tags.`rljax.run` = '{run.id}'")
        made = known or [self._client.create_run(experiment, run_name=run.name, tags={"rljax.run": run.id})]
        self._id, self._last = made[0].info.run_id, int(made[0].data.metrics.get("step", 0))
        self._client.update_run(self._id, status="RUNNING")
        params = [mlflow.entities.Param(key, str(value)[:6000]) for key, value in run.settings.items()]
        for first in range(0, 0 if known else len(params), 100):  # the most in a request
            self._client.log_batch(self._id, params=params[first : first + 100])
        self.where = f"run {self._id} in {mlflow.get_tracking_uri()}"

    def log(self, row: Mapping[str, Any]) -> None:
        """Takes the numbers of a row, unless the run has this step already."""
        if row["step"] > self._last:
            self._last, now = row["step"], int(1000 * time.time())
            names = {key: re.sub(r"[^\w\-. :/]", "_", key) for key, value in row.items() if not isinstance(value, str)}
            metrics = [mlflow.entities.Metric(name, float(row[key]), now, row["step"]) for key, name in names.items()]
            self._client.log_batch(self._id, metrics)

    def finish(self, summary: Mapping[str, Any], figures: Mapping[str, Path], failed: bool) -> None:
        """Stores summary.json and the figures as artifacts, and ends the run."""
        if summary:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        for path in figures.values():
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
