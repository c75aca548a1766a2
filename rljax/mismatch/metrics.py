"""Mismatch metrics between the log-probabilities that two engines give to the same tokens.

Notation: lr = trainer_logprobs - rollout_logprobs on response tokens; <.> is the mean over all of them; d_i is the mean
of -lr in sequence i; mean_i is the mean over sequences.

- ``kl`` = <-lr> and ``k3_kl`` = <exp(lr) - lr - 1>. Both estimate KL(rollout || trainer).
- ``training_ppl`` = mean_i exp(-mean_t logp) and ``training_log_ppl`` = mean_i -mean_t logp, with the trainer's logp.
  ``rollout_ppl`` and ``rollout_log_ppl`` use the rollout engine's.
- ``log_ppl_diff`` = mean_i d_i; ``log_ppl_abs_diff`` = mean_i abs(d_i); ``log_ppl_abs_diff_sum`` = mean_i abs(sum_t lr)
  (equations 7-8 of arXiv 2602.01826); ``ppl_ratio`` = mean_i exp(d_i).
- ``chi2_token`` = <exp(2 clip(lr, +-20)) - 1>; ``chi2_seq`` is the mean over sequences with their summed lr.
- ``slope_per_1k`` is the least-squares slope, through the origin, of the running sum of lr against the position. It is
  pooled over sequences and given per 1000 tokens (arXiv 2510.26788).
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from rljax.mismatch.accurate import RATIO_BOUND, exp_minus_one_minus_x, exponent_limit, total_over
from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, count, scalars
from rljax.mismatch.statistics import Statistics, moments_of
from rljax.mismatch.tokens import Tokens, read_tokens

SMALLEST = 1e-9
"""A |log-ratio| below this (nats) counts as 0."""
GROWTH = 1.02
"""Ratio of a bin's upper edge to its lower edge. The reported middle is within 1% of every value in the bin."""
LARGEST = 1e3
"""A |log-ratio| above this (nats) falls into the last bin, which is reported as the largest counted value."""
NUM_BINS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH)) + 2
"""Number of bins: one for zeros, the log-spaced bins, and one for overflow."""


def bin_edges() -> np.ndarray:
    """Returns the edges of the bins, float64 [NUM_BINS - 1], in nats. Bin i holds edges[i - 1] <= x < edges[i]."""
    return SMALLEST * GROWTH ** np.arange(NUM_BINS - 1)


def magnitude_histogram(xp: ModuleType, magnitudes: Any, valid: Any) -> Any:
    """Counts the valid ([b, t] bool) magnitudes ([b, t] float, finite, not negative) in each bin, int [NUM_BINS].

    The bins are log-spaced. Histograms merge by addition and give quantiles within one bin.
    """
    above = xp.log(xp.maximum(magnitudes, SMALLEST) / SMALLEST) / math.log(GROWTH)
    index = xp.where(magnitudes < SMALLEST, 0, xp.clip(xp.floor(above).astype(np.int32) + 1, 1, NUM_BINS - 1))
    if xp is np:
        return np.bincount(index[valid], minlength=NUM_BINS)
    return jnp.zeros(NUM_BINS, jnp.int32).at[index].add(valid.astype(jnp.int32))


def histogram_quantile(xp: ModuleType, counts: Any, largest: Any, q: float) -> Any:
    """Computes quantile q of the counted magnitudes, interpolated between order statistics as in ``numpy.quantile``.

    It is within half a bin of the exact one, and 0 if all ``counts``, [NUM_BINS], are 0. ``largest`` is the largest
    counted magnitude, a scalar float. q lies in 0 .. 1 and is a multiple of 1/1000.
    """
    edges = bin_edges()
    middles = np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:]), [np.inf]])
    values = xp.minimum(xp.asarray(middles, dtype=largest.dtype), largest)
    cumulative = xp.cumsum(counts)
    last = xp.maximum(cumulative[-1] - 1, 0)
    # Ranks are integers, because a float32 product loses whole ranks above 2^24 counts. The thousands of ``last`` and
    # the rest are multiplied apart, so that q * last does not overflow.
    thousandths = round(q * 1000)
    scaled = last % 1000 * thousandths
    rank, fraction = last // 1000 * thousandths + scaled // 1000, (scaled % 1000) / 1000
    below = values[xp.searchsorted(cumulative, rank, side="right").clip(0, NUM_BINS - 1)]
    above = values[xp.searchsorted(cumulative, xp.minimum(rank + 1, last), side="right").clip(0, NUM_BINS - 1)]
    return xp.where(cumulative[-1] > 0, below + (above - below) * fraction, 0)


