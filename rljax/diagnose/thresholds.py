"""The limits of the field for mismatch metrics, each with its source, and the steps of a log that are beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rljax.diagnose.tables import TABLES


class Threshold(NamedTuple):
    """A limit of one signal."""

    signal: str  # the name of the signal, as in ``signals.MISMATCH``
    limit: float
    source: str  # a paper with its section, a project's rule, or "rljax" for our own limit
    meaning: str  # the meaning of a larger number, in one clause


THRESHOLDS = tuple(Threshold(*limit) for limit in TABLES["limits"])


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
