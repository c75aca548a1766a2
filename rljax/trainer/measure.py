"""What a step measures of its tokens besides the gradient: the mismatch and where it comes from.

Totals are taken micro-batch by micro-batch and merged, so that cutting, packing and sharding change no value.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rljax.mismatch import (
    Buckets,
    ImportanceTotals,
    MismatchStatistics,
    SignSkew,
    bucket_labels,
    finalize_importance,
    finalize_sign_skew,
    finalize_statistics,
    importance_totals,
    label_buckets,
    merge_buckets,
    merge_importance,
    merge_sign_skew,
    merge_statistics,
    mismatch_by_entropy,
    mismatch_by_position,
    mismatch_by_staleness,
    mismatch_statistics,
    sign_skew,
)
from rljax.mismatch.diagnosis import ENTROPY_EDGES, POSITION_EDGES
from rljax.trainer.packing import PackedBatch

HISTOGRAM = "mismatch/logprob_abs_diff"
"""Name of the histogram among a step's metrics; its bins are those of ``rljax.mismatch.bin_edges``."""


@dataclass(frozen=True)
class DiagnosisConfig:
    """How finely the mismatch is taken apart."""

    position_edges: tuple[int, ...] = POSITION_EDGES
    """Positions in the response (tokens, from 1) at which a new bucket of ``mismatch_position/`` begins."""
    entropy_edges: tuple[float, ...] = ENTROPY_EDGES
    """Entropies of the policy (nats) at which a new bucket of ``mismatch_entropy/`` begins."""
    staleness_buckets: int = 4
    """Number of buckets of ``mismatch_staleness/``: 0, 1, ... policy versions behind. The last one has no upper end."""
    is_threshold: float = 2.0
    """Threshold C of ``is/``: the fractions of the ratios above C and below 1 / C are recorded. At least 1."""
    reference_steps: int = 10
    """Number of first steps of the run with which a rise of ``mismatch/log_ppl_abs_diff_sum`` is compared."""
    grad_noise_every: int = 10
    """Steps between measurements of ``optimizer/grad_noise``. 0: never."""

    def __post_init__(self) -> None:
        for name in ("position_edges", "entropy_edges"):
            edges = getattr(self, name)
            if not edges or any(low >= high for low, high in itertools.pairwise(edges)):
                raise ValueError(f"{name} must be increasing and at least one, got {list(edges)}")
        for name in ("staleness_buckets", "reference_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.is_threshold >= 1.0:
            raise ValueError(f"is_threshold must be at least 1, got {self.is_threshold}")
        if self.grad_noise_every < 0:
            raise ValueError(f"grad_noise_every must not be negative, got {self.grad_noise_every}")


class Measured(NamedTuple):
    """Totals of some tokens."""

    mismatch: MismatchStatistics
    importance: ImportanceTotals
    position: Buckets
    entropy: Buckets
    staleness: Buckets
    skew: SignSkew


def measure(
    logprobs: Float[Array, "b t"],
    entropy: Float[Array, "b t"],
    micro: PackedBatch,
    num_sequences: int,
    config: DiagnosisConfig,
) -> Measured:
    """Totals of a micro-batch [b, t] whose trainer log-probabilities and entropies are given."""
    rows = (logprobs, micro.rollout_logprobs, micro.response_mask)
    whole: dict[str, Any] = {"sequence_ids": micro.sequence_ids, "num_sequences": num_sequences}
    return Measured(
        mismatch_statistics(*rows, entropy=entropy, **whole),
        importance_totals(*rows, threshold=config.is_threshold, **whole),
        mismatch_by_position(*rows, edges=config.position_edges, **whole),
        mismatch_by_entropy(*rows, entropy, edges=config.entropy_edges),
        mismatch_by_staleness(*rows, micro.staleness, num_buckets=config.staleness_buckets),
        sign_skew(*rows, micro.advantages),
    )


def merge_measured(a: Measured, b: Measured) -> Measured:
    """Totals of the tokens of both."""
    return Measured(
        merge_statistics(a.mismatch, b.mismatch),
        merge_importance(a.importance, b.importance),
        merge_buckets(a.position, b.position),
        merge_buckets(a.entropy, b.entropy),
        merge_buckets(a.staleness, b.staleness),
        merge_sign_skew(a.skew, b.skew),
    )


def nothing_measured(batch: PackedBatch, num_sequences: int, config: DiagnosisConfig) -> Measured:
    """The totals of no tokens, as constants: what merging starts from."""
    micro = micro_shapes(batch)
    values = jax.ShapeDtypeStruct(micro.tokens.shape, jnp.float32)
    forms = jax.eval_shape(lambda x, m: measure(x, x, m, num_sequences, config), values, micro)
    zeros, nothing = jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), (values, micro))
    empty = measure(zeros, zeros, nothing, num_sequences, config)
    return jax.tree.map(lambda form, value: jnp.asarray(value, form.dtype), forms, empty)


def micro_shapes(batch: PackedBatch) -> PackedBatch:
    """``jax.ShapeDtypeStruct`` of one micro-batch of a batch [m, b, t]."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), batch._replace(used=None))


def micro_batch(batch: PackedBatch, index: jax.Array) -> PackedBatch:
    """Micro-batch ``index`` of a batch [m, b, t]."""
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), batch._replace(used=None)
    )


def finalize_measured(measured: Measured, config: DiagnosisConfig) -> dict[str, jax.Array]:
    """The row's metrics (scalars), and under ``HISTOGRAM`` the counts of abs(log_ratio) [bins]."""
    found: dict[str, jax.Array] = {HISTOGRAM: measured.mismatch.histogram}
    staleness = [*map(str, range(config.staleness_buckets - 1)), f"ge_{config.staleness_buckets - 1}"]
    groups: dict[str, dict[str, Any]] = {
        "mismatch": finalize_statistics(measured.mismatch),
        "is": finalize_importance(measured.importance),
        "mismatch_position": label_buckets(measured.position, bucket_labels(config.position_edges)),
        "mismatch_entropy": label_buckets(measured.entropy, bucket_labels(config.entropy_edges)),
        "mismatch_staleness": label_buckets(measured.staleness, staleness),
        "mismatch_sign": finalize_sign_skew(measured.skew),
    }
    return found | {f"{group}/{name}": value for group, names in groups.items() for name, value in names.items()}


def without_empty_buckets(row: dict[str, Any]) -> dict[str, Any]:
    """A row on the host less the keys of buckets that held no token: their zeros would read as agreement."""
    count = "/token_count"
    empty = [key.removesuffix(count) + "/" for key, value in row.items() if key.endswith(count) and not value]
    bucketed = ("mismatch_position/", "mismatch_entropy/", "mismatch_staleness/")
    gone = tuple(prefix for prefix in empty if prefix.startswith(bucketed))
    return {key: value for key, value in row.items() if not gone or not key.startswith(gone)}
