"""The learning rate of each step, decided on the host before the update from what the rollouts showed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import optax

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker, length_decay_schedule

ScheduleKind = Literal["constant", "linear", "cosine", "length_decay", "length_triggered"]


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves."""

    kind: ScheduleKind = "length_triggered"
    """constant. linear or cosine: from the initial rate down to ``floor_ratio`` of it at the last step. length_decay:
    Algorithm 1 of arXiv 2602.01826 with a known period. length_triggered: the same, with the period set by the surge of
    the response length. Every kind watches for the surge and records it."""
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
        # The schedule's own checks, so that a bad value is refused before anything is built.
        length_decay_schedule(1.0, self.decay_period, decay_factor=self.decay_factor, floor_ratio=self.floor_ratio)
        LengthTriggeredLR(1.0, multiplier=self.multiplier)


class RateController(Protocol):
    """Gives the rate of each step; called exactly once a step."""

    def step(self, value: float, truncated_fraction: float | None = None) -> float:
        """Observes this step's batch and returns the rate for its update."""
        ...

    def metrics(self) -> dict[str, float | int | None]:
        """``schedule/surge_step``, ``schedule/crossing_step`` (None until known) and ``schedule/decay_period``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Small and JSON-serialisable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken."""
        ...


class LengthTriggeredRate:
    """``kind = length_triggered``: Algorithm 1 with the period that the surge sets."""

    def __init__(self, config: ScheduleConfig, learning_rate: float):
        self._controller = LengthTriggeredLR(
            learning_rate,
            tracker=SurgeTracker(config.surge),
            multiplier=config.multiplier,
            decay_factor=config.decay_factor,
            floor_ratio=config.floor_ratio,
        )

    def step(self, value: float, truncated_fraction: float | None = None) -> float:
        """See RateController."""
        return self._controller.step(value, truncated_fraction)

    def metrics(self) -> dict[str, float | int | None]:
        """See RateController."""
        return {
            "schedule/surge_step": self._controller.surge_step,
            "schedule/crossing_step": self._controller.tracker.crossing_step,
            "schedule/decay_period": self._controller.decay_period,
        }

    def state_dict(self) -> dict[str, Any]:
        """See RateController."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See RateController."""
        self._controller.load_state_dict(state)


class ScheduledRate:
    """A rate that is a function of the step; the surge is still watched for and recorded."""

    def __init__(self, schedule: optax.Schedule, decay_period: int | None, surge: SurgeConfig):
        self._schedule = schedule
        self._decay_period = decay_period
        self._tracker = SurgeTracker(surge)
        self._count = 0

    def step(self, value: float, truncated_fraction: float | None = None) -> float:
        """See RateController."""
        self._tracker.update(value, truncated_fraction)
        rate = float(np.float32(self._schedule(self._count)))
        self._count += 1
        return rate

    def metrics(self) -> dict[str, float | int | None]:
        """See RateController."""
        return {
            "schedule/surge_step": self._tracker.surge_step,
            "schedule/crossing_step": self._tracker.crossing_step,
            "schedule/decay_period": self._decay_period,
        }

    def state_dict(self) -> dict[str, Any]:
        """See RateController."""
        return {"count": self._count, "tracker": self._tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See RateController."""
        if set(state) != {"count", "tracker"}:
            raise ValueError(f"not the state of a scheduled rate: {sorted(state)}")
        self._count = int(state["count"])
        self._tracker.load_state_dict(state["tracker"])


def make_rate_controller(config: ScheduleConfig, learning_rate: float, total_steps: int) -> RateController:
    """Builds the controller of ``config.kind`` for a run of ``total_steps`` steps."""
    if config.kind == "length_triggered":
        return LengthTriggeredRate(config, learning_rate)
    floor = learning_rate * config.floor_ratio
    last = max(total_steps - 1, 1)
    schedules: dict[str, optax.Schedule] = {
        "constant": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, floor, last),
        "cosine": optax.cosine_decay_schedule(learning_rate, last, config.floor_ratio),
        "length_decay": length_decay_schedule(
            learning_rate, config.decay_period, decay_factor=config.decay_factor, floor_ratio=config.floor_ratio
        ),
    }
    return ScheduledRate(schedules[config.kind], config.decay_period, config.surge)
