"""The facts of a diagnosis, from a log, a dump and the declared settings, and the size of the mismatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rljax.diagnose.course import Course
from rljax.diagnose.thresholds import Crossing

if TYPE_CHECKING:
    from rljax.diagnose.token_facts import TokenFacts

SURE, LIKELY, POSSIBLE = "sure", "likely", "possible"
CONFIDENCES = (SURE, LIKELY, POSSIBLE)

# The sizes of a mismatch by its likeliest origin: the upper end of each range. These errors of the logits
# (``course.effect``) were measured: the toy's embedded engine in bfloat16 0.007 to 0.012, vLLM in bfloat16 0.011, int8
# weights 0.018, fp8 weights 0.046, fp8 caches 0.065 and 0.16 (benchmarks/engine_mismatch.json, head_dtype.json).
EFFECTS = {"float32": 1e-4, "float16": 1.5e-3, "bfloat16": 0.04, "8 bits": 0.5}
# Other signals over the policy's entropy (benchmarks/mismatch_growth.json): vLLM in bfloat16 0.011 to 0.029, fp8
# weights 0.04 to 0.14, with an fp8 cache 0.07 to 0.6.
_OVER_ENTROPY = {
    "logprob_abs_diff_mean": {"float32": 1e-4, "float16": 4e-3, "bfloat16": 0.06, "8 bits": 0.7},
    "k3_kl": {"float32": 1e-8, "float16": 1e-5, "bfloat16": 2.5e-3, "8 bits": 0.3},
}
# The same signals without the entropy. Others report a k3_kl of 6e-4 in bfloat16 and 0.03 with an fp8 cache (Qwen3-4B).
_ALONE = {
    "logprob_abs_diff_mean": {"float32": 1e-5, "float16": 2e-3, "bfloat16": 0.03, "8 bits": 0.2},
    "k3_kl": {"float32": 1e-9, "float16": 1e-5, "bfloat16": 3e-3, "8 bits": 0.1},
    "log_ppl_abs_diff": {"float32": 1e-5, "float16": 1e-3, "bfloat16": 0.02, "8 bits": 0.15},
    "prob_abs_diff_mean": {"float32": 1e-5, "float16": 8e-4, "bfloat16": 8e-3, "8 bits": 0.05},
}
_CLEARLY = 1.4  # a size above this multiple of a limit is clearly beyond it
BEYOND = "beyond rounding"
DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes of log-probabilities, the finest first."""


class Declared(NamedTuple):
    """The settings of the two sides, from a run's configuration or a dump's header. An empty text means unknown."""

    trainer_dtype: str = ""
    rollout_dtype: str = ""
    forms: str = ""  # the 8-bit forms of the engine's weights and cache
    is_exact: bool = False  # whether trainer and engine share one executable
    inject: str = ""  # the mismatch that the configuration adds on purpose

    @property
    def coarser(self) -> str:
        """The coarser of the two dtypes; empty if one is unknown."""
        both = (self.trainer_dtype, self.rollout_dtype)
        return max(both, key=DTYPES.index) if all(name in DTYPES for name in both) else ""


class Finding(NamedTuple):
    """A cause that the facts support."""

    cause: str  # a key of CAUSES
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

    course: Course | None  # the facts of the log
    tokens: TokenFacts | None  # the facts of the token dump
    crossings: Sequence[Crossing]  # the thresholds, as applied to the log or else to the dump
    declared: Declared = Declared()

    @property
    def size(self) -> Size:
        """The size of the mismatch: the error of the logits, or else the best other signal."""
        course = self.course
        if self.tokens is not None:
            return self.tokens.size(bool(self.declared.forms))
        effect = math.nan if course is None else course.effect_last
        if not math.isnan(effect) or course is None or not course.gap_name:
            return Size(effect, EFFECTS, "an error of the logits")
        entropy = course.last.get("entropy", math.nan)
        for name, limits in _OVER_ENTROPY.items():
            if entropy > 0 and name in course.last:
                return Size(course.last[name] / entropy, limits, f"a {name} over the entropy")
        return Size(course.last[course.gap_name], _ALONE[course.gap_name], f"a {course.gap_name}")

    @property
    def origin(self) -> str:
        """The origin that fits the size of the mismatch: a key of EFFECTS, or BEYOND; empty if the size is unknown."""
        size, limits, _ = self.size
        return "" if math.isnan(size) else next((name for name, limit in limits.items() if size <= limit), BEYOND)

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
        """Whether the size is clearly above rounding in 16 bits."""
        return self.size.value > _CLEARLY * self.size.limits["bfloat16"]
