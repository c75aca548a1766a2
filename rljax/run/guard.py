"""The guard of a run: rules on its metrics (``mismatch/k3_kl > 0.1 for 3``), and a limit on skipped updates."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljax.errors import check_at_least

_NUMBER = r"[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|inf)"
_RULE = re.compile(rf"\s*(?P<metric>\S+)\s*(?P<sign>[<>])\s*(?P<bound>{_NUMBER})(\s+for\s+(?P<steps>[1-9]\d*))?\s*")

# Metrics that only some rows have: of some steps, of buckets that may be empty, and of what seldom happens.
OCCASIONAL = (
    *("eval/", "optimizer/grad_noise", "mismatch_position/", "mismatch_entropy/", "mismatch_staleness/"),
    *("mismatch/sum_", "mismatch_self/", "mismatch_free_routing/", "mismatch_numerics/", "mismatch_drift/"),
    *("is_numerics/", "is_drift/", "turns/turn_", "turns/after_", "rollout/servers_", "publish/mirrors_"),
    *("rollout/cached_", "time/eval_", "perf/save_"),
)
ERRORS = "reward/error_fraction"


@dataclass(frozen=True)
class GuardRule:
    """The rule ``metric > bound`` (if ``above``) or ``metric < bound`` on ``steps`` rows in a row; ``text`` has it."""

    text: str
    metric: str
    above: bool
    bound: float
    steps: int

    def is_beyond(self, value: Any) -> bool:
        """Returns whether a value is beyond the bound. None and NaN count as beyond."""
        if value is None or math.isnan(value):
            return True
        return value > self.bound if self.above else value < self.bound


def parse_rule(text: str) -> GuardRule:
    """Reads ``METRIC > NUMBER`` or ``METRIC < NUMBER``, and optionally ``for STEPS``. Raises ValueError otherwise."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"a guard reads 'METRIC > NUMBER' or 'METRIC > NUMBER for STEPS', got {text!r}")
    return GuardRule(text, match["metric"], match["sign"] == ">", float(match["bound"]), int(match["steps"] or 1))


EVERY_REWARD_FAILS = GuardRule(f"{ERRORS} = 1 for 3", ERRORS, above=True, bound=math.nextafter(1.0, 0.0), steps=3)
"""The stop rule of every run that has no stop rule for ``reward/error_fraction``."""


@dataclass(frozen=True)
class GuardConfig:
    """The rules on the metrics of a run. A value that is not a number counts as beyond every bound."""

    warn: tuple[str, ...] = ()
    """Rules of the form "METRIC > NUMBER [for STEPS]" (or <). A line is printed when a rule becomes true."""
    stop: tuple[str, ...] = ()
    """Rules of the same form that end the run after the step. The state is saved, and the exit status is 3. Without a
    rule for ``reward/error_fraction`` a run ends so when it is 1 in three steps in a row: no response can be scored."""
    max_skipped_updates: int = 10
    """Number of successive updates with gradients that are not finite after which the run is saved and ends with exit
    status 3. A line names the last checkpoint from before them. An update without a response that carries loss does not
    count. 0: no limit."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_skipped_updates")
        for rule in (*self.warn, *self.stop):
            parse_rule(rule)


class Guard:
    """The rules of a run, and the number of successive rows for which each has been true."""

    def __init__(self, config: GuardConfig):
        self._rules = [(parse_rule(text), False) for text in config.warn]
        self._rules += [(parse_rule(text), True) for text in config.stop]
        if not any(is_stop and rule.metric == ERRORS for rule, is_stop in self._rules):
            self._rules.append((EVERY_REWARD_FAILS, True))
        self._streaks: dict[str, int] = {}

    def check(self, row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns two lists of lines: for warn rules that the next row makes true, and for stop rules that are true.

        Raises ValueError if a rule names a metric that ``row`` lacks, unless it is one of ``OCCASIONAL``.
        """
        warnings, stops, before = [], [], dict(self._streaks)
        for rule, is_stop in self._rules:
            if rule.metric not in row and not rule.metric.startswith(OCCASIONAL) and rule is not EVERY_REWARD_FAILS:
                raise ValueError(f"guard: {unknown_metric(rule.metric, row)}")
            value = row.get(rule.metric)
            beyond = rule.metric in row and rule.is_beyond(value)
            streak = before.get(rule.text, 0) + 1 if beyond else 0
            # A metric that only some rows have keeps its streak in the rows without it.
            self._streaks[rule.text] = streak if rule.metric in row else before.get(rule.text, 0)
            shown = value if value is None else f"{value:.4g}"
            line = f"step {row['step']}: {rule.metric} = {shown} ({rule.text})"
            if is_stop and streak >= rule.steps:
                stops.append(line)
            elif not is_stop and streak == rule.steps:
                warnings.append(line)
        return warnings, stops

    def state_dict(self) -> dict[str, int]:
        """Returns the number of successive rows beyond the bound, by the text of each rule."""
        return dict(self._streaks)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from ``state_dict``; a rule that ``state`` lacks starts with a count of 0 rows."""
        self._streaks = {rule.text: state[rule.text] for rule, _ in self._rules if rule.text in state}


def unknown_metric(metric: str, row: Mapping[str, Any]) -> str:
    """Returns a message that no row has ``metric``. The message names the most similar metric of ``row``, if any."""
    close = difflib.get_close_matches(metric, row, n=1)
    return f"no row has a metric {metric!r}" + (f"; did you mean {close[0]}?" if close else "")
