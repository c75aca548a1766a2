"""Training-inference mismatch: how far two engines' log-probabilities of the same tokens lie apart, and remedies.

Needs only jax and numpy. Every function takes numpy arrays (float64 on the host) or jax arrays (under jit as well).
"""

from rljax.mismatch.correction import importance_weights, rejection_mask
from rljax.mismatch.importance import (
    ImportanceTotals,
    finalize_importance,
    importance_statistics,
    importance_totals,
    merge_importance,
)
from rljax.mismatch.metrics import finalize_statistics, mismatch_metrics
from rljax.mismatch.statistics import MismatchStatistics, merge_statistics, mismatch_statistics

__all__ = [
    "ImportanceTotals",
    "MismatchStatistics",
    "finalize_importance",
    "finalize_statistics",
    "importance_statistics",
    "importance_totals",
    "importance_weights",
    "merge_importance",
    "merge_statistics",
    "mismatch_metrics",
    "mismatch_statistics",
    "rejection_mask",
]
