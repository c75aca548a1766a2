"""The tables of the diagnosis (``causes.json``): causes, limits of the field, remedies, and the options of projects.

A cause has its kind, its words and its remedies, the best fitting first. A limit has the fields of ``Threshold``. A
remedy has its words, and what serves any project ("" if nothing does). A project has its repository, and for each
remedy the project's option with the file there that defines it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("causes.json").read_bytes())
"""The tables ``causes``, ``limits``, ``remedies`` and ``projects``."""
CAUSES: Mapping[str, tuple[str, str]] = {name: (kind, words) for name, (kind, words, _) in TABLES["causes"].items()}
"""The kind of each cause, and the cause in words."""


class Threshold(NamedTuple):
    """A limit of one signal."""

    signal: str  # the name of the signal, as in ``signals.MISMATCH``
    limit: float
    source: str  # a paper with its section, a project's rule, or "rljax" for our own limit
    meaning: str  # the meaning of a larger number, in one clause


THRESHOLDS = tuple(Threshold(*limit) for limit in TABLES["limits"])


class Crossing(NamedTuple):
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
    """Applies every threshold to its signal if the signal has a finite number.

    The signals are float64 [n] each, NaN where there is no number, and the steps int64 [n].
    """
    found = []
    for threshold in THRESHOLDS:
        values = signals.get(threshold.signal, np.zeros(0))
        numbers, at = values[np.isfinite(values)], steps[: len(values)][np.isfinite(values)]
        if count := len(numbers):
            beyond = at[numbers > threshold.limit]
            last = float(np.median(numbers[-max(1, min(5, count // 4 + 1)) :]))
            found.append(Crossing(threshold, last, len(beyond), count, int(beyond[0]) if len(beyond) else None))
    return found


def first_remedy(cause: str, project: str) -> dict[str, str]:
    """Returns the best fitting remedy of a cause for which a project has an option; {} of ``healthy``.

    A project that is not in the table has what serves any project. The result has the ``remedy`` in words, its
    ``option`` ("" if there is none) and the ``source`` of the option.
    """
    own, found = TABLES["projects"].get(project, {"repository": "", "options": {}}), list[dict[str, str]]()
    for name in TABLES["causes"][cause][2]:
        words, of_any = TABLES["remedies"][name]
        option, path = own["options"].get(name, (of_any, ""))
        found.append({"remedy": words, "option": option, "source": f"{own['repository']}: {path}" if path else ""})
    return next((one for one in found if one["option"]), found[0] if found else {})
