"""Corrections of the gradient for mismatch: importance weights (TIS, MIS, band) and rejection of whole sequences.

Sources: equations 4-6 of arXiv 2602.01826 (sequence ratio; truncated, TIS; masked, MIS); IcePop for the band; the
geometric sequence ratio is GSPO's, arXiv 2507.18071; rejection by per-token k3 is VeXact's, arXiv 2605.14220.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from rljax.mismatch.accurate import exp_minus_one_minus_x, total_over, value_of
from rljax.mismatch.sequences import Sequences, mean_over_tokens, read_sequences, sequence_sums, spread
from rljax.mismatch.statistics import RATIO_BOUND
from rljax.mismatch.tokens import ArrayLike, Tokens, count, read_tokens

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "band"]
Rejection = Literal["k3", "geometric", "veto"]


def importance_weights(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    level: Level,
    mode: Mode,
    threshold: float | tuple[float, float],
    normalize: bool = False,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Weights that multiply each token's loss.

    The ratio rho is exp(lr) of a token, exp(sum lr) or exp(mean lr) of its sequence, the exponent clipped at +-20.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      level: "token" (rho_t), "sequence" (product over the sequence) or "geometric" (its n-th root).
      mode: "truncate" (TIS, min(rho, C)), "mask" (MIS, rho where rho <= C, else 0) or "band" (rho where
        lo <= rho <= hi, else 0). "mask" and "band" zero the weight; the caller's denominator stays (equation 6).
      threshold: C > 0, or (lo, hi) with 0 <= lo <= hi for "band".
      normalize: divide by the mean weight over valid tokens (level "token") or over sequences, unless that mean is 0.
      sequence_ids: see ``mismatch_statistics``.
      num_sequences: see ``mismatch_statistics``.

    Returns:
      (weights, stats). Weights are [b, t] float (float64 on the host, float32 on the device), 0 outside the mask and
      at tokens not finite on either side, a sequence's weight repeated over its tokens, without gradient. Stats are
      scalars over tokens (level "token") or sequences: ``weight_mean`` (before normalizing; what ``normalize`` divides
      by), ``weight_max``, ``changed_fraction`` (ratios truncated or zeroed), ``effective_sample_size`` of the weights
      as a share in 0 .. 1, ``nonfinite_count``.

    Raises:
      ValueError: an unknown level or mode, or a threshold that does not fit the mode.
    """
    _check_choice("level", level, Level)
    _check_choice("mode", mode, Mode)
    lowest, highest = _bounds(mode == "band", threshold)
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    sequences = read_sequences(tokens, sequence_ids, num_sequences)
    xp = tokens.xp
    log_ratio, counted = _log_ratios(tokens, sequences, level)
    ratio = xp.exp(xp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND))
    inside = (ratio >= lowest) & (ratio <= highest)
    weight = xp.minimum(ratio, highest) if mode == "truncate" else xp.where(inside, ratio, 0)
    weight = xp.where(counted, weight, 0)
    mean, stats = _summary(xp, weight, counted, inside)
    if normalize:
        weight = weight / xp.where(mean > 0, mean, 1)
    if level != "token":
        weight = xp.where(tokens.valid, spread(sequences, weight), 0)
    return weight, _scalars(xp, stats | {"nonfinite_count": count(xp, tokens.nonfinite)})


