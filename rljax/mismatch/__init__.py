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

_MODULES = {
    "correction": ("importance_weights", "rejection_mask"),
    "metrics": ("mismatch_metrics", "mismatch_statistics"),
    "names": ("framework_metrics",),
    "statistics": ("Statistics", "merge", "zeros"),
    "tokens": ("read_sequences", "read_tokens"),
}


def __getattr__(name: str) -> Any:
    owner = next((module for module, names in _MODULES.items() if name in names), None)
    if owner is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{owner}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
