"""The length-triggered learning rate for any training loop.

The tracker and the controller need only numpy. The schedules and the functions for optax load jax and optax when they
are first used. ``rljax.schedule.torch`` has the scheduler for torch, and only it needs torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rljax.schedule.length_decay import LengthTriggeredLR, decay_period_from_surge
from rljax.schedule.sample_size import effective_sample_share, sample_size_factor
from rljax.schedule.surge import SurgeConfig, SurgeTracker

if TYPE_CHECKING:
    from rljax.schedule.in_graph import length_decay_schedule, length_triggered_schedule, scaled_by_sample_size
    from rljax.schedule.inject import get_learning_rate, inject_learning_rate, set_learning_rate

__all__ = [
    "LengthTriggeredLR",
    "SurgeConfig",
    "SurgeTracker",
    "decay_period_from_surge",
    "effective_sample_share",
    "get_learning_rate",
    "inject_learning_rate",
    "length_decay_schedule",
    "length_triggered_schedule",
    "sample_size_factor",
    "scaled_by_sample_size",
    "set_learning_rate",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        modules = [importlib.import_module(f"{__name__}.{module}") for module in ("in_graph", "inject")]
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib", "optax"):
            raise
        remedy = "pip install '.[optax]' in a checkout of rljax, or 'WHEEL[optax]' with its wheel"
        message = f"{__name__}.{name} needs {error.name}, which is not installed: {remedy}"
        raise ModuleNotFoundError(message, name=error.name) from error
    value = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
