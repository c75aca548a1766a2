"""What became of a run, in the numbers that a study compares between its arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljax.record.rows import Row
from rljax.record.summary import collapse_step, summarize, trailing_mean

OUTCOME_METRICS = {
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff",
    "k3_kl": "mismatch/k3_kl",
    "grad_norm": "optimizer/grad_norm",
    "response_length": "response_length/mean",
}
"""Name in an outcome -> metric."""


@dataclass(frozen=True)
class Outcome:
    """What a study compares. Steps are 1-based; accuracy is the mean reward of the rollouts, a trailing 10-step mean.

    Attributes:
      steps: of the run.
      peak: highest accuracy.
      peak_step: where.
      final: accuracy at the end.
      collapse_step: first step from which accuracy stays under half the peak before it; None: it did not collapse.
      surge_step: where the tracker called the surge; None: it did not, or there was none.
      lead: collapse_step - surge_step; None without either.
      evaluation_peak: highest accuracy on an evaluation dataset; None without evaluations.
      evaluation_final: the last one.
      at_peak: trailing means of ``OUTCOME_METRICS`` at the peak.
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
    """The outcome of a run. Raises ValueError when there are no rows."""
    summary = summarize(rows)
    accuracy = trailing_mean([row["reward/mean"] for row in rows])
    peak = int(np.argmax(accuracy))
    collapse, surge = collapse_step(accuracy), summary["surge_step"]
    evaluations = list(summary["evaluations"].values())
    above = [row.get("is/token_fraction_above") or 0.0 for row in rows]
    return Outcome(
        steps=summary["steps"],
        peak=float(accuracy[peak]),
        peak_step=peak + 1,
        final=float(accuracy[-1]),
        collapse_step=collapse,
        surge_step=surge,
        lead=None if collapse is None or surge is None else collapse - surge,
        evaluation_peak=max((found["best"] for found in evaluations), default=None),
        evaluation_final=evaluations[-1]["last"] if evaluations else None,
        at_peak=_trailing_metrics(rows[: peak + 1]),
        at_end=_trailing_metrics(rows[:collapse]),
        above_share=float(np.mean(above)),
        above_share_largest=max(above),
        final_rate=summary["learning_rate_final"],
        skipped_updates=summary["skipped_updates"],
        wall_seconds=summary["wall_seconds"],
    )


def _trailing_metrics(rows: Sequence[Row]) -> dict[str, float]:
    return {name: float(trailing_mean([row.get(key) for row in rows])[-1]) for name, key in OUTCOME_METRICS.items()}
