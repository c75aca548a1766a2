"""Mismatch as sufficient statistics: sums, counts, extremes and a histogram that merge in any order.

Micro-batches, packed rows, shards and processes each give a ``MismatchStatistics``; merging them gives what one call
on all tokens would have given, up to rounding. The formulas that turn them into metrics are in ``metrics.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rljax.mismatch.accurate import (
    Total,
    add_totals,
    exp_minus_one_minus_x,
    exponent_limit,
    probability_limit,
    total_over,
    value_of,
)
from rljax.mismatch.histogram import magnitude_histogram
from rljax.mismatch.sequences import Sequences, mean_over_tokens, read_sequences, sequence_sums, valid_slots
from rljax.mismatch.tokens import ArrayLike, Tokens, as_float, check_shape, count, namespace_of, read_tokens

RATIO_BOUND = 20.0
"""Bound B of the exponent in importance ratios (nats): exp(20) is 4.9e8."""
EXTREME_LOG_RATIO = 0.5
"""A token is extreme when abs(log_ratio) is above this (nats)."""
SAME_LOG_RATIO = 1e-6
"""A token differs when abs(log_ratio) is above this (nats)."""
FLIP_HIGH, FLIP_LOW = 0.9, 0.1
"""A token flips when one engine gives it more than the first and the other less than the second probability."""

TOKEN_SUMS = (
    "log_ratio",
    "k3",
    "reverse_k3",  # exp(-lr) + lr - 1: estimates KL(trainer || rollout) over the trainer's tokens
    "log_ratio_abs",
    "log_ratio_squared",
    "ratio_squared_minus_one",  # expm1(2 clip(lr, +-B))
    "ratio_minus_one",  # expm1(clip(lr, +-B))
    "ratio_abs_minus_one",  # expm1(abs(lr))
    "prob_abs_diff",
    "prob_abs_diff_squared",
    "slope_numerator",  # (position in thousands) x (running sum of lr), summed over a sequence
)
"""Names of ``MismatchStatistics.token_sums`` in order."""

SEQUENCE_SUMS = (
    "trainer_ppl",
    "rollout_ppl",
    "trainer_log_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "log_ratio_sum_abs",
    "log_ratio_abs",  # mean over the sequence's tokens
    "k3",  # mean over the sequence's tokens
    "ppl_ratio_minus_one",
    "ratio_squared_minus_one",  # expm1(2 clip(sum lr, +-B))
    "slope_denominator",  # (position in thousands)^2 summed over a sequence
)
"""Names of ``MismatchStatistics.sequence_sums`` in order."""


class Moments(NamedTuple):
    """Means and centred second moments of the two probabilities, merged by Chan's rule."""

    trainer_mean: Any  # shape=(), float
    rollout_mean: Any  # shape=(), float
    trainer_square: Any  # shape=(), float: sum of (p - mean)^2
    rollout_square: Any  # shape=(), float: sum of (q - mean)^2
    product: Any  # shape=(), float: sum of (p - mean)(q - mean)


class MismatchStatistics(NamedTuple):
    """Mergeable statistics of the tokens of some sequences; a pytree. Floats are float32 on the device, else float64.

    ``entropy_sum`` and ``entropy_count`` are None when no entropy was given.
    """

    token_count: Any  # shape=(), int: response tokens finite on both sides
    nonfinite_count: Any  # shape=(), int: response tokens not finite on either side
    saturated_count: Any  # shape=(), int: tokens whose log-ratio is above exponent_limit and entered exp capped
    extreme_count: Any  # shape=(), int
    different_count: Any  # shape=(), int
    flip_count: Any  # shape=(), int
    sequence_count: Any  # shape=(), int: sequences with at least one counted token
    token_sums: Total  # shape=(len(TOKEN_SUMS),), float
    sequence_sums: Total  # shape=(len(SEQUENCE_SUMS),), float
    moments: Moments
    log_ratio_max: Any  # shape=(), float, nats; -inf without tokens
    log_ratio_min: Any  # shape=(), float, nats; inf without tokens
    prob_abs_diff_max: Any  # shape=(), float; 0 without tokens
    log_ppl_diff_max: Any  # shape=(), float, nats; -inf without sequences
    log_ppl_diff_min: Any  # shape=(), float, nats; inf without sequences
    histogram: Any  # shape=(NUM_BINS,), int: abs(log_ratio), see histogram.py
    entropy_sum: Total | None  # shape=(), float, nats
    entropy_count: Any  # shape=(), int: counted tokens whose entropy is finite