EXTREME_LOG_RATIO = 0.5
"""A token is extreme when abs(log_ratio) is above this (nats)."""
SAME_LOG_RATIO = 1e-6
"""A token differs when abs(log_ratio) is above this (nats)."""
FLIP_HIGH, FLIP_LOW = 0.9, 0.1
"""A token flips when one engine gives it a probability above the first number and the other below the second."""
_SIGNED_OF_TOKENS = ("log_ratio", "ratio_squared_minus_one", "ratio_minus_one", "slope_numerator")
SIGNED = (*_SIGNED_OF_TOKENS, "log_ppl_diff", "ppl_ratio_minus_one", "sequence_ratio_squared_minus_one")
"""Terms of both signs. Their sums cancel, so they are carried as two floats."""
PERPLEXITIES = ("training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl")
SEQUENCE_MEANS = (*PERPLEXITIES, "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_abs_diff_sum")
"""Metrics that are the mean over sequences of the term with the same name."""
SMALLEST_ENTROPY = 1e-8
"""Lower bound of the entropy (nats) in kl_entropy_ratio, so that a deterministic policy gives a finite number."""


def mismatch_metrics(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    entropy: ArrayLike | None = None,
) -> dict[str, Any]:
    """Computes every mismatch metric of a batch whose rows are sequences.

    Tokens that are not finite on at least one side are left out and counted in ``nonfinite_count``. A mean over nothing
    is 0.

    Args:
      trainer_logprobs: The trainer's log-probability of each token, [b, t] float, nats.
      rollout_logprobs: The inference engine's log-probability of each token, [b, t] float, nats.
      response_mask: The response mask, [b, t] bool, int or float. Response tokens are not 0. Holes are allowed.
      entropy: The trainer's entropy at each token, [b, t] float, nats. None: no ``kl_entropy_ratio``.

    Returns:
      The metrics by name. If all arrays are numpy: floats, from float64 arithmetic, with exact quantiles. Otherwise:
        jax scalars, from float32 arithmetic, with quantiles within half a bin of 2% and int32 counts.

    Raises:
      ValueError: The shapes differ or are not two-dimensional.
    """
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    metrics = finalize_mismatch(mismatch_statistics(tokens, entropy))
    if tokens.xp is np and tokens.valid.any():
        exact = np.quantile(np.abs(tokens.log_ratio[tokens.valid]), [0.99, 0.999])
        metrics["logprob_abs_diff_p99"], metrics["logprob_abs_diff_p999"] = map(float, exact)
    return metrics


def mismatch_statistics(tokens: Tokens, entropy: ArrayLike | None = None) -> Statistics:
    """Computes the statistics of the mismatch, and of the trainer's ``entropy`` if it is given.

    ``entropy`` is [b, t] float (nats). A sequence without a valid token does not count. Raises ValueError if
    ``entropy`` has another shape.
    """
    xp, valid, lr = tokens.xp, tokens.valid, tokens.log_ratio
    trainer_prob, rollout_prob, prob_abs_diff = _probabilities(tokens)
    high, low = xp.maximum(trainer_prob, rollout_prob), xp.minimum(trainer_prob, rollout_prob)
    of_tokens, of_sequences = _token_terms(tokens, prob_abs_diff), _sequence_terms(tokens)
    diff = of_sequences["log_ppl_diff"]
    flags = {
        "token_count": valid,
        "nonfinite_count": tokens.nonfinite,
        # The exponent of these tokens is capped at exponent_limit.
        "saturated_count": xp.abs(lr) > exponent_limit(lr.dtype),
        "extreme_count": xp.abs(lr) > EXTREME_LOG_RATIO,
        "different_count": xp.abs(lr) > SAME_LOG_RATIO,
        "flip_count": valid & (high > FLIP_HIGH) & (low < FLIP_LOW),
        "sequence_count": tokens.sequences.present,
    }
    if entropy is not None:
        check_shape("entropy", entropy, valid.shape)
        values = as_float(xp, entropy)
        flags["entropy_count"] = valid & xp.isfinite(values)
        of_tokens["entropy"] = xp.where(flags["entropy_count"], values, 0)
    present = tokens.sequences.present
    terms = of_tokens | {name: xp.where(present, term, 0) for name, term in of_sequences.items()}
    return Statistics(
        sums={name: count(xp, flag) for name, flag in flags.items()}
        | {name: xp.sum(term) for name, term in terms.items() if name not in SIGNED}
        | {"histogram": magnitude_histogram(xp, xp.abs(lr), valid)},
        totals={name: total_over(xp, terms[name], (0, 1)) for name in SIGNED},
        maxima={
            "log_ratio_max": xp.max(xp.where(valid, lr, -np.inf), initial=-np.inf),
            "prob_abs_diff_max": xp.max(prob_abs_diff, initial=0),
            "log_ppl_diff_max": xp.max(xp.where(present, diff, -np.inf), initial=-np.inf),
        },
        minima={
            "log_ratio_min": xp.min(xp.where(valid, lr, np.inf), initial=np.inf),
            "log_ppl_diff_min": xp.min(xp.where(present, diff, np.inf), initial=np.inf),
        },
        moments={"probabilities": moments_of(xp, xp.stack([trainer_prob, rollout_prob]), valid)},
    )


