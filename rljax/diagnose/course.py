"""Reads a log's facts over its steps: the size of the mismatch, its growth, and the order in which signals fail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rljax.diagnose.signals import Log

FEWEST_STEPS = 8
"""A log with fewer steps says nothing of growth or collapse."""
_COLLAPSED = 0.5  # a reward has collapsed if it falls under this share of its peak and stays there
_NEAR_PEAK = 0.9  # the decline begins at the last step at which the reward is above this share of its peak
_GROWN = 2.0  # a signal has grown from the first step on after which it stays above this multiple of its reference
_MOST = 0.75  # the least share of a signal's numbers since its growth that have grown themselves
_FEWEST_TOKENS = 50  # the fewest tokens of a bucket that counts, over the whole log


@dataclass(frozen=True)
class Onset:
    """The step from which one signal has grown, and its distance to the decline of the reward."""

    step: int | None  # the first step from which it stays above twice its early median; None: it does not grow
    lead: int | None  # the steps from ``step`` to the decline, negative if ``step`` is later; None: one is missing


@dataclass(frozen=True)
class Course:
    """The facts of a log. A number that the log does not give is NaN."""

    log: Log  # the log itself
    steps: int  # the number of steps
    starts_at: int  # the first step
    first: Mapping[str, float]  # the median of each signal over the first steps
    last: Mapping[str, float]  # the median of each signal over the last steps
    largest: Mapping[str, float]  # the largest value of each signal
    effect_first: float  # the error of the logits in the first steps, from the function ``effect``
    effect_last: float  # the error of the logits in the last steps
    effect_start: float  # the error of the logits at the very first step with a number
    gap_name: str  # the signal that stands for the size of the mismatch; empty if there is none
    start: float  # the first number of this signal
    noise: float  # the median absolute change of the logarithm of the mismatch from one step to the next
    early_growth: float  # the largest smoothed mismatch of the first quarter of the steps over the first number
    peak: float  # the highest smoothed reward
    decline: int | None  # the step at which the reward begins to fall for good; None: it does not collapse
    onsets: Mapping[str, Onset]  # the onsets of gap, grad_norm, entropy (its fall) and length
    # The error of the logits by bucket, over the whole log: group -> label -> effect.
    effects: Mapping[str, Mapping[str, float]]
    staleness_gaps: Mapping[str, float]  # the mean abs(lr) of tokens, by their staleness

    def counts(self, group: str) -> dict[str, tuple[float, float]]:
        """Returns the numbers of tokens and extreme tokens over all steps, of each bucket of a group that has both."""
        return {
            label: (float(np.nansum(each["token_count"])), float(np.nansum(each["token_count"] * each["extreme_rate"])))
            for label, each in self.log.buckets.get(group, {}).items()
            if {"token_count", "extreme_rate"} <= set(each)
        }

    @property
    def is_stale(self) -> bool:
        """Whether some rollouts were sampled with older weights; False if the log does not say."""
        return self.largest.get("staleness", 0.0) > 0

    @property
    def k3_of_most(self) -> float:
        """The most that the 99% of tokens with the smallest abs(log-ratio) add to k3_kl in the first steps, or NaN."""
        return self.first.get("logprob_abs_diff_p99", math.nan) ** 2 / 2  # exp(lr) - lr - 1 is about lr ** 2 / 2

    @property
    def is_of_few(self) -> bool:
        """Whether one token in a hundred carries at least three quarters of k3_kl in the first steps."""
        return self.first.get("k3_kl", math.nan) > 4 * self.k3_of_most


def effect(k3: float, gap: float) -> float:
    """Returns the error of the logits that causes a mismatch, in units that do not depend on the entropy.

    ``k3`` is the mean of exp(lr) - lr - 1 over log-ratios lr, and ``gap`` the mean of abs(lr). Both grow with the share
    of uncertain tokens, but their ratio, the result, does not. It is about 0.3 times the standard deviation of the
    error of a logit difference (nats). It is 0 if ``gap`` is 0, and NaN if ``gap`` is NaN.
    """
    return k3 / gap if gap > 0 else (0.0 if gap == 0 else math.nan)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the finite numbers in a window of ``width`` around each step, float64 [n]."""
    known, part = np.isfinite(values), slice(width // 2, width // 2 + len(values))
    parts = (np.where(known, values, 0.0), known.astype(float))
    sums, counts = (np.convolve(each, np.ones(width))[part] for each in parts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def read_course(log: Log) -> Course:
    """Computes the facts of a log from its signals and buckets."""
    width = window(len(log.steps))
    gap_name = next((name for name in GAPS if log.has(name)), "")
    gap, k3 = np.abs(log.get(gap_name)), log.get("k3_kl")  # the mean of lr has a sign
    effects = np.array([effect(a, b) for a, b in zip(k3, log.get("logprob_abs_diff_mean"), strict=True)])
    reward = smooth(log.get("reward"), width)
    decline = find_decline(reward)
    certainty = 1.0 / np.where(log.get("entropy") > 0, log.get("entropy"), np.nan)
    grown = {"grad_norm": log.get("grad_norm"), "entropy": certainty, "length": log.get("length")}
    onsets = {name: _onset(values, width, log.steps, decline) for name, values in grown.items()}
    found = (_onset(values, width, log.steps, decline) for values in (gap, np.abs(k3)))
    onsets["gap"] = min(found, key=lambda onset: math.inf if onset.step is None else onset.step)
    finite = effects[np.isfinite(effects)]
    names = [name for name in log.signals if log.has(name)]
    buckets = {group: _bucket_means(labels) for group, labels in log.buckets.items()}
    return Course(
        log=log,
        steps=len(log.steps),
        starts_at=int(log.steps[0]),
        first={name: _end(log.get(name), width) for name in names},
        last={name: _end(log.get(name)[::-1], width) for name in names},
        largest={name: float(np.nanmax(log.get(name))) for name in names},
        effect_first=_end(effects, width),
        effect_last=_end(effects[::-1], width),
        effect_start=float(finite[0]) if len(finite) else math.nan,
        gap_name=gap_name,
        start=next(iter(gap[np.isfinite(gap)]), math.nan),
        noise=_noise(effects if len(finite) else gap),
        early_growth=_early_growth(effects if len(finite) else gap, width),
        peak=float(np.nanmax(reward)) if np.isfinite(reward).any() else math.nan,
        decline=None if decline is None else int(log.steps[decline]),
        onsets=onsets,
        effects={group: {label: effect(k3, gap) for label, k3, gap in means} for group, means in buckets.items()},
        staleness_gaps={label: gap for label, _, gap in buckets.get("mismatch_staleness", ())},
    )


GAPS = ("logprob_abs_diff_mean", "log_ppl_abs_diff", "k3_kl", "prob_abs_diff_mean", "kl")
"""The signals that may stand for the size of the mismatch, the best first."""


def window(count: int) -> int:
    """Returns the width, an odd number of steps, of the window that smooths a log of ``count`` steps."""
    return max(3, count // 20) | 1


def _early_growth(values: np.ndarray, width: int) -> float:
    """Returns the largest smoothed number of the first quarter, divided by the very first number; NaN if unknown."""
    finite = values[np.isfinite(values)]
    if len(finite) < FEWEST_STEPS or finite[0] <= 0:
        return math.nan
    return float(np.max(smooth(finite, width)[: max(width, len(finite) // 4)]) / finite[0])


def _noise(values: np.ndarray) -> float:
    finite = values[np.isfinite(values) & (values > 0)]
    return float(np.median(np.abs(np.diff(np.log(finite))))) if len(finite) > 1 else math.nan


def _end(values: np.ndarray, width: int) -> float:
    """Returns the median of the first tenth of the finite numbers, but of at least ``width`` numbers."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite[: max(width, len(finite) // 10)])) if len(finite) else math.nan


def find_decline(reward: np.ndarray) -> int | None:
    """Returns the index at which a smoothed reward begins to fall for good; None if it does not collapse.

    It collapses if the last steps are all below half of the peak: a tenth of the steps from the peak on, at least two.
    Heights are measured from 0, or from the lowest reward if that is negative. A height of at most four times the noise
    from step to step is not a peak.
    """
    known = np.flatnonzero(np.isfinite(reward))
    if len(known) < FEWEST_STEPS:
        return None
    height = reward[known] - min(0.0, float(np.min(reward[known])))
    peak, at = float(np.max(height)), int(np.argmax(height))
    tail = max(2, len(height[at:]) // 10)
    noise = float(np.median(np.abs(np.diff(height))))
    if peak <= 4 * noise or len(height[at:]) <= tail or (height[-tail:] >= _COLLAPSED * peak).any():
        return None
    return int(known[np.flatnonzero(height >= _NEAR_PEAK * peak)[-1]])


def _onset(raw: np.ndarray, width: int, steps: np.ndarray, decline: int | None) -> Onset:
    """Returns the step from which a smoothed signal stays above twice its reference, and its lead over the decline.

    The reference is the median of the first quarter of the steps before the decline. Steps long after the decline do
    not count, because a policy that has failed gives other numbers. Neither spikes that lift a mean nor noise are
    growth: three quarters of the single numbers are above twice the reference and nine tenths of the first numbers.
    """
    values = smooth(raw, width)
    if np.isfinite(values).sum() < FEWEST_STEPS:
        return Onset(None, None)
    end = len(values) if decline is None else min(len(values), decline + 1 + max(3, (len(values) - decline) // 2))
    quarter = max(4, (end if decline is None else decline) // 4)
    before = values[:quarter]
    reference = float(np.nanmedian(before)) if np.isfinite(before).any() else math.nan
    grown = values[:end] > _GROWN * reference
    if not math.isfinite(reference) or reference <= 0 or not grown.any() or not grown[-1]:
        return Onset(None, None)
    last_low = np.flatnonzero(~grown)
    at = int(last_low[-1]) + 1 if len(last_low) else 0
    since = raw[at:end][np.isfinite(raw[at:end])]
    usual = max(_GROWN * reference, float(np.nanquantile(raw[:quarter], 0.9)))
    if len(since) < 3 or np.mean(since > usual) < _MOST:
        return Onset(None, None)
    return Onset(int(steps[at]), None if decline is None else int(steps[decline]) - int(steps[at]))


def _bucket_means(labels: Mapping[str, Mapping[str, np.ndarray]]) -> list[tuple[str, float, float]]:
    """Returns each bucket with enough tokens: its label, and its mean k3 and gap over the tokens of all steps."""
    found = []
    for label, each in labels.items():
        weights = np.nan_to_num(each.get("token_count", np.zeros(1)))
        if {"k3_kl", "logprob_abs_diff_mean"} <= set(each) and weights.sum() >= _FEWEST_TOKENS:
            k3, gap = ((np.nan_to_num(each[name]) * weights).sum() for name in ("k3_kl", "logprob_abs_diff_mean"))
            found.append((label, float(k3 / weights.sum()), float(gap / weights.sum())))
    return found
