"""Training-inference mismatch: how far two engines' log-probabilities of the same tokens lie apart, and remedies.

Needs only jax and numpy. Every function takes numpy arrays (float64 on the host) or jax arrays (under jit as well).
"""

from rljax.mismatch.correction import importance_weights, rejection_mask
from rljax.mismatch.diagnosis import (
    Buckets,
    SignSkew,
    bucket_labels,
    finalize_buckets,
    finalize_sign_skew,
    label_buckets,
    merge_buckets,
    merge_sign_skew,
    mismatch_by_entropy,
    mismatch_by_position,
    mismatch_by_staleness,
    sign_skew,
    split_sum_rise,
)
from rljax.mismatch.histogram import bin_edges
from rljax.mismatch.importance import (
    ImportanceTotals,
    finalize_importance,
    importance_statistics,
    importance_totals,
    merge_importance,
)
from rljax.mismatch.metrics import finalize_statistics, mismatch_metrics
from rljax.mismatch.names import FRAMEWORKS, NAME_TABLE, PUBLISHED_BARS, ForeignMetric, framework_metrics, our_name
from rljax.mismatch.statistics import MismatchStatistics, merge_statistics, mismatch_statistics

__all__ = [
    "FRAMEWORKS",
    "NAME_TABLE",
    "PUBLISHED_BARS",
    "Buckets",
    "ForeignMetric",
    "ImportanceTotals",
    "MismatchStatistics",
    "SignSkew",
    "bin_edges",
    "bucket_labels",
    "finalize_buckets",
    "finalize_importance",
    "finalize_sign_skew",
    "finalize_statistics",
    "framework_metrics",
    "importance_statistics",
    "importance_totals",
    "importance_weights",
    "label_buckets",
    "merge_buckets",
    "merge_importance",
    "merge_sign_skew",
    "merge_statistics",
    "mismatch_by_entropy",
    "mismatch_by_position",
    "mismatch_by_staleness",
    "mismatch_metrics",
    "mismatch_statistics",
    "our_name",
    "rejection_mask",
    "sign_skew",
    "split_sum_rise",
]