def _probabilities(tokens: Tokens) -> tuple[Any, Any, Any]:
    """Computes both probabilities and the distance between them, [b, t] each, 0 outside the valid tokens."""
    # A true log-probability is at most 0. The limit keeps the squares of a broken engine's numbers finite.
    xp, limit = tokens.xp, exponent_limit(tokens.log_ratio.dtype) / 2
    higher = xp.exp(xp.minimum(xp.maximum(tokens.trainer, tokens.rollout), limit))
    # expm1 is used because exp(trainer) - exp(rollout) loses the digits of a small log-ratio.
    distance = higher * -xp.expm1(-xp.abs(tokens.log_ratio))
    trainer, rollout = (xp.exp(xp.minimum(logprob, limit)) for logprob in (tokens.trainer, tokens.rollout))
    return tuple(xp.where(tokens.valid, part, 0) for part in (trainer, rollout, distance))


def _token_terms(tokens: Tokens, prob_abs_diff: Any) -> dict[str, Any]:
    """Computes the terms that are summed over tokens, [b, t] each. A term is 0 where the log-ratio is 0."""
    xp, lr, sequences = tokens.xp, tokens.log_ratio, tokens.sequences
    clipped = xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)
    # The slope needs the sum over t of t x (running sum of lr up to t). This equals the sum over i of lr_i x (sum of
    # the positions from i to n). The inner sum is (n - i + 1)(n + i) / 2. Positions are in thousands of tokens.
    n, i = sequences.length.astype(lr.dtype), sequences.position.astype(lr.dtype)
    return {
        "log_ratio": lr,
        "k3": tokens.k3,
        "reverse_k3": exp_minus_one_minus_x(xp, -lr),  # estimates KL(trainer || rollout) over the trainer's tokens
        "log_ratio_abs": xp.abs(lr),
        "log_ratio_squared": lr * lr,
        "ratio_squared_minus_one": xp.expm1(2 * clipped),
        "ratio_minus_one": xp.expm1(clipped),
        "ratio_abs_minus_one": xp.expm1(xp.minimum(xp.abs(lr), exponent_limit(lr.dtype))),
        "prob_abs_diff": prob_abs_diff,
        "prob_abs_diff_squared": prob_abs_diff * prob_abs_diff,
        "slope_numerator": lr * ((n - i + 1) * (n + i) * 0.5e-3),
    }


