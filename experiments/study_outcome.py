"""Computes the outcome of a run: the numbers that a study compares between its arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljax.record.rows import Row, summarize

LEARNED = 0.3  # a run has learned if its peak is at least this
SMOOTH_STEPS = 10  # the steps of the trailing means that decide whether a run collapsed
COLLAPSE_SHARE = 0.5  # a run has collapsed when its accuracy falls under this share of its peak and stays there

OUTCOME_METRICS = {
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "k3_kl": "mismatch/k3_kl",
    "grad_norm": "optimizer/grad_norm",
    "response_length": "response_length/mean",
}
"""The metrics of an outcome, by name."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. Steps are 1-based; accuracy is a trailing 10-step mean of the rollouts' mean reward.

    Attributes:
      steps: The number of steps of the run.
      peak: The highest accuracy.
      peak_step: The step of the highest accuracy.
      final: The accuracy at the end.
      fall_step: The first step from which accuracy stays under half of the peak before it; None without such a fall.
      collapse_step: The step of that fall, if the peak is at least ``LEARNED``; None without a collapse.
      surge_step: The step at which the tracker called the surge; None without a call.
      lead: The number of steps from surge to fall; None without either.
      evaluation_peak: The highest accuracy on an evaluation dataset; None without evaluations.
      evaluation_final: The last accuracy on an evaluation dataset; None without evaluations.
      at_peak: The trailing means of ``OUTCOME_METRICS`` at the peak.
      at_end: The trailing means of ``OUTCOME_METRICS`` at the fall, or at the end without one.
      above_share: The mean over the steps of the share of tokens with a ratio above ``diagnosis.is_threshold``.
      above_share_largest: The largest such share of a step.
      final_rate: The learning rate of the last update.
      skipped_updates: The number of updates that were not applied.
      wall_seconds: The sum of all steps' seconds.
    """

    steps: int
    peak: float
    peak_step: int
    final: float
    fall_step: int | None
    collapse_step: int | None
    surge_step: int | None
    lead: int | None
    evaluation_peak: float | None
    evaluation_final: float | None
    at_peak: dict[str, float]
    at_end: dict[str, float]
    above_share: float
    above_share_largest: float
    final_rate: float
    skipped_updates: int
    wall_seconds: float


def trailing_mean(values: Sequence[float | None]) -> np.ndarray:
    """Computes trailing means over ``SMOOTH_STEPS`` values, float64 [n]; missing and non-finite values count as 0."""
    series = np.asarray([value if value is not None and np.isfinite(value) else 0.0 for value in values], np.float64)
    return np.array([series[max(stop - SMOOTH_STEPS, 0) : stop].mean() for stop in range(1, len(series) + 1)])


def collapse_step(accuracy: np.ndarray) -> int | None:
    """Returns the first 1-based step from which every accuracy stays under half of the highest before it, or None."""
    under = accuracy < COLLAPSE_SHARE * np.maximum.accumulate(accuracy)
    stays = np.logical_and.accumulate(under[::-1])[::-1]
    return int(np.argmax(stays)) + 1 if stays.any() else None


def late_collapse_step(accuracy: np.ndarray) -> int | None:
    """Returns the step of the fall to under half of the peak, for a peak of at least ``LEARNED``; None without one."""
    return collapse_step(accuracy) if len(accuracy) and accuracy.max() >= LEARNED else None


def outcome_of(rows: Sequence[Row]) -> Outcome:
    """Computes the outcome of a run. Raises ValueError if there are no rows."""
    summary = summarize(rows)
    accuracy = trailing_mean([row["reward/mean"] for row in rows])
    peak = int(np.argmax(accuracy))
    fall, surge = collapse_step(accuracy), summary["surge_step"]
    evaluations = list(summary["evaluations"].values())
    above = [row.get("is/token_fraction_above") or 0.0 for row in rows]
    return Outcome(
        steps=summary["steps"],
        peak=float(accuracy[peak]),
        peak_step=peak + 1,
        final=float(accuracy[-1]),
        fall_step=fall,
        collapse_step=late_collapse_step(accuracy),
        surge_step=surge,
        lead=None if fall is None or surge is None else fall - surge,
        evaluation_peak=max((evaluation["best"] for evaluation in evaluations), default=None),
        evaluation_final=evaluations[-1]["last"] if evaluations else None,
        at_peak=_trailing_metrics(rows[: peak + 1]),
        at_end=_trailing_metrics(rows[:fall]),
        above_share=float(np.mean(above)),
        above_share_largest=max(above),
        final_rate=summary["learning_rate_final"],
        skipped_updates=summary["skipped_updates"],
        wall_seconds=summary["wall_seconds"],
    )


def _trailing_metrics(rows: Sequence[Row]) -> dict[str, float]:
    return {name: float(trailing_mean([row.get(key) for row in rows])[-1]) for name, key in OUTCOME_METRICS.items()}
