"""The sources of the mismatch: by position, by entropy, by distance of policy versions, by sign of the advantage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.mismatch.accurate import RATIO_BOUND, total_over
from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, count, namespace_of, scalars
from rljax.mismatch.metrics import EXTREME_LOG_RATIO
from rljax.mismatch.statistics import Statistics
from rljax.mismatch.tokens import Tokens

POSITION_EDGES = (64, 256, 1024, 4096)
"""First positions of the buckets after the first: 1-63, 64-255, 256-1023, 1024-4095, 4096 and up (valid tokens)."""
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
"""Lowest entropies (nats) of the buckets after the first."""


def mismatch_by_position(tokens: Tokens, edges: Sequence[int] = POSITION_EDGES) -> Statistics:
    """Computes statistics by position in the response, arrays [len(edges) + 1].

    Bucket i holds edges[i - 1] <= position < edges[i]. Positions count the valid tokens of a sequence from 1: tokens
    that an environment wrote between them take no position. Raises ValueError unless the edges increase.
    """
    return _buckets(tokens, _digitize(tokens.sequences.position, edges), len(edges) + 1)


def mismatch_by_count(tokens: Tokens, counts: ArrayLike, edges: Sequence[int]) -> Statistics:
    """Computes statistics by a whole number of each token, [b, t] int, arrays [len(edges) + 1].

    Bucket i holds edges[i - 1] <= number < edges[i]. Tokens whose number is below 1 are in no bucket. Raises ValueError
    unless the edges increase and the shapes agree.
    """
    check_shape("counts", counts, tokens.valid.shape)
    values = tokens.xp.asarray(counts)
    return _buckets(tokens, tokens.xp.where(values < 1, -1, _digitize(values, edges)), len(edges) + 1)


def mismatch_by_entropy(tokens: Tokens, entropy: ArrayLike, edges: Sequence[float] = ENTROPY_EDGES) -> Statistics:
    """Computes statistics by the policy's entropy at the token ([b, t] float, nats), arrays [len(edges) + 1].

    Tokens whose entropy is not finite are in no bucket. Raises ValueError unless the edges increase and the shapes
    agree.
    """
    check_shape("entropy", entropy, tokens.valid.shape)
    xp, values = tokens.xp, as_float(tokens.xp, entropy)
    finite = xp.isfinite(values)
    index = _digitize(xp.where(finite, values, 0), edges)
    return _buckets(tokens, xp.where(finite, index, -1), len(edges) + 1)


def mismatch_by_staleness(tokens: Tokens, staleness: ArrayLike, num_buckets: int = 4) -> Statistics:
    """Computes statistics by the number of policy versions between sampler and trainer, arrays [num_buckets].

    ``staleness``, [b, t] int and 0 or more, is the number of versions by which each token's sampler was behind the
    trainer. Bucket 0 contains only the numerical mismatch. The other buckets contain off-policy drift as well, and the
    last one all values from num_buckets - 1 up. Raises ValueError if there is no bucket or the shapes differ.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    check_shape("staleness", staleness, tokens.valid.shape)
    return _buckets(tokens, tokens.xp.clip(tokens.xp.asarray(staleness), 0, num_buckets - 1), num_buckets)


def finalize_buckets(statistics: Statistics, labels: Sequence[str]) -> dict[str, Any]:
    """Computes the metrics of each bucket, named ``<label>/<name>``: floats (numpy leaves) or jax scalars.

    The names are token_count, kl, k3_kl, logprob_abs_diff_mean, logprob_abs_diff_max and extreme_rate, defined as in
    ``finalize_mismatch``. All are 0 without tokens. Raises ValueError unless there is one label for each bucket.
    """
    columns = {
        "token_count": statistics["token_count"],
        "kl": 0 - statistics.mean("log_ratio"),
        "k3_kl": statistics.mean("k3"),
        "logprob_abs_diff_mean": statistics.mean("log_ratio_abs"),
        "logprob_abs_diff_max": statistics.extreme("largest"),
        "extreme_rate": statistics.mean("extreme_count"),
    }
    if len(labels) != len(columns["token_count"]):
        raise ValueError(f"labels must name each of the {len(columns['token_count'])} buckets, got {tuple(labels)}")
    each = {f"{label}/{name}": column[i] for i, label in enumerate(labels) for name, column in columns.items()}
    return scalars(statistics.xp, each)


def bucket_labels(edges: Sequence[float]) -> tuple[str, ...]:
    """Returns the names of the buckets: ("lt_64", "64_to_256", "ge_256") for the edges (64, 256)."""
    middle = [f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(edges)]
    return (f"lt_{edges[0]:g}", *middle, f"ge_{edges[-1]:g}")


def check_edges(name: str, edges: Sequence[float]) -> None:
    """Raises ValueError unless there is at least one edge and the edges increase."""
    if not edges or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"{name} must hold at least one number and increase, got {list(edges)}")


