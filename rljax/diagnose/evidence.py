"""The facts of a diagnosis, from a log, a dump and the declared settings, the size of the mismatch, and the tables.

The tables (``causes.json``) are causes, limits of the field, remedies, and the options of projects. A cause has its
kind, its words and its remedies, the best fitting first. A limit has the first four fields of ``Crossing``. A remedy
has its words, and what serves any project ("" if nothing does). A project has its repository, and for each remedy the
project's option with the file there that defines it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rljax.diagnose.course import FEWEST_STEPS, Course

if TYPE_CHECKING:
    from rljax.diagnose.token_facts import TokenFacts

TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("causes.json").read_bytes())
"""The tables ``causes``, ``limits``, ``remedies`` and ``projects``."""
CAUSES: Mapping[str, tuple[str, str]] = {name: (kind, words) for name, (kind, words, _) in TABLES["causes"].items()}
"""The kind of each cause, and the cause in words."""
SURE, LIKELY, POSSIBLE = "sure", "likely", "possible"
CONFIDENCES = (SURE, LIKELY, POSSIBLE)

# The sizes of a mismatch by its likeliest origin: the upper end of each range. These errors of the logits
# (``course.effect``) were measured: engines in bfloat16 0.007 to 0.012 on the toy, 0.012 to 0.024 on Qwen2.5-0.5B and
# 0.04 on SmolLM2-135M; int8 weights 0.018, fp8 weights 0.046, fp8 caches 0.065 and 0.16 on the toy
# (benchmarks/engine_mismatch.json, head_dtype.json).
EFFECTS = {"float32": 1e-4, "float16": 1.5e-3, "bfloat16": 0.06, "8 bits": 0.5}
# The same signals of real models in bfloat16, with room above the largest of the public ones: abs(lr) 0.006 to 0.049
# (0.5B to 35B parameters), k3_kl 1e-4 to 0.0052, log_ppl_abs_diff 0.003 to 0.013, probabilities 0.004 to 0.015, kl
# 0.006 to 0.009 (verl#7519; tinker trains well below 0.01). A mixture of experts has had 0.22 nats without 8 bits.
_ALONE = {
    "logprob_abs_diff_mean": {"float32": 1e-5, "float16": 2e-3, "bfloat16": 0.05, "8 bits": 0.25},
    "log_ppl_abs_diff": {"float32": 1e-5, "float16": 1e-3, "bfloat16": 0.02, "8 bits": 0.15},
    "k3_kl": {"float32": 1e-9, "float16": 1e-5, "bfloat16": 6e-3, "8 bits": 0.1},
    "prob_abs_diff_mean": {"float32": 1e-5, "float16": 8e-4, "bfloat16": 0.016, "8 bits": 0.1},
    "kl": {"float32": 1e-6, "float16": 1e-4, "bfloat16": 0.01, "8 bits": 0.1},
}
# Signals over the policy's entropy: Qwen3-8B 0.07 to 0.13 at 5,000 to 7,000 tokens (RL-Kernel), k3_kl 0.008 (tinker).
# On the toy (benchmarks/mismatch_growth.json) fp8 weights have 0.04 to 0.14, with an fp8 cache 0.07 to 0.6.
_OVER_ENTROPY = {
    "logprob_abs_diff_mean": {"float32": 1e-4, "float16": 4e-3, "bfloat16": 0.16, "8 bits": 0.7},
    "k3_kl": {"float32": 1e-8, "float16": 1e-5, "bfloat16": 0.015, "8 bits": 0.3},
}
_CLEARLY = 1.4  # a size above this multiple of a limit is clearly beyond it
BEYOND = "beyond rounding"
_ORDER = ("", *EFFECTS, BEYOND)
DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes of log-probabilities, the finest first."""


class Declared(NamedTuple):
    """The settings of trainer and engine, from a run's configuration or a dump's header. "" means unknown."""

    trainer_dtype: str = ""
    rollout_dtype: str = ""
    forms: str = ""  # the 8-bit forms of the engine's weights and cache
    is_exact: bool = False  # whether trainer and engine share one executable
    inject: str = ""  # the mismatch that the configuration adds on purpose

    @property
    def coarser(self) -> str:
        """The coarser dtype of trainer and engine; empty if one is unknown."""
        both = (self.trainer_dtype, self.rollout_dtype)
        return max(both, key=DTYPES.index) if all(name in DTYPES for name in both) else ""


class Crossing(NamedTuple):
    """A limit of one signal, applied to a log or to a dump."""

    signal: str  # the name of the signal, as in ``signals.MISMATCH``
    limit: float
    source: str  # a paper with its section, a project's rule, or "rljax" for our own limit
    meaning: str  # the meaning of a larger number, in one clause
    value: float  # the last value of a log (the median of its last steps), or the value of a dump
    steps: int  # the number of steps beyond the limit; a dump counts as one step
    measured: int  # the number of steps with a value
    first: int | None  # the first step beyond the limit; None if there is none

    @property
    def is_crossed(self) -> bool:
        """Whether the last value, or at least a tenth of the steps, is beyond the limit."""
        return self.value > self.limit or self.steps * 10 >= max(self.measured, 1)


class Finding(NamedTuple):
    """A cause that the facts support."""

    cause: str  # a key of ``CAUSES``
    confidence: str  # one of CONFIDENCES
    evidence: str  # one sentence with numbers


class Size(NamedTuple):
    """The size of a mismatch in one measure."""

    value: float
    limits: Mapping[str, float]  # the upper end of the range of each origin
    measure: str  # the name of the measure, in words

    def __str__(self) -> str:
        return f"{self.measure} of {self.value:.2g}"


