"""Where the mismatch comes from: by position, by entropy, by policy-version distance, by the sign of the advantage.

Pure functions of [b, t] arrays. What they return are totals that merge by addition over micro-batches; the
``finalize_*`` functions turn them into numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rljax.mismatch.accurate import Total, add_totals, exp_minus_one_minus_x, total_over, value_of
from rljax.mismatch.sequences import read_sequences
from rljax.mismatch.statistics import EXTREME_LOG_RATIO, RATIO_BOUND
from rljax.mismatch.tokens import ArrayLike, Tokens, as_float, check_shape, count, namespace_of, read_tokens

POSITION_EDGES = (64, 256, 1024, 4096)
"""Positions (valid response tokens, from 1) that begin a new bucket: 1-63, 64-255, 256-1023, 1024-4095, 4096-."""
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
"""Entropies (nats) that begin a new bucket."""


class Buckets(NamedTuple):
    """Totals of the tokens of each bucket; k buckets."""

    count: Any  # shape=(k,), int
    extreme: Any  # shape=(k,), int: tokens with abs(log_ratio) > 0.5
    log_ratio: Total  # shape=(k,), float, nats
    log_ratio_abs: Total  # shape=(k,), float, nats
    k3: Total  # shape=(k,), float
    largest: Any  # shape=(k,), float, nats: largest abs(log_ratio); 0 without tokens


def mismatch_by_position(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    edges: Sequence[int] = POSITION_EDGES,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> Buckets:
    """Totals by position in the response, len(edges) + 1 buckets.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      edges: increasing positions; bucket i holds edges[i - 1] <= position < edges[i], counting valid tokens from 1.
      sequence_ids: see ``mismatch_statistics``.
      num_sequences: see ``mismatch_statistics``.

    Raises:
      ValueError: shapes differ or the edges do not increase.
    """
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    position = read_sequences(tokens, sequence_ids, num_sequences).position
    return _buckets(tokens, _digitize(tokens.xp, position, edges), len(edges) + 1)


def mismatch_by_entropy(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    entropy: ArrayLike,
    *,
    edges: Sequence[float] = ENTROPY_EDGES,
) -> Buckets:
    """Totals by the policy's entropy at the token (nats, [b, t]), len(edges) + 1 buckets.

    Tokens whose entropy is not finite are left out: the buckets' counts then add up to fewer tokens.
    """
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    check_shape("entropy", entropy, tokens.valid.shape)
    values = as_float(tokens.xp, entropy)
    finite = tokens.xp.isfinite(values)
    index = _digitize(tokens.xp, tokens.xp.where(finite, values, 0), edges)
    return _buckets(tokens, tokens.xp.where(finite, index, -1), len(edges) + 1)


def mismatch_by_staleness(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    staleness: ArrayLike,
    *,
    num_buckets: int = 4,
) -> Buckets:
    """Totals by how many policy versions lie between the token's sampler and the trainer.

    Bucket 0 is numerics alone; what the others add is off-policy drift.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      staleness: [b, t] int, versions behind the trainer, 0 or more; num_buckets - 1 and beyond share a bucket.
      num_buckets: at least 1 (static).

    Raises:
      ValueError: shapes differ or num_buckets is below 1.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    check_shape("staleness", staleness, tokens.valid.shape)
    return _buckets(tokens, tokens.xp.clip(tokens.xp.asarray(staleness), 0, num_buckets - 1), num_buckets)


def merge_buckets(a: Buckets, b: Buckets) -> Buckets:
    """Totals of the tokens of both."""
    xp = namespace_of(a.count, b.count)
    return Buckets(
        count=a.count + b.count,
        extreme=a.extreme + b.extreme,
        log_ratio=add_totals(a.log_ratio, b.log_ratio),
        log_ratio_abs=add_totals(a.log_ratio_abs, b.log_ratio_abs),
        k3=add_totals(a.k3, b.k3),
        largest=xp.maximum(a.largest, b.largest),
    )