def _digitize(values: Any, edges: Sequence[float]) -> Any:
    check_edges("edges", edges)
    return sum((values >= edge).astype(np.int32) for edge in edges)


def _buckets(tokens: Tokens, index: Any, num_buckets: int) -> Statistics:
    xp, lr = tokens.xp, tokens.log_ratio
    size = xp.abs(lr)[None]
    inside = tokens.valid[None] & (index[None] == xp.arange(num_buckets, dtype=np.int32)[:, None, None])
    terms = {"log_ratio_abs": size, "k3": tokens.k3[None]}
    flags = {"token_count": inside, "extreme_count": inside & (size > EXTREME_LOG_RATIO)}
    return Statistics(
        sums={name: count(xp, flag, (1, 2)) for name, flag in flags.items()}
        | {name: xp.sum(xp.where(inside, term, 0), axis=(1, 2)) for name, term in terms.items()},
        totals={"log_ratio": total_over(xp, xp.where(inside, lr[None], 0), (1, 2))},
        maxima={"largest": xp.max(xp.where(inside, size, 0), axis=(1, 2), initial=0)},
    )


def sign_skew(tokens: Tokens, advantages: ArrayLike) -> Statistics:
    """Computes statistics that show whether log-ratios have the sign of the advantages or the opposite sign.

    ``advantages`` has the shape [b, t] and a float dtype. Tokens with a non-finite advantage are left out. k3, chi2 and
    absolute differences show no direction: the same value can push reinforced tokens up or down (arXiv 2605.14220).
    """
    check_shape("advantages", advantages, tokens.valid.shape)
    xp, lr = tokens.xp, tokens.log_ratio
    values = as_float(xp, advantages)
    advantage = xp.where(tokens.valid & xp.isfinite(values), values, 0)
    terms = {
        "weighted_log_ratio": advantage * lr,
        "weighted_ratio": advantage * xp.expm1(xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)),
        "weighted_sign": advantage * xp.sign(lr),
        "positive": xp.where(advantage > 0, lr, 0),
        "negative": xp.where(advantage < 0, lr, 0),
    }
    return Statistics(
        sums={
            "positive_count": count(xp, advantage > 0),
            "negative_count": count(xp, advantage < 0),
            "advantage_abs": xp.sum(xp.abs(advantage)),
        },
        totals={name: total_over(xp, term, (0, 1)) for name, term in terms.items()},
    )


def finalize_sign_skew(statistics: Statistics) -> dict[str, Any]:
    """Computes the skew metrics. They are 0 if all advantages are 0.

    Returns:
      ``log_ratio_skew`` = <A lr> / <abs(A)> (nats). Above 0, the trainer is more confident than the sampler at tokens
      that it reinforces. ``ratio_skew`` = <A (rho - 1)> / <abs(A)>, the relative error in the weights of an uncorrected
      gradient. ``sign_skew`` = <A sign(lr)> / <abs(A)>, in -1 .. 1. ``positive_log_ratio`` and ``negative_log_ratio``:
      the mean lr of tokens with A > 0 and with A < 0 (nats).
    """
    xp, weight = statistics.xp, statistics["advantage_abs"]
    weight = xp.where(weight > 0, weight, 1)
    metrics = {
        "log_ratio_skew": statistics["weighted_log_ratio"] / weight,
        "ratio_skew": statistics["weighted_ratio"] / weight,
        "sign_skew": statistics["weighted_sign"] / weight,
        "positive_log_ratio": statistics.mean("positive", "positive_count"),
        "negative_log_ratio": statistics.mean("negative", "negative_count"),
    }
    return scalars(xp, metrics)


def split_sum_rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Splits the rise of ``log_ppl_abs_diff_sum`` between two steps into the parts of the length and of the tokens.

    The metric is mean length x gap, where the gap is sum_i abs(sum_t lr) / sum_i n_i (nats per token). Longer responses
    with the same gap explain (length after - length before) x gap before. The rest is length after x (gap after - gap
    before). Independent errors of tokens add up like the square root of the length, so the gap falls as responses grow.
    Then ``per_token`` is negative, which is not an improvement.

    ``before`` and ``after`` are metrics of ``finalize_mismatch``. The results are ``rise``, ``length_explained`` and
    ``per_token`` (nats per sequence); the last two add up to the first.
    """
    length_before, gap_before = _length_and_gap(before)
    length_after, gap_after = _length_and_gap(after)
    return {
        "rise": after["log_ppl_abs_diff_sum"] - before["log_ppl_abs_diff_sum"],
        "length_explained": (length_after - length_before) * gap_before,
        "per_token": length_after * (gap_after - gap_before),
    }


def _length_and_gap(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Computes the mean length (tokens) and the gap (nats per token) of a step. Both are 0 without sequences."""
    xp = namespace_of(*metrics.values())
    length = metrics["token_count"] / xp.maximum(metrics["sequence_count"], 1)
    return length, metrics["log_ppl_abs_diff_sum"] / xp.where(length > 0, length, 1)