class Facts(NamedTuple):
    """All facts of a diagnosis."""

    course: Course | None  # the facts of the log; None without a log
    tokens: TokenFacts | None  # the facts of the token dump; None without one
    crossings: Sequence[Crossing]  # the limits, as applied to the log or else to the dump
    declared: Declared = Declared()
    runs: Sequence[str] = ()  # the names of the runs in the file, if it has several and none was chosen
    is_summary: bool = False  # whether the log is a tracker's summary of a run, one value for each metric
    of_course: Sequence[Finding] = ()  # the findings of ``find_log_causes``, which ``judge_cause`` sets

    @property
    def project(self) -> str:
        """The project that wrote the log; "" if there is none."""
        return self.course.log.project if self.course is not None else ""

    @property
    def size(self) -> Size:
        """The size of the mismatch in the dump, or else the smaller one of a log's first and last steps."""
        return min(self._sizes, key=lambda size: (_ORDER.index(_origin(size)), size.value))

    @property
    def is_normal(self) -> bool:
        """Whether a log's mismatch is of the size that healthy runs in 16 bits have.

        Both ends of the log must have it (or the dump, if there is one), and all of fewer than ``FEWEST_STEPS`` steps.
        """
        course = self.course
        if course is None or not all(_origin(size) in DTYPES for size in self._sizes):
            return False
        largest = Size(course.largest.get(course.gap_name, math.nan), _ALONE[course.gap_name], "")
        return course.steps >= FEWEST_STEPS or _origin(largest) in DTYPES

    @property
    def _sizes(self) -> tuple[Size, ...]:
        course = self.course
        if self.tokens is not None and (course is None or not math.isnan(self.tokens.effect_without)):
            return (self.tokens.size(bool(self.declared.forms)),)
        if course is None:
            return (Size(math.nan, EFFECTS, "an error of the logits"),)
        ends = ((course.first, course.effect_first), (course.last, course.effect_last))
        return tuple(_largest(course.gap_name, end, effect) for end, effect in ends)

    @property
    def origin(self) -> str:
        """The origin that fits the size of the mismatch: a key of EFFECTS, or BEYOND; empty if the size is unknown."""
        return _origin(self.size)

    @property
    def is_split(self) -> bool:
        """Whether the data can show a few extreme tokens, growth with the length, or a temperature.

        This needs a token dump, or a log with quantiles and with buckets by position and entropy.
        """
        if self.tokens is not None or self.course is None:
            return self.tokens is not None
        groups = (self.course.effects.get(f"mismatch_{name}", {}) for name in ("position", "entropy"))
        return "logprob_abs_diff_p99" in self.course.first and all(len(labels) > 2 for labels in groups)

    @property
    def is_clear(self) -> bool:
        """Whether the size of the mismatch is clearly above rounding in 16 bits."""
        return self.size.value > _CLEARLY * self.size.limits["bfloat16"]


def _largest(name: str, signals: Mapping[str, float], effect: float) -> Size:
    """Returns the size of the mismatch in some steps of a log.

    It is the error of the logits. If this is unknown, it is a signal that stands for the mismatch, or the ratio of the
    signal ``name`` to the entropy: the one of the coarsest origin.
    """
    if not math.isnan(effect) or not name:
        return Size(effect, EFFECTS, "an error of the logits")
    sizes = [Size(abs(signals[one]), limits, f"a {one}") for one, limits in _ALONE.items() if one in signals]
    if name in _OVER_ENTROPY and signals.get("entropy", math.nan) > 0:
        over = abs(signals[name]) / signals["entropy"]
        sizes.append(Size(over, _OVER_ENTROPY[name], f"a {name} over the entropy"))
    return max(sizes, key=lambda size: _ORDER.index(_origin(size)))


def _origin(size: Size) -> str:
    if math.isnan(size.value):
        return ""
    return next((name for name, limit in size.limits.items() if size.value <= limit), BEYOND)


def cross(signals: Mapping[str, np.ndarray], steps: np.ndarray) -> list[Crossing]:
    """Compares every signal that has a finite number with the limits of the field.

    The signals are float64 [n] each, NaN where there is no number, and the steps int64 [n].
    """
    found = []
    for signal, limit, source, meaning in TABLES["limits"]:
        values = signals.get(signal, np.zeros(0))
        numbers, at = values[np.isfinite(values)], steps[: len(values)][np.isfinite(values)]
        if count := len(numbers):
            beyond = at[numbers > limit]
            last = float(np.median(numbers[-max(1, min(5, count // 4 + 1)) :]))
            first = int(beyond[0]) if len(beyond) else None
            found.append(Crossing(signal, limit, source, meaning, last, len(beyond), count, first))
    return found


def first_remedy(cause: str, project: str) -> dict[str, str]:
    """Returns the best fitting remedy for which a project has an option, or else the best; {} if the cause has none.

    An option that serves any project replaces a missing one of the project. The result has the ``remedy`` in words, its
    ``option`` ("" if there is none) and the ``source`` of the option.
    """
    own, found = TABLES["projects"].get(project, {"repository": "", "options": {}}), list[dict[str, str]]()
    for name in TABLES["causes"][cause][2]:
        words, of_any = TABLES["remedies"][name]
        option, path = own["options"].get(name, (of_any, ""))
        found.append({"remedy": words, "option": option, "source": f"{own['repository']}: {path}" if path else ""})
    return next((one for one in found if one["option"]), found[0] if found else {})