def _sequence_terms(tokens: Tokens) -> dict[str, Any]:
    """Computes the terms that are summed over sequences, [b, s] each."""
    xp, lr, limit = tokens.xp, tokens.log_ratio, exponent_limit(tokens.log_ratio.dtype)
    values = [lr, tokens.trainer, tokens.rollout, xp.abs(lr), tokens.k3]
    sums = tokens.sequences.sums(xp.stack(values))
    means = tokens.sequences.per_token(sums)
    diff, training_log_ppl, rollout_log_ppl = 0 - means[0], 0 - means[1], 0 - means[2]  # never -0.0
    n = tokens.sequences.present_length.astype(sums.dtype)
    return {
        "training_ppl": xp.exp(xp.minimum(training_log_ppl, limit)),
        "rollout_ppl": xp.exp(xp.minimum(rollout_log_ppl, limit)),
        "training_log_ppl": training_log_ppl,
        "rollout_log_ppl": rollout_log_ppl,
        "log_ppl_diff": diff,
        "log_ppl_abs_diff": xp.abs(diff),
        "log_ppl_abs_diff_sum": xp.abs(sums[0]),
        "sequence_log_ratio_abs": means[3],
        "sequence_k3": means[4],
        "ppl_ratio_minus_one": xp.expm1(xp.minimum(diff, limit)),
        "sequence_ratio_squared_minus_one": xp.expm1(2 * xp.clip(sums[0], -RATIO_BOUND, RATIO_BOUND)),
        "slope_denominator": n * (n + 1) * (2 * n + 1) / 6e6,  # sum of (position in thousands)^2
    }


def finalize_mismatch(statistics: Statistics) -> dict[str, Any]:
    """Computes the metrics of one batch, or of several that were merged: Python floats (numpy leaves) or jax scalars.

    ``kl_entropy_ratio`` is present only if the statistics include the entropy.
    """
    xp, mean, extreme, largest = statistics.xp, statistics.mean, statistics.extreme, largest_log_ratio(statistics)
    of_sequences, slope = functools.partial(mean, over="sequence_count"), statistics["slope_denominator"]
    metrics = {
        "kl": 0 - mean("log_ratio"),
        "k3_kl": mean("k3"),
        **{name: of_sequences(name) for name in SEQUENCE_MEANS},
        "log_ppl_diff_max": extreme("log_ppl_diff_max", "sequence_count"),
        "log_ppl_diff_min": extreme("log_ppl_diff_min", "sequence_count"),
        "ppl_ratio": xp.where(statistics["sequence_count"] > 0, 1 + of_sequences("ppl_ratio_minus_one"), 0),
        "chi2_token": mean("ratio_squared_minus_one"),
        "chi2_seq": of_sequences("sequence_ratio_squared_minus_one"),
        "logprob_abs_diff_mean": mean("log_ratio_abs"),
        "logprob_abs_diff_p99": histogram_quantile(xp, statistics["histogram"], largest, 0.99),
        "logprob_abs_diff_p999": histogram_quantile(xp, statistics["histogram"], largest, 0.999),
        "logprob_abs_diff_max": largest,
        "prob_abs_diff_mean": mean("prob_abs_diff"),
        "prob_abs_diff_max": extreme("prob_abs_diff_max"),
        "pearson_corr": _correlation(statistics),
        "slope_per_1k": statistics["slope_numerator"] / xp.where(slope > 0, slope, 1),
        "extreme_rate": mean("extreme_count"),
    }
    counts = ("flip_count", "nonfinite_count", "saturated_count", "token_count", "sequence_count")
    metrics |= {name: statistics[name] for name in counts}
    if "entropy" in statistics.sums:
        metrics["kl_entropy_ratio"] = metrics["k3_kl"] / xp.maximum(mean("entropy", "entropy_count"), SMALLEST_ENTROPY)
    return scalars(xp, metrics)


def largest_log_ratio(statistics: Statistics) -> Any:
    """Returns the largest abs(log_ratio) in nats, 0 without tokens."""
    xp = statistics.xp
    return xp.maximum(xp.maximum(statistics["log_ratio_max"], -statistics["log_ratio_min"]), 0)


def _correlation(statistics: Statistics) -> Any:
    """Computes Pearson's correlation. If a side is constant, it is 1 if the two sides are equal, else 0."""
    xp, ((trainer, product), (_, rollout)) = statistics.xp, statistics["probabilities"].spread
    spread = xp.sqrt(trainer) * xp.sqrt(rollout)
    equal = (statistics["prob_abs_diff_max"] == 0) & (statistics["token_count"] > 0)
    defined = product / xp.where(spread > 0, spread, 1)
    return xp.where(spread > 0, xp.clip(defined, -1, 1), xp.where(equal, 1.0, 0.0))
