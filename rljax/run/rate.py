"""The learning rate of each step, decided on the host before the update from what the rollouts showed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import optax

from rljax.errors import ConfigError
from rljax.record.rows import Row
from rljax.run.guard import unknown_metric
from rljax.schedule import (
    LengthTriggeredLR,
    SurgeConfig,
    SurgeTracker,
    decay_period_from_surge,
    length_decay_schedule,
)


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves."""

    kind: Literal["constant", "linear", "cosine", "length_decay", "length_triggered"] = "length_triggered"
    """constant. linear or cosine: from the initial rate down to ``floor_ratio`` of it at ``horizon``. length_decay:
    Algorithm 1 of arXiv 2602.01826 with a known period. length_triggered: the same, with the period set by the surge of
    the response length. Every kind watches for the surge and records it."""
    horizon: int | None = None
    """Step at which linear and cosine reach their floor, and stay there. None: the last of the run."""
    decay_period: int | None = None
    """Steps between decays. Only for length_decay."""
    multiplier: float = 1.8
    """Decay period divided by the surge step. Only for length_triggered."""
    decay_factor: float = 0.5
    """The rate is multiplied by this factor at each multiple of the decay period."""
    floor_ratio: float = 0.1
    """The rate never falls below this fraction of the initial rate."""
    metric: str = "response_length/mean"
    """The recorded metric that the surge tracker watches. Its values must be positive. A metric that is only known
    after the update (``mismatch/...``) is watched one step later."""
    surge: SurgeConfig = field(default_factory=SurgeConfig)
    """The rules of the surge tracker."""

    def __post_init__(self) -> None:
        if (self.kind == "length_decay") != (self.decay_period is not None):
            raise ValueError(f"decay_period goes with kind = length_decay, got {self.decay_period} and {self.kind}")
        if self.horizon is not None and (self.kind not in ("linear", "cosine") or self.horizon < 1):
            raise ValueError(f"horizon is a step, for kind = linear or cosine, got {self.horizon} and {self.kind}")
        # The schedule's own checks, so that a bad value is refused before anything is built.
        length_decay_schedule(1.0, self.decay_period, decay_factor=self.decay_factor, floor_ratio=self.floor_ratio)
        LengthTriggeredLR(1.0, multiplier=self.multiplier)


class ScheduledRate:
    """A rate that is a function of the step; the surge is still watched for and recorded.

    It is used as ``LengthTriggeredLR`` is. ``decay_period``: steps between decays; None: a rate without them.
    """

    def __init__(self, schedule: optax.Schedule, decay_period: int | None, surge: SurgeConfig):
        self._schedule = schedule
        self.decay_period = decay_period
        self.tracker = SurgeTracker(surge)

    def step(self, length: float, truncated_fraction: float | None = None) -> float:
        """See LengthTriggeredLR."""
        self.tracker.update(length, truncated_fraction)
        return float(np.float32(self._schedule(self.tracker.step - 1)))

    def state_dict(self) -> dict[str, Any]:
        """See LengthTriggeredLR."""
        return {"count": self.tracker.step, "tracker": self.tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See LengthTriggeredLR."""
        if set(state) != {"count", "tracker"}:
            raise ValueError(f"not the state of a scheduled rate: {sorted(state)}")
        self.tracker.load_state_dict(state["tracker"])


RateController = LengthTriggeredLR | ScheduledRate
"""Gives the rate of each step: ``step`` observes the step's batch and returns the rate of its update."""


def load_fork(controller: RateController, state: dict[str, Any], config: ScheduleConfig) -> None:
    """Takes over what the schedule of a run observed, whatever its kind, for a fork with a schedule of its own.

    Args:
      controller: of the fork.
      state: ``state_dict()`` of the other run's controller.
      config: of the fork.
    """
    controller.tracker.load_state_dict(state["tracker"])
    if isinstance(controller, LengthTriggeredLR):
        surge = controller.surge_step
        controller.decay_period = None if surge is None else decay_period_from_surge(surge, config.multiplier)


def schedule_row(controller: RateController) -> Row:
    """``schedule/surge_step`` and ``schedule/crossing_step``, None until known, and ``schedule/decay_period``."""
    return {
        "schedule/surge_step": controller.tracker.surge_step,
        "schedule/crossing_step": controller.tracker.crossing_step,
        "schedule/decay_period": controller.decay_period,
    }


def observed_value(metric: str, row: Row, last_row: Row) -> float:
    """The value that the surge tracker observes: this step's, else the last step's.

    It is not a number at step 1 for a metric that only the update yields, and where the value is missing.

    Raises:
      ConfigError: after step 1, a metric that no row has.
    """
    if metric not in row and last_row and metric not in last_row:
        raise ConfigError(f"schedule.metric: {unknown_metric(metric, last_row)}")
    value = row.get(metric, last_row.get(metric))
    return float("nan") if value is None else float(value)


def make_rate_controller(config: ScheduleConfig, learning_rate: float, total_steps: int) -> RateController:
    """Builds the controller of ``config.kind`` for a run of ``total_steps`` steps."""
    if config.kind == "length_triggered":
        return LengthTriggeredLR(
            learning_rate,
            tracker=SurgeTracker(config.surge),
            multiplier=config.multiplier,
            decay_factor=config.decay_factor,
            floor_ratio=config.floor_ratio,
        )
    floor = learning_rate * config.floor_ratio
    last = max((config.horizon or total_steps) - 1, 1)
    schedules: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, floor, last),
        "cosine": optax.cosine_decay_schedule(learning_rate, last, config.floor_ratio),
        "length_decay": length_decay_schedule(
            learning_rate, config.decay_period, decay_factor=config.decay_factor, floor_ratio=config.floor_ratio
        ),
    }
    return ScheduledRate(schedules[config.kind], config.decay_period, config.surge)
