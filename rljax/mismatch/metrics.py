"""Mismatch metrics between the log-probabilities two engines give to the same tokens.

With lr = trainer_logprobs - rollout_logprobs on response tokens, <.> the mean over all of them, d_i the mean of -lr in
sequence i and mean_i the mean over sequences: ``kl`` = <-lr>; ``k3_kl`` = <exp(lr) - lr - 1>; ``training_ppl`` =
mean_i exp(-mean_t logp), ``training_log_ppl`` its logarithm's mean, and the same for ``rollout_``; ``log_ppl_diff`` =
mean_i d_i; ``log_ppl_abs_diff`` = mean_i abs(d_i); ``log_ppl_abs_diff_sum`` = mean_i abs(sum_t lr), equations 7-8 of
arXiv 2602.01826; ``ppl_ratio`` = mean_i exp(d_i); ``chi2_token``, ``chi2_seq`` = mean of exp(2 clip(lr, +-20)) - 1
over tokens, and over sequences with their summed lr; ``slope_per_1k`` = least-squares slope through the origin of the
running sum of lr against position, pooled over sequences, per 1000 tokens (arXiv 2510.26788). Both KL estimate
KL(rollout || trainer).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rljax.mismatch.accurate import Total, value_of
from rljax.mismatch.histogram import histogram_quantile
from rljax.mismatch.statistics import SEQUENCE_SUMS, TOKEN_SUMS, MismatchStatistics, mismatch_statistics
from rljax.mismatch.tokens import ArrayLike, namespace_of, read_tokens

SMALLEST_ENTROPY = 1e-8
"""Floor of the entropy (nats) in kl_entropy_ratio, so that a deterministic policy gives a finite number."""


def mismatch_metrics(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    entropy: ArrayLike | None = None,
) -> dict[str, Any]:
    """Every mismatch metric of a batch whose rows are sequences.

    Args:
      trainer_logprobs: [b, t] float, log-probability of each token under the trainer (nats).
      rollout_logprobs: [b, t] float, the same under the rollout engine.
      response_mask: [b, t] bool, int or float; response tokens are where it is not 0. Holes are allowed.
      entropy: [b, t] float, the trainer's entropy at each token (nats); without it there is no ``kl_entropy_ratio``.

    Returns:
      Metric name -> float when all arrays are numpy (float64 arithmetic, exact quantiles), else -> jax scalar (float32
      arithmetic, quantiles within half a bin of 2%, counts int32). Tokens not finite on either side are left out and
      counted in ``nonfinite_count``; a mean over nothing is 0.

    Raises:
      ValueError: shapes differ or are not two-dimensional.
    """
    metrics = finalize_statistics(
        mismatch_statistics(trainer_logprobs, rollout_logprobs, response_mask, entropy=entropy)
    )
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    if tokens.xp is np and tokens.valid.any():
        exact = np.quantile(np.abs(tokens.log_ratio[tokens.valid]), [0.99, 0.999])
        metrics["logprob_abs_diff_p99"], metrics["logprob_abs_diff_p999"] = map(float, exact)
    return metrics


def finalize_statistics(statistics: MismatchStatistics) -> dict[str, Any]:
    """Turn statistics into metrics: float64 and Python floats for numpy leaves, jax scalars for jax leaves.

    Args:
      statistics: of one batch, or merged. Statistics brought from the device by ``jax.device_get`` are numpy and are
        finished in float64.

    Returns:
      Metric name (without prefix) -> scalar. ``kl_entropy_ratio`` is there only if entropy was given.
    """
    xp = namespace_of(statistics.token_count)
    if xp is np:
        statistics = jax.tree.map(_widen, statistics)
    token_mean, sequence_mean = token_means(statistics), sequence_means(statistics)
    tokens, largest = xp.maximum(statistics.token_count, 1), largest_log_ratio(statistics)
    any_sequence = statistics.sequence_count > 0
    metrics = {
        "kl": 0 - token_mean["log_ratio"],
        "k3_kl": token_mean["k3"],
        "training_ppl": sequence_mean["trainer_ppl"],
        "rollout_ppl": sequence_mean["rollout_ppl"],
        "training_log_ppl": sequence_mean["trainer_log_ppl"],
        "rollout_log_ppl": sequence_mean["rollout_log_ppl"],
        "log_ppl_diff": sequence_mean["log_ppl_diff"],
        "log_ppl_abs_diff": sequence_mean["log_ppl_abs_diff"],
        "log_ppl_abs_diff_sum": sequence_mean["log_ratio_sum_abs"],
        "log_ppl_diff_max": xp.where(any_sequence, statistics.log_ppl_diff_max, 0),
        "log_ppl_diff_min": xp.where(any_sequence, statistics.log_ppl_diff_min, 0),
        "ppl_ratio": xp.where(any_sequence, 1 + sequence_mean["ppl_ratio_minus_one"], 0),
        "chi2_token": token_mean["ratio_squared_minus_one"],
        "chi2_seq": sequence_mean["ratio_squared_minus_one"],
        "logprob_abs_diff_mean": token_mean["log_ratio_abs"],
        "logprob_abs_diff_p99": histogram_quantile(xp, statistics.histogram, largest, 0.99),
        "logprob_abs_diff_p999": histogram_quantile(xp, statistics.histogram, largest, 0.999),
        "logprob_abs_diff_max": largest,
        "prob_abs_diff_mean": token_mean["prob_abs_diff"],
        "prob_abs_diff_max": statistics.prob_abs_diff_max,
        "pearson_corr": _correlation(xp, statistics),
        "slope_per_1k": _slope(xp, statistics),
        "extreme_rate": statistics.extreme_count / tokens,
        "flip_count": statistics.flip_count,
        "nonfinite_count": statistics.nonfinite_count,
        "saturated_count": statistics.saturated_count,
        "token_count": statistics.token_count,
        "sequence_count": statistics.sequence_count,
    }
    if statistics.entropy_sum is not None:
        entropy = value_of(statistics.entropy_sum) / xp.maximum(statistics.entropy_count, 1)
        metrics["kl_entropy_ratio"] = metrics["k3_kl"] / xp.maximum(entropy, SMALLEST_ENTROPY)
    return {name: float(value) for name, value in metrics.items()} if xp is np else metrics


def _widen(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    return leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf.astype(np.int64)


def token_means(statistics: MismatchStatistics) -> dict[str, Any]:
    """Mean over tokens of each term of TOKEN_SUMS, by name; 0 without tokens."""
    return _means(TOKEN_SUMS, statistics.token_sums, statistics.token_count)


def sequence_means(statistics: MismatchStatistics) -> dict[str, Any]:
    """Mean over sequences of each term of SEQUENCE_SUMS, by name; 0 without sequences."""
    return _means(SEQUENCE_SUMS, statistics.sequence_sums, statistics.sequence_count)


def _means(names: tuple[str, ...], total: Total, number: Any) -> dict[str, Any]:
    return dict(zip(names, value_of(total) / namespace_of(number).maximum(number, 1), strict=True))


def largest_log_ratio(statistics: MismatchStatistics) -> Any:
    """The largest abs(log_ratio), nats; 0 without tokens."""
    xp = namespace_of(statistics.token_count)
    return xp.maximum(xp.maximum(statistics.log_ratio_max, -statistics.log_ratio_min), 0)


def _slope(xp: Any, statistics: MismatchStatistics) -> Any:
    numerator = value_of(statistics.token_sums)[TOKEN_SUMS.index("slope_numerator")]
    denominator = value_of(statistics.sequence_sums)[SEQUENCE_SUMS.index("slope_denominator")]
    return numerator / xp.where(denominator > 0, denominator, 1)


def _correlation(xp: Any, statistics: MismatchStatistics) -> Any:
    """Pearson's correlation; where a side is constant, 1 if the two sides are equal and 0 if not."""
    moments = statistics.moments
    spread = xp.sqrt(moments.trainer_square) * xp.sqrt(moments.rollout_square)
    equal = (statistics.prob_abs_diff_max == 0) & (statistics.token_count > 0)
    defined = moments.product / xp.where(spread > 0, spread, 1)
    return xp.where(spread > 0, xp.clip(defined, -1, 1), xp.where(equal, 1.0, 0.0))
