"""Gaps between two engines that others measured (``atlas.json``), and a run's place among the healthy ones."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The first pattern in "trainer / rollout" names the kind of numbers; "exact" kernels give both sides the same bits.
_KINDS = {"exact": "exact", "4-bit": "int4|fp4", "8-bit": "int8|fp8|float8"}
_KINDS |= {"bfloat16": "bf", "float16": "16", "float32": "32"}
_SPREAD, _POINTS, _SOURCES = 4.0, 5, 2


@functools.cache
def points() -> tuple[Mapping[str, Any], ...]:
    """Returns the measured gaps of the atlas; docs/mismatch.md says what each field holds."""
    return tuple(json.loads(Path(__file__).with_name("atlas.json").read_bytes()))


def kind_of(dtype: str | None) -> str:
    """Returns the kind of numbers that a dtype names, such as "bfloat16", "8-bit", "exact" or "unknown"."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, dtype or "")), "unknown")


def source_count(some: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of threads, files and papers from which some points of the atlas are taken."""
    return len({re.split(r", | \(", point["source"])[0] for point in some})


def normal_range(
    metric: str,
    value: float,
    *,
    parameters: float | None = None,
    tokens: float | None = None,
    entropy: float | None = None,
    dtype: str | None = None,
) -> str:
    """Tells where a run's gap lies among healthy points of the same metric and kind of numbers; "" if too few fit.

    The points are within a factor of four of the run's size, length and entropy. Entropy is left out, then length,
    while fewer than five points of two sources fit. A known size is always compared. Toy models count only then.

    Args:
      metric: The name of a metric of the atlas.
      value: The run's number. If it is not finite, the text is empty.
      parameters: The model's size in billions, all experts of a mixture included.
      tokens: The mean length of the responses.
      entropy: The mean entropy of the policy in nats.
      dtype: The dtypes of both sides, such as "bfloat16 / fp8"; None is taken as bfloat16.
    """
    kind = kind_of(dtype or "bfloat16")
    fitting = [p for p in points() if (p["metric"], p["health"], kind_of(p["dtype"])) == (metric, "healthy", kind)]
    known = {k: x for k, x in (("parameters", parameters), ("tokens", tokens), ("entropy", entropy)) if x is not None}
    fewest = 0 if parameters is None else 1
    for count in range(len(known), fewest - 1, -1):
        compared = {k: (x / _SPREAD, x * _SPREAD) for k, x in list(known.items())[:count]}
        near = [p for p in fitting if all(a <= (p[k] or math.inf) <= b for k, (a, b) in compared.items())]
        near = near if "parameters" in compared else [p for p in near if not p.get("toy")]
        if is_enough := len(near) >= _POINTS and source_count(near) >= _SOURCES:
            break
    if not is_enough or not math.isfinite(value):
        return ""
    low, high = min(p["value"] for p in near), max(p["value"] for p in near)
    standing = "below" if value < low else "above" if value > high else "among"
    units = {"parameters": "B parameters", "tokens": "tokens", "entropy": "nats of entropy"}
    limits = [f"{len(near)} healthy {kind} measurements from {source_count(near)} sources"]
    limits += [f"of {_span([p[name] for p in near])} {units[name]}" for name in compared]
    if left_out := [name for name in known if name not in compared]:
        limits.append(f"{' and '.join(left_out)} left out")
    return f"{value:.3g} lies {standing} {', '.join(limits)} ({_span([low, high])})"


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