def finalize_buckets(buckets: Buckets) -> dict[str, Any]:
    """Numbers of each bucket, arrays [k]: token_count, kl, k3_kl, logprob_abs_diff_mean, _max, extreme_rate.

    Names as in ``finalize_statistics``; a bucket without tokens gives 0.
    """
    number = namespace_of(buckets.count).maximum(buckets.count, 1)
    return {
        "token_count": buckets.count,
        "kl": (0 - value_of(buckets.log_ratio)) / number,
        "k3_kl": value_of(buckets.k3) / number,
        "logprob_abs_diff_mean": value_of(buckets.log_ratio_abs) / number,
        "logprob_abs_diff_max": buckets.largest,
        "extreme_rate": buckets.extreme / number,
    }


def label_buckets(buckets: Buckets, labels: Sequence[str]) -> dict[str, Any]:
    """The numbers of ``finalize_buckets`` one by one, as ``<label>/<name>``: floats (numpy leaves) or jax scalars.

    Raises:
      ValueError: there are not as many labels as buckets.
    """
    found = finalize_buckets(buckets)
    if len(labels) != len(buckets.count):
        raise ValueError(f"labels must name each of the {len(buckets.count)} buckets, got {tuple(labels)}")
    convert = float if namespace_of(buckets.count) is np else (lambda value: value)
    return {f"{label}/{name}": convert(found[name][i]) for i, label in enumerate(labels) for name in found}


def bucket_labels(edges: Sequence[float]) -> tuple[str, ...]:
    """Names of the buckets between edges: ("lt_64", "64_to_256", "ge_256") for (64, 256)."""
    middle = [f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(edges)]
    return (f"lt_{edges[0]:g}", *middle, f"ge_{edges[-1]:g}")


def _digitize(xp: Any, values: Any, edges: Sequence[float]) -> Any:
    if len(edges) < 1 or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"edges must be increasing and at least one, got {tuple(edges)}")
    return sum((values >= edge).astype(np.int32) for edge in edges)


def _buckets(tokens: Tokens, index: Any, num_buckets: int) -> Buckets:
    xp, lr = tokens.xp, tokens.log_ratio
    size = xp.abs(lr)
    inside = tokens.valid[None] & (index[None] == xp.arange(num_buckets, dtype=np.int32)[:, None, None])
    lanes = xp.stack([lr, size, exp_minus_one_minus_x(xp, lr)])[:, None]
    totals = total_over(xp, xp.where(inside[None], lanes, 0), (2, 3))
    log_ratio, log_ratio_abs, k3 = (Total(totals.high[i], totals.low[i]) for i in range(3))
    wide = np.int64 if xp is np else np.int32
    return Buckets(
        xp.sum(inside, axis=(1, 2), dtype=wide),
        xp.sum(inside & (size > EXTREME_LOG_RATIO)[None], axis=(1, 2), dtype=wide),
        log_ratio,
        log_ratio_abs,
        k3,
        xp.max(xp.where(inside, size[None], 0), axis=(1, 2), initial=0),
    )


class SignSkew(NamedTuple):
    """Totals of the signed mismatch weighted by advantage A; they merge by addition."""

    positive_count: Any  # shape=(), int: valid tokens with A > 0
    negative_count: Any  # shape=(), int: valid tokens with A < 0
    sums: Total  # shape=(len(SKEW_SUMS),), float


SKEW_SUMS = ("advantage_abs", "weighted_log_ratio", "weighted_ratio", "weighted_sign", "positive", "negative")
"""Terms of ``SignSkew.sums``: abs(A), A lr, A expm1(clip(lr, +-20)), A sign(lr), lr where A > 0, lr where A < 0."""


