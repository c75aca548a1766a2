"""The length-triggered learning rate for any JAX training loop. It needs only jax, optax and numpy."""

from rljax.schedule.inject import get_learning_rate, inject_learning_rate, set_learning_rate
from rljax.schedule.length_decay import (
    LengthTriggeredLR,
    decay_period_from_surge,
    length_decay_schedule,
    length_triggered_schedule,
)
from rljax.schedule.surge import SurgeConfig, SurgeTracker

__all__ = [
    "LengthTriggeredLR",
    "SurgeConfig",
    "SurgeTracker",
    "decay_period_from_surge",
    "get_learning_rate",
    "inject_learning_rate",
    "length_decay_schedule",
    "length_triggered_schedule",
    "set_learning_rate",
]
