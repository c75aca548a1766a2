"""Finds the step at which a fork begins, and the period that another seed's surge gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rljax.errors import ConfigError
from rljax.record.rows import Row, last_value, read_rows
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.run.directory import saved_steps
from rljax.run.rate import make_rate_controller, observed_value
from rljax.schedule import decay_period_from_surge

TRACKER = ("schedule.surge.", "schedule.metric")  # the settings that decide when a surge is called


def check_forks(path: Path, arms: Mapping[str, Mapping[str, Any]], forks: Mapping[str, str]) -> None:
    """Raises ConfigError if the arms of a fork differ outside of the schedule, or an arm forks from itself.

    The settings of the tracker must be equal, too, because a fork continues with the tracker of the other run.
    """
    for arm, other in forks.items():
        if arm not in arms or other not in arms:
            raise ConfigError(f"{path}: forks: {arm}: {other} must be two arms")
        passed = [arm]
        while passed[-1] in forks and passed.count(passed[-1]) == 1:
            passed.append(forks[passed[-1]])
        if passed[-1] in forks:
            raise ConfigError(f"{path}: forks: {arm} forks from itself: {' from '.join(passed)}")
        settings, others = arms[arm], arms[other]
        shared = [key for key in {*settings, *others} if not key.startswith("schedule.") or key.startswith(TRACKER)]
        if differing := [key for key in shared if settings.get(key) != others.get(key)]:
            raise ConfigError(f"{path}: forks: {arm} and {other} differ by {', '.join(sorted(differing))}")


def parting_step(rows: Sequence[Row], config: Config) -> int | None:
    """Returns the first step at which these rows would have another rate under ``config``; None without one."""
    controller = make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps)
    last: Row = {}
    for row in rows:
        value = observed_value(config.schedule.metric, row, last)
        rate = controller.step(value, row["response_length/truncated_fraction"])
        if np.float32(rate) != np.float32(row["schedule/learning_rate"]):
            return int(row["step"])
        last = row
    return None


def fork_checkpoint(source: Path, words: Sequence[str]) -> Path | None:
    """Returns the last checkpoint of ``source`` before its rate differs from the fork's; None without one.

    Args:
      source: The directory of a complete run.
      words: The words after ``python -m rljax.train`` on the fork's command line.
    """
    config = load_config(Config, list(words), prog="python -m rljax.train", description="")
    parting = parting_step(read_rows(source / "metrics.jsonl"), config)
    steps = [step for step in saved_steps(source) if parting is None or step < parting]
    return source / "checkpoints" / str(max(steps)) if steps else None


def recorded_fork(run_dir: Path) -> str | None:
    """Returns ``run.fork`` of a run that has begun; None if it has not."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return None
    return str(yaml.safe_load(path.read_text(encoding="utf-8"))["run"].get("fork", ""))


def drawn_period(
    arm: str, runs: Mapping[int, Sequence[Row]], seeds: Sequence[int], seed: int, multiplier: float
) -> int:
    """Returns the decay period of the next seed that called a surge. The last seed is followed by the first.

    Args:
      arm: The name of the arm that called the surges.
      runs: The rows of its complete runs, by seed.
      seeds: The seeds of this arm, in the order of the study.
      seed: The seed that needs a period. Its own surge does not count.
      multiplier: The ratio of the period to the step of the surge.

    Raises:
      ConfigError: A run that would decide is missing, or no other seed called a surge.
    """
    place = seeds.index(seed)
    for other in [*seeds[place + 1 :], *seeds[:place]]:
        if other not in runs:
            raise ConfigError(f"the period of seed {seed} needs the run {arm}-{other}; run --arms {arm} first")
        if (surge := last_value(runs[other], "schedule/surge_step")) is not None:
            return decay_period_from_surge(surge, multiplier)
    raise ConfigError(f"the period of seed {seed} needs a surge, and no other seed of {arm} called one")
