"""The importance ratios of a batch, and corrections of the gradient: weights (TIS, MIS, band) and rejections.

The distribution of the ratios is recorded at every step, with or without a correction.

Sources: equations 4-6 of arXiv 2602.01826 (sequence ratio; truncated, TIS; masked, MIS). The band is IcePop's. The
geometric sequence ratio is GSPO's (arXiv 2507.18071), and the gate is ``seq-mask-tis`` of NeMo-RL. Rejection by
per-token k3 is VeXact's (arXiv 2605.14220). The test of the largest k3 of a token comes from arXiv 2512.23075, and mean
exp(abs(lr)) from NeMo-RL and tunix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from rljax.mismatch.accurate import RATIO_BOUND, total_over
from rljax.mismatch.arrays import ArrayLike, count, scalars
from rljax.mismatch.statistics import Statistics
from rljax.mismatch.tokens import Tokens, read_tokens

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "band", "gate"]
BANDS = ("band", "gate")
"""The modes whose threshold has a lower and an upper bound."""
Rejection = Literal["k3", "max_k3", "abs_ratio", "geometric", "veto"]


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
    """Computes the importance weights that multiply each token's loss.

    With lr = trainer_logprobs - rollout_logprobs, the ratio rho is exp(lr) of a token, or exp(sum lr) or exp(mean lr)
    of its sequence. The exponent is clipped at +-20.

    Args:
      trainer_logprobs: The trainer's log-probability of each token, [b, t] float, nats.
      rollout_logprobs: The inference engine's log-probability of each token, [b, t] float, nats.
      response_mask: The response mask, [b, t] bool, int or float.
      level: The level of the ratio: "token" (rho_t), "sequence" (product over the sequence) or "geometric" (the n-th
        root of that product).
      mode: The rule for large ratios: "truncate" (TIS, min(rho, C)), "mask" (MIS, rho where rho <= C, else 0), "band"
        (rho where lo <= rho <= hi, else 0) or "gate" (the token's own ratio where lo <= rho <= hi, else 0; not at level
        "token"). All but "truncate" keep the caller's denominator (equation 6).
      threshold: The bound C > 0, or (lo, hi) with 0 <= lo <= hi for "band" and "gate".
      normalize: Whether to divide by the mean weight unless it is 0. It is the mean over valid tokens (level "token" or
        mode "gate") or over sequences.
      sequence_ids: The index of each token's sequence, [b, t] int, or None if each row is one sequence.
      num_sequences: The number of sequences, a static int. It is required exactly with ``sequence_ids``.

    Returns:
      The weights, [b, t] float (float64 on the host, float32 on the device), without gradient. They are 0 outside the
      mask and at tokens that are not finite on at least one side. A sequence's weight is repeated over its tokens.
      The second value has scalars over tokens (level "token" or mode "gate") or sequences: ``weight_mean`` (before
      normalizing), ``weight_max``, ``changed_fraction`` (the share of ratios truncated or set to 0),
      ``effective_sample_size`` (of the weights, a share in 0 .. 1) and ``nonfinite_count``.

    Raises:
      ValueError: The threshold is out of range, the level or the mode is unknown, or the arrays do not fit each other.
    """
    tokens = read_tokens(
        trainer_logprobs, rollout_logprobs, response_mask, sequence_ids=sequence_ids, num_sequences=num_sequences
    )
    weights, _, statistics = correct_tokens(tokens, (level, mode, threshold))
    names = ("weight_mean", "weight_max", "changed_fraction", "effective_sample_size", "nonfinite_count")
    stats = {name: value for name, value in finalize_correction(statistics).items() if name in names}
    if normalize:
        weights = weights / tokens.xp.where(stats["weight_mean"] > 0, stats["weight_mean"], 1)
    return weights, stats


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
    """Removes the sequences whose mismatch is too large from the response mask.

    So the caller's denominator shrinks. Tokens that are not finite on at least one side do not enter the statistic. A
    sequence without other tokens is rejected. ``importance_weights`` describes lr and the arrays.

    Args:
      statistic: The test of a sequence. "k3" keeps it if the mean over tokens of exp(lr) - lr - 1 is at most
        ``threshold``. "max_k3" keeps it if no token has exp(lr) - lr - 1 above ``threshold``. "abs_ratio" keeps it if
        the mean over tokens of exp(abs(lr)) is at most ``threshold``. "geometric" keeps it if lo <= exp(mean lr) <= hi.
        "veto" keeps it if no token's ratio is below ``threshold``.
      threshold: A number above 0; or (lo, hi) with 0 <= lo <= hi for "geometric", bounds included.

    Returns:
      The mask, [b, t] in the dtype of ``response_mask``, and the scalars ``rejected_sequence_fraction``,
      ``rejected_token_fraction`` and ``nonfinite_count``.

    Raises:
      ValueError: The threshold is out of range, the statistic is unknown, or the arrays do not fit each other.
    """
    tokens = read_tokens(
        trainer_logprobs, rollout_logprobs, response_mask, sequence_ids=sequence_ids, num_sequences=num_sequences
    )
    _, kept, statistics = correct_tokens(tokens, rejections=[(statistic, threshold)])
    names = ("rejected_sequence_fraction", "rejected_token_fraction", "nonfinite_count")
    stats = {name: value for name, value in finalize_correction(statistics).items() if name in names}
    mask = tokens.xp.asarray(response_mask)
    return tokens.xp.where(kept, mask, tokens.xp.zeros_like(mask)), stats


def correct_tokens(
    tokens: Tokens,
    weighting: tuple[Level, Mode, float | tuple[float, float]] | None = None,
    rejections: Sequence[tuple[Rejection, float | tuple[float, float]]] = (),
) -> tuple[Any, Any, Statistics]:
    """Computes weights and rejections of a batch or micro-batch, without gradient.

    ``weighting`` is the level, mode and threshold of ``importance_weights``; without it every token of the mask weighs
    1. ``rejections`` has the statistic and threshold of each ``rejection_mask``. A sequence must pass all of them.
    Returns the weights, [b, t] float, not normalised; the mask without the rejected sequences, [b, t] bool; and the
    statistics, whose weights include the rejected sequences.
    """
    xp, valid = tokens.xp, tokens.valid
    if weighting is None:
        weights, each = (flags.astype(tokens.log_ratio.dtype) for flags in (tokens.mask, valid))
        counted, changed = valid, xp.zeros_like(valid)
    else:
        weights, each, counted, changed = _weigh(tokens, *weighting)
    present = passed = tokens.mask_sequences.present
    for statistic, threshold in rejections:
        passed = passed & _reject(tokens, statistic, threshold)
    kept = tokens.mask & tokens.mask_sequences.spread(passed) if rejections else tokens.mask
    weighs = tokens.mask_sequences.sums((weights > 0).astype(weights.dtype)) > 0
    flags = {"weight_count": counted, "changed_count": changed, "nonfinite_count": tokens.nonfinite}
    flags |= {"dropped_sequence_count": tokens.mask_sequences.present & ~weighs}
    flags |= {"sequence_count": present, "rejected_sequence_count": present & ~passed}
    flags |= {"token_count": tokens.mask, "rejected_token_count": tokens.mask & ~kept}
    statistics = Statistics(
        sums={name: count(xp, flag) for name, flag in flags.items()} | {"weight_squared": xp.sum(each * each)},
        maxima={"weight_max": xp.max(each, initial=0)},
        totals={"weight": total_over(xp, each, (0, 1))},
    )
    return weights, kept, statistics


def ratio_weight(xp: Any, log_ratio: Any, mode: Mode, threshold: float | tuple[float, float]) -> tuple[Any, Any]:
    """Returns the weight of each log-ratio under ``importance_weights``, and whether its ratio is within the bounds."""
    lowest, highest = _bounds(mode in BANDS, threshold)
    ratio = xp.exp(xp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND))
    inside = (ratio >= lowest) & (ratio <= highest)
    return (xp.minimum(ratio, highest) if mode == "truncate" else xp.where(inside, ratio, 0)), inside


def finalize_correction(statistics: Statistics) -> dict[str, Any]:
    """Computes the scalars of a batch; all of them are 0 without tokens.

    They are ``weight_mean`` (before normalising), ``weight_max``, ``changed_fraction`` and ``effective_sample_size``
    (<w>^2 / <w^2>), over tokens or, if sequences are weighted, over sequences; ``dropped_sequence_fraction``, the share
    of sequences whose tokens all weigh 0; ``rejected_sequence_fraction`` and ``rejected_token_fraction``, as shares of
    the mask; and ``nonfinite_count``.
    """
    xp = statistics.xp
    mean, square = statistics.mean("weight", "weight_count"), statistics.mean("weight_squared", "weight_count")
    metrics = {
        "weight_mean": mean,
        "weight_max": statistics.extreme("weight_max", "weight_count"),
        "changed_fraction": statistics.mean("changed_count", "weight_count"),
        "effective_sample_size": xp.where(square > 0, mean * mean / xp.where(square > 0, square, 1), 0),
        "dropped_sequence_fraction": statistics.mean("dropped_sequence_count", "sequence_count"),
        "rejected_sequence_fraction": statistics.mean("rejected_sequence_count", "sequence_count"),
        "rejected_token_fraction": statistics.mean("rejected_token_count"),
        "nonfinite_count": statistics["nonfinite_count"],
    }
    return scalars(xp, metrics)


def _weigh(
    tokens: Tokens, level: Level, mode: Mode, threshold: float | tuple[float, float]
) -> tuple[Any, Any, Any, Any]:
    """Computes the weights of the tokens, [b, t], and three arrays of the level, [b, t] or [b, s].

    These are its weights, the marks of the weights that count, and the marks of the weights that were changed.
    """
    _check_choice("level", level, Level)
    _check_choice("mode", mode, Mode)
    if mode == "gate" and level == "token":
        raise ValueError("mode 'gate' needs the ratio of a sequence: level must be sequence or geometric, got token")
    xp, sequences = tokens.xp, tokens.sequences
    log_ratio, counted = tokens.log_ratio, tokens.valid
    if level != "token":
        sums, counted = sequences.sums(log_ratio), sequences.present
        log_ratio = sequences.per_token(sums) if level == "geometric" else sums
    weight, inside = ratio_weight(xp, log_ratio, mode, threshold)
    if mode == "gate":
        passed = tokens.valid & sequences.spread(counted & inside)
        own = xp.exp(xp.clip(tokens.log_ratio, -RATIO_BOUND, RATIO_BOUND))
        weights = xp.where(passed, own, 0)
        return weights, weights, tokens.valid, tokens.valid & ~passed
    weight = xp.where(counted, weight, 0)
    weights = weight if level == "token" else xp.where(tokens.valid, sequences.spread(weight), 0)
    return weights, weight, counted, counted & ~inside


def _reject(tokens: Tokens, statistic: Rejection, threshold: float | tuple[float, float]) -> Any:
    """Marks the sequences that pass, [b, s] bool, as ``mask_sequences`` numbers them."""
    _check_choice("statistic", statistic, Rejection)
    lowest, highest = _bounds(statistic == "geometric", threshold)
    xp, lr, sequences = tokens.xp, tokens.log_ratio, tokens.sequences
    if statistic == "k3":
        keep = sequences.means(tokens.k3) <= highest
    elif statistic == "max_k3":
        above = tokens.valid & (tokens.k3 > highest)
        keep = sequences.means(above.astype(lr.dtype)) == 0
    elif statistic == "abs_ratio":
        ratio = xp.exp(xp.minimum(xp.abs(lr), RATIO_BOUND))
        keep = sequences.means(xp.where(tokens.valid, ratio, 0)) <= highest
    elif statistic == "geometric":
        ratio = xp.exp(xp.clip(sequences.means(lr), -RATIO_BOUND, RATIO_BOUND))
        keep = (ratio >= lowest) & (ratio <= highest)
    else:
        below = tokens.valid & (lr < math.log(highest))
        keep = sequences.means(below.astype(lr.dtype)) == 0
    # A sequence passes as a whole: its nonfinite tokens follow the verdict of its valid tokens.
    kept = tokens.valid & sequences.spread(keep & sequences.present)
    return tokens.mask_sequences.sums(kept.astype(lr.dtype)) > 0


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")


def _bounds(band: bool, threshold: float | tuple[float, float]) -> tuple[float, float]:
    """Returns (lo, hi). lo is 0 for a single threshold."""
    two = isinstance(threshold, (tuple, list)) and len(threshold) == 2
    bounds: Any = threshold if two else (0.0, threshold)
    lowest, highest = bounds
    if band and not (two and 0 <= lowest <= highest):
        raise ValueError(f"a band needs threshold=(lo, hi) with 0 <= lo <= hi, got {threshold!r}")
    if not band and (isinstance(threshold, (tuple, list)) or not threshold > 0):
        raise ValueError(f"threshold must be one number above 0, got {threshold!r}")
    return bounds


LEVELS = ("token", "sequence", "geometric")
"""The levels in the order of the arrays of ``importance_statistics``."""


def importance_statistics(tokens: Tokens, threshold: float = 2.0) -> Statistics:
    """Computes statistics of the uncorrected ratios at the three levels, arrays [3]. Exponents are clipped at +-20.

    Ratios above the threshold C and below 1 / C are counted. Raises ValueError if C is below 1.
    """
    if not threshold >= 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}")
    xp, present = tokens.xp, tokens.sequences.present
    sums = tokens.sequences.sums(tokens.log_ratio)
    levels = ((tokens.log_ratio, tokens.valid), (sums, present), (tokens.sequences.per_token(sums), present))
    each = [_level(xp, log_ratio, counted, threshold) for log_ratio, counted in levels]
    return jax.tree.map(lambda *numbers: xp.stack(numbers), *each)


def _level(xp: Any, log_ratio: Any, counted: Any, threshold: float) -> Statistics:
    log_ratio = xp.where(counted, xp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND), 0)
    ratio = xp.where(counted, xp.exp(log_ratio), 0)
    return Statistics(
        sums={
            "number": count(xp, counted),
            "above": count(xp, counted & (ratio > threshold)),
            "below": count(xp, counted & (ratio < 1 / threshold)),
            "ratio_minus_one": xp.sum(xp.expm1(log_ratio)),
            "ratio_squared_minus_one": xp.sum(xp.expm1(2 * log_ratio)),
            "ratio": xp.sum(ratio),
            "ratio_squared": xp.sum(ratio * ratio),
        },
        maxima={"largest": xp.max(ratio, initial=0)},
        minima={"smallest": xp.min(xp.where(counted, ratio, np.inf), initial=np.inf)},
    )


def finalize_importance(statistics: Statistics) -> dict[str, Any]:
    """Computes the ``is/<name>`` metrics: Python floats for numpy leaves, jax scalars for jax leaves.

    The metrics of each level L (token, sequence, geometric) are ``L_ratio_mean``, ``L_ratio_max``, ``L_ratio_min``,
    ``L_fraction_above`` (ratio > C) and ``L_fraction_below`` (ratio < 1 / C). ``L_effective_sample_size`` is <w>^2 /
    <w^2>, a share in 0 .. 1. All are 0 without a valid token. C is the threshold of ``importance_statistics``.
    """
    xp, counted = statistics.xp, statistics["number"] > 0

    def mean_of(name: str) -> Any:
        minus_one = statistics.mean(f"{name}_minus_one", "number")
        # The sum 1 + mean(rho - 1) is the more exact one near 1, but it loses the digits of tiny ratios.
        return xp.where(minus_one < -0.5, statistics.mean(name, "number"), 1 + minus_one)

    mean, square = mean_of("ratio"), mean_of("ratio_squared")
    columns = {
        "ratio_mean": xp.where(counted, mean, 0),
        "ratio_max": statistics.extreme("largest", "number"),
        "ratio_min": statistics.extreme("smallest", "number"),
        "fraction_above": statistics.mean("above", "number"),
        "fraction_below": statistics.mean("below", "number"),
        "effective_sample_size": xp.where(counted, xp.minimum(mean * mean / square, 1), 0),
    }
    each = {f"{level}_{name}": column[i] for name, column in columns.items() for i, level in enumerate(LEVELS)}
    return scalars(xp, each)
