"""The learning rate of each step, which the host decides from the rollouts before the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import optax

from rljax.errors import ConfigError
from rljax.record.rows import Row
from rljax.run.guard import OCCASIONAL, unknown_metric
from rljax.schedule import (
    LengthTriggeredLR,
    SurgeConfig,
    SurgeTracker,
    decay_period_from_surge,
    length_decay_schedule,
    sample_size_factor,
)
from rljax.schedule.sample_size import check_base, effective_sample_share
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import TrainerValues

_SHARE = "schedule/effective_sample_share"


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of the learning rate."""

    kind: Literal["constant", "linear", "cosine", "length_decay", "length_triggered"] = "length_triggered"
    """constant: the initial rate. linear, cosine: from the initial rate down to ``floor_ratio`` of it at ``horizon``.
    length_decay: Algorithm 1 of arXiv 2602.01826 with a known period. length_triggered: the same, but the surge of the
    response length sets the period. Every kind watches for the surge and records it."""
    horizon: int | None = None
    """Step at which linear and cosine reach their floor and stay there. None: the last step of the run."""
    decay_period: int | None = None
    """Number of steps between decays. Kind length_decay needs it, and no other kind takes it."""
    multiplier: float = 1.8
    """Decay period divided by the surge step. Only kind length_triggered uses it."""
    decay_factor: float = 0.5
    """Factor by which the rate is multiplied at each multiple of the decay period."""
    floor_ratio: float = 0.1
    """Lowest fraction of the initial rate, before the factor of ``ess_base``."""
    ess_base: float = 0.0
    """The rate is also multiplied by sqrt(min(1, n / ess_base)). Here n is the effective sample size of the step before
    as a share of its responses (``schedule/effective_sample_share``). VCPO (arXiv 2602.17616) has the base 1, and 0.55
    with several turns. 0: no such factor."""
    metric: str = "response_length/mean"
    """Recorded metric that the surge tracker watches; its values must be positive. A metric that is known only after
    the update (``mismatch/...``) is watched one step later."""
    surge: SurgeConfig = field(default_factory=SurgeConfig)
    """Rules of the surge tracker."""

    def __post_init__(self) -> None:
        if (self.kind == "length_decay") != (self.decay_period is not None):
            raise ValueError(f"decay_period goes with kind = length_decay, got {self.decay_period} and {self.kind}")
        if self.horizon is not None and (self.kind not in ("linear", "cosine") or self.horizon < 1):
            raise ValueError(f"horizon is a step, for kind = linear or cosine, got {self.horizon} and {self.kind}")
        if self.ess_base:
            check_base(self.ess_base)
        # The schedule's own checks, so that a bad value is refused before anything is built.
        length_decay_schedule(1.0, self.decay_period, decay_factor=self.decay_factor, floor_ratio=self.floor_ratio)
        LengthTriggeredLR(1.0, multiplier=self.multiplier)