def rejection_mask(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    statistic: Rejection,
    threshold: float | tuple[float, float],
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Response mask without the sequences whose mismatch is too large; the caller's denominator shrinks with it.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float.
      statistic: "k3" keeps a sequence whose mean over tokens of exp(lr) - lr - 1 is at most ``threshold``; "geometric"
        keeps one with lo <= exp(mean lr) <= hi; "veto" keeps one without a token whose ratio is below ``threshold``.
      threshold: a number > 0, or (lo, hi) for "geometric". Bounds are included.
      sequence_ids: see ``mismatch_statistics``.
      num_sequences: see ``mismatch_statistics``.

    Returns:
      (mask, stats): the mask [b, t] in the dtype of ``response_mask``, and scalars ``rejected_sequence_fraction``,
      ``rejected_token_fraction``, ``nonfinite_count``. Tokens not finite on either side do not enter the statistic; a
      sequence that has no other tokens is rejected.

    Raises:
      ValueError: an unknown statistic, or a threshold that does not fit it.
    """
    _check_choice("statistic", statistic, Rejection)
    lowest, highest = _bounds(statistic == "geometric", threshold)
    tokens = read_tokens(trainer_logprobs, rollout_logprobs, response_mask)
    sequences = read_sequences(tokens, sequence_ids, num_sequences)
    xp, lr = tokens.xp, tokens.log_ratio
    if statistic == "k3":
        keep = _sequence_mean(sequences, exp_minus_one_minus_x(xp, lr)) <= highest
    elif statistic == "geometric":
        log_mean = _sequence_mean(sequences, lr)
        ratio = xp.exp(xp.clip(log_mean, -RATIO_BOUND, RATIO_BOUND))
        keep = (ratio >= lowest) & (ratio <= highest)
    else:
        below = tokens.valid & (xp.exp(xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)) < highest)
        keep = _sequence_mean(sequences, below.astype(lr.dtype)) == 0
    given = xp.asarray(response_mask)
    # The valid tokens of a sequence share its verdict; those that are not finite follow them, wherever they stand.
    kept = tokens.valid & spread(sequences, keep & sequences.slot_valid)
    whole = read_sequences(tokens._replace(valid=given != 0), sequence_ids, num_sequences)
    passed = sequence_sums(whole, kept.astype(lr.dtype)[None])[0] > 0
    mask = xp.where(spread(whole, passed), given, xp.zeros_like(given))
    rejected = count(xp, sequences.slot_valid & ~keep)
    stats = {
        "rejected_sequence_fraction": rejected / xp.maximum(count(xp, sequences.slot_valid), 1),
        "rejected_token_fraction": count(xp, (given != 0) & (mask == 0)) / xp.maximum(count(xp, given != 0), 1),
        "nonfinite_count": count(xp, tokens.nonfinite),
    }
    return mask, _scalars(xp, stats)


def _log_ratios(tokens: Tokens, sequences: Sequences, level: Level) -> tuple[Any, Any]:
    """Log-ratios at a level and which of them count: [b, t] for tokens, [b, s] for sequences."""
    if level == "token":
        return tokens.log_ratio, tokens.valid
    sums = sequence_sums(sequences, tokens.log_ratio[None])
    if level == "geometric":
        sums = mean_over_tokens(sequences, sums)
    return sums[0], sequences.slot_valid


def _sequence_mean(sequences: Sequences, values: Any) -> Any:
    return mean_over_tokens(sequences, sequence_sums(sequences, values[None]))[0]


def _summary(xp: Any, weight: Any, counted: Any, inside: Any) -> tuple[Any, dict[str, Any]]:
    """The mean weight and the stats; the effective sample size is 1 / <(w / <w>)^2>, 0 when every weight is 0."""
    number = xp.maximum(count(xp, counted), 1)
    mean = value_of(total_over(xp, weight, (0, 1))) / number
    relative = weight / xp.where(mean > 0, mean, 1)
    square = value_of(total_over(xp, relative * relative, (0, 1))) / number
    return mean, {
        "weight_mean": mean,
        "weight_max": xp.max(weight, initial=0),
        "changed_fraction": count(xp, counted & ~inside) / number,
        "effective_sample_size": xp.where(square > 0, 1 / xp.where(square > 0, square, 1), 0),
    }


def _scalars(xp: Any, stats: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) for name, value in stats.items()} if xp is np else stats


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")


def _bounds(band: bool, threshold: float | tuple[float, float]) -> tuple[float, float]:
    """(lo, hi); lo is 0 for a single threshold."""
    if band:
        if not isinstance(threshold, (tuple, list)) or len(threshold) != 2:
            raise ValueError(f"a band needs threshold=(lo, hi), got {threshold!r}")
        lowest, highest = threshold
        if not 0 <= lowest <= highest:
            raise ValueError(f"a band needs 0 <= lo <= hi, got {threshold!r}")
        return lowest, highest
    if isinstance(threshold, (tuple, list)) or not threshold > 0:
        raise ValueError(f"threshold must be one number above 0, got {threshold!r}")
    return 0.0, threshold