def mismatch_statistics(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    entropy: ArrayLike | None = None,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> MismatchStatistics:
    """Statistics of one batch. Works under jit, grad (no gradient), vmap, scan and rows sharded over Auto mesh axes.

    Args:
      trainer_logprobs: [b, t] float, log-probability of each token under the trainer (nats).
      rollout_logprobs: [b, t] float, the same under the rollout engine.
      response_mask: [b, t] bool, int or float; response tokens are where it is not 0. Holes are allowed.
      entropy: [b, t] float, the trainer's entropy at each token (nats), or None.
      sequence_ids: None when each row is one sequence; else int [b, t] in 0 .. num_sequences - 1, several sequences
        to a row, each whole inside its row. Values outside the mask are ignored.
      num_sequences: static int, given with ``sequence_ids``.

    Returns:
      The statistics. Tokens not finite on either side are left out and counted.

    Raises:
      ValueError: shapes that differ, or sequence_ids without num_sequences.
    """
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    sequences = read_sequences(tokens, sequence_ids, num_sequences)
    xp, valid, lr = tokens.xp, tokens.valid, tokens.log_ratio
    trainer_prob, rollout_prob, prob_abs_diff = _probabilities(tokens)
    high, low = xp.maximum(trainer_prob, rollout_prob), xp.minimum(trainer_prob, rollout_prob)
    slots, diffs = _sequence_lanes(tokens, sequences)
    entropy_sum, entropy_count = _entropy(tokens, entropy)
    return MismatchStatistics(
        token_count=count(xp, valid),
        nonfinite_count=count(xp, tokens.nonfinite),
        saturated_count=count(xp, xp.abs(lr) > exponent_limit(lr.dtype)),
        extreme_count=count(xp, xp.abs(lr) > EXTREME_LOG_RATIO),
        different_count=count(xp, xp.abs(lr) > SAME_LOG_RATIO),
        flip_count=count(xp, valid & (high > FLIP_HIGH) & (low < FLIP_LOW)),
        sequence_count=count(xp, sequences.slot_valid),
        token_sums=total_over(xp, _token_lanes(tokens, sequences, prob_abs_diff), (1, 2)),
        sequence_sums=total_over(xp, slots, (1, 2)),
        moments=_moments(tokens, trainer_prob, rollout_prob),
        log_ratio_max=xp.max(xp.where(valid, lr, -np.inf), initial=-np.inf),
        log_ratio_min=xp.min(xp.where(valid, lr, np.inf), initial=np.inf),
        prob_abs_diff_max=xp.max(prob_abs_diff, initial=0),
        log_ppl_diff_max=xp.max(xp.where(sequences.slot_valid, diffs, -np.inf), initial=-np.inf),
        log_ppl_diff_min=xp.min(xp.where(sequences.slot_valid, diffs, np.inf), initial=np.inf),
        histogram=magnitude_histogram(xp, xp.abs(lr), valid),
        entropy_sum=entropy_sum,
        entropy_count=entropy_count,
    )


def _probabilities(tokens: Tokens) -> tuple[Any, Any, Any]:
    """Both probabilities and the distance between them, [b, t], 0 outside the valid tokens."""
    xp, limit = tokens.xp, probability_limit(tokens.log_ratio.dtype)
    higher = xp.exp(xp.minimum(xp.maximum(tokens.trainer, tokens.rollout), limit))
    # Through expm1, because exp(trainer) - exp(rollout) loses the digits of a small log-ratio.
    distance = higher * -xp.expm1(-xp.abs(tokens.log_ratio))
    trainer = xp.exp(xp.minimum(tokens.trainer, limit))
    rollout = xp.exp(xp.minimum(tokens.rollout, limit))
    return tuple(xp.where(tokens.valid, part, 0) for part in (trainer, rollout, distance))


def _token_lanes(tokens: Tokens, sequences: Sequences, prob_abs_diff: Any) -> Any:
    """The terms of TOKEN_SUMS, [len(TOKEN_SUMS), b, t]; every one is 0 where the log-ratio is 0."""
    xp, lr = tokens.xp, tokens.log_ratio
    clipped = xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)
    # sum over t of t x (running sum of lr up to t) = sum over i of lr_i x (sum of the positions from i to n), and
    # that inner sum is (n - i + 1)(n + i) / 2. Positions are in thousands of tokens.
    n, i = sequences.length.astype(lr.dtype), sequences.position.astype(lr.dtype)
    positions_from_here = (n - i + 1) * (n + i) * 0.5e-3
    return xp.stack(
        [
            lr,
            exp_minus_one_minus_x(xp, lr),
            exp_minus_one_minus_x(xp, -lr),
            xp.abs(lr),
            lr * lr,
            xp.expm1(2 * clipped),
            xp.expm1(clipped),
            xp.expm1(xp.minimum(xp.abs(lr), exponent_limit(lr.dtype))),
            prob_abs_diff,
            prob_abs_diff * prob_abs_diff,
            lr * positions_from_here,
        ]
    )


