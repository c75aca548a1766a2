"""What became of a run, from its rows: how high it came, whether it collapsed, and what stood beside it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljax.report.rows import Row, is_accuracy, last_value, step_seconds

SMOOTH_STEPS = 10
"""Steps of the trailing mean that accuracy, mismatch and gradient norm are read from."""
COLLAPSE_SHARE = 0.5
"""A run has collapsed when its accuracy is under this share of its peak and stays there."""

WATCHED = {
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "k3_kl": "mismatch/k3_kl",
    "grad_norm": "optimizer/grad_norm",
    "response_length": "response_length/mean",
}


@dataclass(frozen=True)
class Outcome:
    """Steps are 1-based; accuracy is the mean reward of the rollouts, a trailing mean over 10 steps.

    Attributes:
      steps: rows of the run.
      peak: highest accuracy.
      peak_step: where.
      final: accuracy at the end.
      collapse_step: first step from which accuracy stays under half the peak before it; None: it did not collapse.
      surge_step: where the tracker called the surge; None: it did not, or there was none.
      lead: collapse_step - surge_step; None without either.
      evaluation_peak: highest accuracy on the held problems; None without evaluations.
      evaluation_final: the last one.
      at_peak: trailing means of ``WATCHED`` at the peak.
      at_end: the same at the collapse, or at the end without one.
      above_share: mean over the steps of the share of tokens with a ratio above ``diagnosis.is_threshold``.
      above_share_largest: the largest of a step.
      final_rate: learning rate of the last update.
      skipped_updates: updates not applied.
      wall_seconds: of all steps.
    """

    steps: int
    peak: float
    peak_step: int
    final: float
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


def outcome_of(rows: Sequence[Row]) -> Outcome:
    """Reads an outcome from a run's rows.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("a run without rows has no outcome")
    accuracy = trailing_mean([row["reward/mean"] for row in rows])
    peak = int(np.argmax(accuracy))
    collapse = collapse_step(accuracy)
    surge = last_value(rows, "schedule/surge_step")
    held = [value for row in rows for key, value in row.items() if is_accuracy(key)]
    end = len(rows) if collapse is None else collapse
    above = [row.get("is/token_fraction_above") or 0.0 for row in rows]
    return Outcome(
        steps=len(rows),
        peak=float(accuracy[peak]),
        peak_step=peak + 1,
        final=float(accuracy[-1]),
        collapse_step=collapse,
        surge_step=surge,
        lead=None if collapse is None or surge is None else collapse - surge,
        evaluation_peak=max(held, default=None),
        evaluation_final=held[-1] if held else None,
        at_peak=_watched(rows, peak + 1),
        at_end=_watched(rows, end),
        above_share=float(np.mean(above)),
        above_share_largest=max(above),
        final_rate=float(rows[-1]["schedule/learning_rate"]),
        skipped_updates=int(rows[-1]["optimizer/skipped_updates"]),
        wall_seconds=sum(map(step_seconds, rows)),
    )


def trailing_mean(values: Sequence[float | None], window: int = SMOOTH_STEPS) -> np.ndarray:
    """Mean of each value and up to ``window`` - 1 before it, float64 [n]; a missing or infinite value counts as 0."""
    series = np.asarray([value if value is not None and np.isfinite(value) else 0.0 for value in values], np.float64)
    return np.array([series[max(stop - window, 0) : stop].mean() for stop in range(1, len(series) + 1)])


def collapse_step(accuracy: np.ndarray, share: float = COLLAPSE_SHARE) -> int | None:
    """First 1-based step from which every accuracy is under ``share`` of the highest one before it; None: none is."""
    under = accuracy < share * np.maximum.accumulate(accuracy)
    stays = np.logical_and.accumulate(under[::-1])[::-1]
    return int(np.argmax(stays)) + 1 if stays.any() else None


def _watched(rows: Sequence[Row], step: int) -> dict[str, float]:
    return {name: float(trailing_mean([row.get(key) for row in rows[:step]])[-1]) for name, key in WATCHED.items()}
