"""A calculator whose results are written in a form that the base model of the calculator task has never seen.

It shows what an unfamiliar text does to the mismatch of the turn after it: ``experiments/calculator_turns.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljax.rollout.episodes.calculator import Calculator
from rljax.rollout.episodes.environment import Content
from rljax.rollout.episodes.tools import ToolResult


class UnfamiliarCalculator(Calculator):
    """A calculator that writes ``=9+7+5=`` in place of ``579,``."""

    def write(self, results: Sequence[ToolResult]) -> Content:
        """Returns the digits of the only result in reverse order."""
        return "=" + "+".join(reversed(results[0].text.removesuffix(","))) + "="
