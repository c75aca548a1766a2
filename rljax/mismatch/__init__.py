"""Training-inference mismatch: the difference between two engines' log-probabilities of the same tokens, and remedies.

The package needs only jax and numpy. Every function takes numpy arrays (float64 on the host) or jax arrays, also under
jit. jax is imported when a function is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.mismatch.correction import importance_weights, rejection_mask
    from rljax.mismatch.metrics import mismatch_metrics, mismatch_statistics
    from rljax.mismatch.names import framework_metrics
    from rljax.mismatch.statistics import Statistics, merge, zeros
    from rljax.mismatch.tokens import read_sequences, read_tokens

__all__ = [
    "Statistics",
    "framework_metrics",
    "importance_weights",
    "merge",
    "mismatch_metrics",
    "mismatch_statistics",
    "read_sequences",
    "read_tokens",
    "rejection_mask",
    "zeros",
]

_MODULES = ("names", "correction", "metrics", "statistics", "tokens")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
    value = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