def sign_skew(
    trainer_logprobs: ArrayLike, rollout_logprobs: ArrayLike, response_mask: ArrayLike, advantages: ArrayLike
) -> SignSkew:
    """Totals that show whether the mismatch leans with or against the advantage.

    k3, chi2 and absolute differences are blind to direction: the same value can push reinforced tokens up or down
    (arXiv 2605.14220).

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      advantages: [b, t] float. Tokens with a non-finite advantage are left out.

    Raises:
      ValueError: shapes differ.
    """
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    check_shape("advantages", advantages, tokens.valid.shape)
    xp, lr = tokens.xp, tokens.log_ratio
    values = as_float(xp, advantages)
    advantage = xp.where(tokens.valid & xp.isfinite(values), values, 0)
    lanes = xp.stack(
        [
            xp.abs(advantage),
            advantage * lr,
            advantage * xp.expm1(xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)),
            advantage * xp.sign(lr),
            xp.where(advantage > 0, lr, 0),
            xp.where(advantage < 0, lr, 0),
        ]
    )
    return SignSkew(count(xp, advantage > 0), count(xp, advantage < 0), total_over(xp, lanes, (1, 2)))


def merge_sign_skew(a: SignSkew, b: SignSkew) -> SignSkew:
    """Totals of the tokens of both."""
    return SignSkew(
        a.positive_count + b.positive_count, a.negative_count + b.negative_count, add_totals(a.sums, b.sums)
    )


def finalize_sign_skew(skew: SignSkew) -> dict[str, Any]:
    """The skew as numbers, 0 where there is nothing to weight by.

    Returns:
      ``log_ratio_skew`` = <A lr> / <abs(A)> (nats; above 0 the trainer is more confident than the sampler where it
      reinforces); ``ratio_skew`` = <A (rho - 1)> / <abs(A)>, the share by which an uncorrected gradient mis-weights;
      ``sign_skew`` = <A sign(lr)> / <abs(A)> in -1 .. 1; ``positive_log_ratio`` and ``negative_log_ratio``, the mean
      lr of tokens with A > 0 and with A < 0 (nats).
    """
    xp = namespace_of(skew.positive_count)
    sums = dict(zip(SKEW_SUMS, value_of(skew.sums), strict=True))
    weight = xp.where(sums["advantage_abs"] > 0, sums["advantage_abs"], 1)
    metrics = {
        "log_ratio_skew": sums["weighted_log_ratio"] / weight,
        "ratio_skew": sums["weighted_ratio"] / weight,
        "sign_skew": sums["weighted_sign"] / weight,
        "positive_log_ratio": sums["positive"] / xp.maximum(skew.positive_count, 1),
        "negative_log_ratio": sums["negative"] / xp.maximum(skew.negative_count, 1),
    }
    return {name: float(value) for name, value in metrics.items()} if xp is np else metrics


def split_sum_rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Split a rise of ``log_ppl_abs_diff_sum`` into what length explains and what the tokens themselves add.

    The summed form is mean length x gap, where the gap is sum_i abs(sum_t lr) / sum_i n_i (nats a token). Longer
    responses with the same gap explain (length after - length before) x gap before; the rest is
    length after x (gap after - gap before). Errors that are independent between tokens add up like the square root of
    the length, so that the gap falls as responses grow; then ``per_token`` is negative and that is no improvement.

    Args:
      before: metrics of ``finalize_statistics`` of an earlier step.
      after: the same of a later step.

    Returns:
      ``rise``, ``length_explained`` and ``per_token`` (nats a sequence); the last two add up to the first.
    """
    length_before, gap_before = _length_and_gap(before)
    length_after, gap_after = _length_and_gap(after)
    return {
        "rise": after["log_ppl_abs_diff_sum"] - before["log_ppl_abs_diff_sum"],
        "length_explained": (length_after - length_before) * gap_before,
        "per_token": length_after * (gap_after - gap_before),
    }


def _length_and_gap(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Mean length (tokens) and mean gap (nats a token) of a step; 0 without sequences."""
    xp = namespace_of(*metrics.values())
    length = metrics["token_count"] / xp.maximum(metrics["sequence_count"], 1)
    return length, metrics["log_ppl_abs_diff_sum"] / xp.where(length > 0, length, 1)