def _sequence_lanes(tokens: Tokens, sequences: Sequences) -> tuple[Any, Any]:
    """The terms of SEQUENCE_SUMS, [len(SEQUENCE_SUMS), b, s], 0 where no sequence stands; and d_i, [b, s]."""
    xp, lr, limit = tokens.xp, tokens.log_ratio, exponent_limit(tokens.log_ratio.dtype)
    terms = [lr, tokens.trainer, tokens.rollout, xp.abs(lr), exp_minus_one_minus_x(xp, lr)]
    sums = sequence_sums(sequences, xp.stack(terms))
    means = mean_over_tokens(sequences, sums)
    diff, trainer_log_ppl, rollout_log_ppl = 0 - means[0], 0 - means[1], 0 - means[2]  # never -0.0
    n = sequences.slot_length.astype(sums.dtype)
    lanes = xp.stack(
        [
            xp.exp(xp.minimum(trainer_log_ppl, limit)),
            xp.exp(xp.minimum(rollout_log_ppl, limit)),
            trainer_log_ppl,
            rollout_log_ppl,
            diff,
            xp.abs(diff),
            xp.abs(sums[0]),
            means[3],
            means[4],
            xp.expm1(xp.minimum(diff, limit)),
            xp.expm1(2 * xp.clip(sums[0], -RATIO_BOUND, RATIO_BOUND)),
            n * (n + 1) * (2 * n + 1) / 6e6,
        ]
    )
    return valid_slots(sequences, lanes), diff


def _moments(tokens: Tokens, trainer_prob: Any, rollout_prob: Any) -> Moments:
    xp, valid = tokens.xp, tokens.valid
    n = xp.maximum(count(xp, valid), 1).astype(trainer_prob.dtype)
    means = value_of(total_over(xp, xp.stack([trainer_prob, rollout_prob]), (1, 2))) / n
    p = xp.where(valid, trainer_prob - means[0], 0)
    q = xp.where(valid, rollout_prob - means[1], 0)
    squares = value_of(total_over(xp, xp.stack([p * p, q * q, p * q]), (1, 2)))
    return Moments(means[0], means[1], squares[0], squares[1], squares[2])


def _entropy(tokens: Tokens, entropy: ArrayLike | None) -> tuple[Total | None, Any]:
    if entropy is None:
        return None, None
    check_shape("entropy", entropy, tokens.valid.shape)
    values = as_float(tokens.xp, entropy)
    counted = tokens.valid & tokens.xp.isfinite(values)
    return total_over(tokens.xp, tokens.xp.where(counted, values, 0), (0, 1)), count(tokens.xp, counted)


def merge_statistics(a: MismatchStatistics, b: MismatchStatistics) -> MismatchStatistics:
    """Statistics of the tokens of both; associative and commutative up to rounding.

    Raises:
      ValueError: one was made with entropy and the other without.
    """
    if (a.entropy_sum is None) != (b.entropy_sum is None):
        raise ValueError("both statistics must be made with entropy or both without, got one of each")
    xp = namespace_of(a.token_count, b.token_count)
    return MismatchStatistics(
        token_count=a.token_count + b.token_count,
        nonfinite_count=a.nonfinite_count + b.nonfinite_count,
        saturated_count=a.saturated_count + b.saturated_count,
        extreme_count=a.extreme_count + b.extreme_count,
        different_count=a.different_count + b.different_count,
        flip_count=a.flip_count + b.flip_count,
        sequence_count=a.sequence_count + b.sequence_count,
        token_sums=add_totals(a.token_sums, b.token_sums),
        sequence_sums=add_totals(a.sequence_sums, b.sequence_sums),
        moments=_merge_moments(a, b),
        log_ratio_max=xp.maximum(a.log_ratio_max, b.log_ratio_max),
        log_ratio_min=xp.minimum(a.log_ratio_min, b.log_ratio_min),
        prob_abs_diff_max=xp.maximum(a.prob_abs_diff_max, b.prob_abs_diff_max),
        log_ppl_diff_max=xp.maximum(a.log_ppl_diff_max, b.log_ppl_diff_max),
        log_ppl_diff_min=xp.minimum(a.log_ppl_diff_min, b.log_ppl_diff_min),
        histogram=a.histogram + b.histogram,
        entropy_sum=None
        if a.entropy_sum is None or b.entropy_sum is None
        else add_totals(a.entropy_sum, b.entropy_sum),
        entropy_count=None if a.entropy_sum is None else a.entropy_count + b.entropy_count,
    )


def _merge_moments(a: MismatchStatistics, b: MismatchStatistics) -> Moments:
    """Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)."""
    xp, x, y = namespace_of(a.token_count, b.token_count), a.moments, b.moments
    dtype = x.trainer_mean.dtype
    share = b.token_count.astype(dtype) / xp.maximum(a.token_count + b.token_count, 1).astype(dtype)
    weight = a.token_count.astype(dtype) * share
    p, q = y.trainer_mean - x.trainer_mean, y.rollout_mean - x.rollout_mean
    return Moments(
        trainer_mean=x.trainer_mean + p * share,
        rollout_mean=x.rollout_mean + q * share,
        trainer_square=x.trainer_square + y.trainer_square + p * p * weight,
        rollout_square=x.rollout_square + y.rollout_square + q * q * weight,
        product=x.product + y.product + p * q * weight,
    )
