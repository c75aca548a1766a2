"""The limits of the field for mismatch metrics, each with its source, and the steps of a log that are beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rljax.mismatch.names import PUBLISHED_BARS


class Threshold(NamedTuple):
    """A limit of one signal."""

    signal: str  # the name of the signal, as in ``signals.MISMATCH``
    limit: float
    source: str  # a paper with its section, a project's rule, or "rljax" for our own limit
    meaning: str  # the meaning of a larger number, in one clause


THRESHOLDS = (
    Threshold(
        "k3_kl",
        1e-3,
        "VeXact, arXiv 2605.14220: its baseline until step 250, and its bound for the rejection of a response",
        "more than an engine in 16 bits gives",
    ),
    Threshold(
        "k3_kl",
        PUBLISHED_BARS["prime_rl", "mismatch_kl/mean"],
        "prime-rl's rule for merging: below it at each of 20 steps",
        "a change of prime-rl would not be merged",
    ),
    Threshold(
        "logprob_abs_diff_mean",
        PUBLISHED_BARS["nemo_rl", "token_mult_prob_error"] - 1.0,
        "NeMo-RL: it writes a dump above token_mult_prob_error 1.05, which is 1 + this to first order",
        "NeMo-RL would write the tokens",
    ),
    Threshold(
        "token_mult_prob_error",
        PUBLISHED_BARS["nemo_rl", "token_mult_prob_error"],
        "NeMo-RL: its functional tests and its dumps",
        "NeMo-RL would write the tokens",
    ),
    Threshold(
        "logprob_abs_diff_mean",
        PUBLISHED_BARS["slime", "train/train_rollout_logprob_abs_diff"],
        "slime's continuous integration",
        "slime's test would fail",
    ),
    Threshold(
        "log_ppl_abs_diff",
        0.07,
        "field reports of the quantity that arXiv 2602.01826 plots: healthy near 3e-3, 0.07 to 0.4 in a collapse",
        "the size that is seen in collapses",
    ),
    Threshold(
        "prob_abs_diff_mean",
        5e-3,
        "FP16 paper, arXiv 2510.26788: 4e-3 to 5e-3 in bfloat16, 5e-4 in float16",
        "more than bfloat16 gives there",
    ),
    Threshold(
        "extreme_rate",
        0.01,
        "rljax's default: rljax docs studies has 0.4% to 2% of tokens beyond a factor of 2 where runs fail",
        "single tokens weigh in each update",
    ),
    Threshold(
        "nonfinite_count",
        0.0,
        "rljax's default: no log-probability may be missing or infinite",
        "numbers are missing on one side",
    ),
)


@dataclass(frozen=True)
class Crossing:
    """One threshold, applied to a log or to a dump."""

    threshold: Threshold
    value: float  # the last value of a log (the median of its last steps), or the value of a dump
    steps: int  # the number of steps beyond the limit; a dump counts as one step
    measured: int  # the number of steps with a value
    first: int | None  # the first step beyond the limit

    @property
    def is_crossed(self) -> bool:
        """Whether the last value, or at least a tenth of the steps, is beyond the limit."""
        return self.value > self.threshold.limit or self.steps * 10 >= max(self.measured, 1)


def cross(signals: Mapping[str, np.ndarray], steps: np.ndarray) -> list[Crossing]:
    """Applies every threshold whose signal is there.

    The signals are float64 [n] each, NaN where there is no number, and the steps int64 [n].
    """
    found = []
    for threshold in THRESHOLDS:
        values = signals.get(threshold.signal)
        if values is None or not np.isfinite(values).any():
            continue
        known = np.isfinite(values)
        beyond = known & (values > threshold.limit)
        last = values[known][-max(1, min(5, known.sum() // 4 + 1)) :]
        first = int(steps[beyond.argmax()]) if beyond.any() else None
        found.append(Crossing(threshold, float(np.median(last)), int(beyond.sum()), int(known.sum()), first))
    return found
