"""Training-inference mismatch: the difference between two engines' log-probabilities of the same tokens, and remedies.

The package needs only jax and numpy. Every function takes numpy arrays (float64 on the host) or jax arrays, also under
jit.
"""

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
