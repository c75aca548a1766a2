"""How the importance ratios are distributed: recorded at every step, whether or not a correction is applied."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rljax.mismatch.accurate import Total, add_totals, total_over, value_of
from rljax.mismatch.sequences import mean_over_tokens, read_sequences, sequence_sums
from rljax.mismatch.statistics import RATIO_BOUND
from rljax.mismatch.tokens import ArrayLike, count, namespace_of, read_tokens

LEVELS = ("token", "sequence", "geometric")
"""Order of the levels along the arrays of ``ImportanceTotals``."""


class ImportanceTotals(NamedTuple):
    """Mergeable statistics of the ratios at the three levels; the ratio's exponent is clipped at +-20."""

    number: Any  # shape=(3,), int: tokens, sequences, sequences
    above: Any  # shape=(3,), int: ratios above the threshold
    below: Any  # shape=(3,), int: ratios below 1 / threshold
    ratio_minus_one: Total  # shape=(3,), float
    ratio_squared_minus_one: Total  # shape=(3,), float
    largest: Any  # shape=(3,), float; 0 without ratios
    smallest: Any  # shape=(3,), float; inf without ratios


def importance_totals(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    threshold: float = 2.0,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> ImportanceTotals:
    """Statistics of the ratios of one batch; the arguments are those of ``importance_statistics``."""
    if not threshold >= 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}")
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    sequences = read_sequences(tokens, sequence_ids, num_sequences)
    xp = tokens.xp
    sums = sequence_sums(sequences, tokens.log_ratio[None])
    levels = [
        (tokens.log_ratio, tokens.valid),
        (sums[0], sequences.slot_valid),
        (mean_over_tokens(sequences, sums)[0], sequences.slot_valid),
    ]
    each = [_level_totals(xp, log_ratio, counted, threshold) for log_ratio, counted in levels]
    stacked = [xp.stack(parts) for parts in zip(*each, strict=True)]
    number, above, below, high, low, square_high, square_low, largest, smallest = stacked
    return ImportanceTotals(number, above, below, Total(high, low), Total(square_high, square_low), largest, smallest)


def _level_totals(xp: Any, log_ratio: Any, counted: Any, threshold: float) -> tuple[Any, ...]:
    log_ratio = xp.where(counted, xp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND), 0)
    ratio = xp.exp(log_ratio)
    return (
        count(xp, counted),
        count(xp, counted & (ratio > threshold)),
        count(xp, counted & (ratio < 1 / threshold)),
        *total_over(xp, xp.expm1(log_ratio), (0, 1)),
        *total_over(xp, xp.expm1(2 * log_ratio), (0, 1)),
        xp.max(xp.where(counted, ratio, 0), initial=0),
        xp.min(xp.where(counted, ratio, np.inf), initial=np.inf),
    )


def merge_importance(a: ImportanceTotals, b: ImportanceTotals) -> ImportanceTotals:
    """Statistics of the ratios of both; associative and commutative up to rounding."""
    xp = namespace_of(a.number, b.number)
    return ImportanceTotals(
        number=a.number + b.number,
        above=a.above + b.above,
        below=a.below + b.below,
        ratio_minus_one=add_totals(a.ratio_minus_one, b.ratio_minus_one),
        ratio_squared_minus_one=add_totals(a.ratio_squared_minus_one, b.ratio_squared_minus_one),
        largest=xp.maximum(a.largest, b.largest),
        smallest=xp.minimum(a.smallest, b.smallest),
    )


def finalize_importance(totals: ImportanceTotals) -> dict[str, Any]:
    """Turn totals into metrics: Python floats for numpy leaves, jax scalars for jax leaves; names as below."""
    xp = namespace_of(totals.number)
    number = xp.maximum(totals.number, 1)
    mean = 1 + value_of(totals.ratio_minus_one) / number
    square = 1 + value_of(totals.ratio_squared_minus_one) / number
    counted = totals.number > 0
    columns = {
        "ratio_mean": xp.where(counted, mean, 0),
        "ratio_max": totals.largest,
        "ratio_min": xp.where(counted, totals.smallest, 0),
        "fraction_above": totals.above / number,
        "fraction_below": totals.below / number,
        "effective_sample_size": xp.where(counted, xp.minimum(mean * mean / square, 1), 0),
    }
    metrics = {f"{level}_{name}": column[i] for name, column in columns.items() for i, level in enumerate(LEVELS)}
    return {name: float(value) for name, value in metrics.items()} if xp is np else metrics


def importance_statistics(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    threshold: float = 2.0,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> dict[str, Any]:
    """The ``is/<name>`` metrics of one batch, from the uncorrected ratios.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      threshold: C >= 1 of a correction, used or only watched.
      sequence_ids: see ``mismatch_statistics``.
      num_sequences: see ``mismatch_statistics``.

    Returns:
      For each level L of token, sequence (product) and geometric: ``L_ratio_mean``, ``L_ratio_max``, ``L_ratio_min``,
      ``L_fraction_above`` (ratio > C), ``L_fraction_below`` (ratio < 1 / C), ``L_effective_sample_size`` =
      <w>^2 / <w^2>, a share in 0 .. 1. Everything is 0 when there is no valid token.

    Raises:
      ValueError: shapes differ or the threshold is below 1.
    """
    return finalize_importance(
        importance_totals(
            trainer_logprobs,
            rollout_logprobs,
            response_mask,
            threshold=threshold,
            sequence_ids=sequence_ids,
            num_sequences=num_sequences,
        )
    )