class ScheduledRate:
    """A learning rate that depends only on the step. It has the interface of ``LengthTriggeredLR``."""

    def __init__(self, schedule: optax.Schedule, decay_period: int | None, surge: SurgeConfig):
        """Starts before step 1. ``schedule`` maps the number of earlier steps to a rate; the period is for records."""
        self._schedule = schedule
        self.decay_period = decay_period
        self.tracker = SurgeTracker(surge)

    def step(self, length: float, truncated_fraction: float | None = None) -> float:
        """Observes the batch of the next step, and returns the rate of its update."""
        self.tracker.update(length, truncated_fraction)
        return float(np.float32(self._schedule(self.tracker.step - 1)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {"count": self.tracker.step, "tracker": self.tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict``. Raises ValueError if ``state`` is not the state of a scheduled rate."""
        if set(state) != {"count", "tracker"}:
            raise ValueError(f"not the state of a scheduled rate: {sorted(state)}")
        self.tracker.load_state_dict(state["tracker"])


RateController = LengthTriggeredLR | ScheduledRate
"""The controller of the learning rate: ``step`` observes the batch of a step, and returns the rate of its update."""


def load_fork(controller: RateController, state: dict[str, Any], config: ScheduleConfig) -> None:
    """Continues the surge tracker of a fork. ``state`` is that of the controller of the first run, of any kind.

    The fork keeps its own schedule. If that is length-triggered, a surge that the first run found sets its period.
    """
    controller.tracker.load_state_dict(state["tracker"])
    if isinstance(controller, LengthTriggeredLR):
        surge = controller.surge_step
        controller.decay_period = None if surge is None else decay_period_from_surge(surge, config.multiplier)


def schedule_row(controller: RateController) -> Row:
    """Returns ``schedule/surge_step``, ``schedule/crossing_step`` and ``schedule/decay_period``; None where unknown."""
    return {
        "schedule/surge_step": controller.tracker.surge_step,
        "schedule/crossing_step": controller.tracker.crossing_step,
        "schedule/decay_period": controller.decay_period,
    }


def share_row(config: ScheduleConfig, sequences: Sequence[TrainSequence], trainer: Callable[[], TrainerValues]) -> Row:
    """Returns the key ``schedule/effective_sample_share`` of a step; {} without ``ess_base``.

    The log-weight of a response is the sum of trainer minus rollout log-probability over its sampled tokens, not cut.
    The share is NaN if a log-weight is not finite. ``trainer`` fetches the trainer's numbers.
    """
    if not config.ess_base:
        return {}
    pairs = [(s.sampled, own - s["rollout_logprobs"]) for s, own in zip(sequences, trainer().logprobs, strict=True)]
    sums = [float(np.sum(ratio[sampled], dtype=np.float64)) for sampled, ratio in pairs if sampled.any()]
    return {_SHARE: effective_sample_share(sums) if sums and np.isfinite(sums).all() else math.nan}


def ess_row(config: ScheduleConfig, last_row: Row) -> Row:
    """Returns ``schedule/ess_factor``, by which the rate of this step is multiplied; {} without ``ess_base``."""
    if not config.ess_base:
        return {}
    share = last_row.get(_SHARE)
    if share is None and _SHARE in last_row:
        share = math.nan  # metrics.jsonl holds NaN as null
    return {"schedule/ess_factor": sample_size_factor(share, config.ess_base)}


def observed_value(metric: str, row: Row, last_row: Row) -> float:
    """Returns the value of ``metric`` for the surge tracker: from this step's row so far, or else from ``last_row``.

    It is NaN if both rows lack the metric. That may be so at step 1, where ``last_row`` is {}, and at any step for a
    metric of ``OCCASIONAL``, which only some rows have. Raises ConfigError after step 1 for any other metric that both
    rows lack.
    """
    if metric not in row and last_row and metric not in last_row and not metric.startswith(OCCASIONAL):
        raise ConfigError(f"schedule.metric: {unknown_metric(metric, last_row)}")
    value = row.get(metric, last_row.get(metric))
    return float("nan") if value is None else float(value)


def make_rate_controller(config: ScheduleConfig, learning_rate: float, total_steps: int) -> RateController:
    """Builds the controller of ``config.kind`` for a run of ``total_steps`` steps."""
    decay: dict[str, float] = {"decay_factor": config.decay_factor, "floor_ratio": config.floor_ratio}
    if config.kind == "length_triggered":
        tracker = SurgeTracker(config.surge)
        return LengthTriggeredLR(learning_rate, tracker=tracker, multiplier=config.multiplier, **decay)
    floor = learning_rate * config.floor_ratio
    last = max((config.horizon or total_steps) - 1, 1)
    schedules: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, floor, last),
        "cosine": optax.cosine_decay_schedule(learning_rate, last, config.floor_ratio),
        "length_decay": length_decay_schedule(learning_rate, config.decay_period, **decay),
    }
    return ScheduledRate(schedules[config.kind], config.decay_period, config.surge)
