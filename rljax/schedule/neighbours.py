"""Replays the lengths of a finished run under several rules that call a surge. It needs only numpy.

Two rules are neighbours when they differ a little. If all neighbours call near the same step, the call is safe. If they
disagree, a rule can hardly tell this curve from noise or from slow growth.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rljax.schedule.length_decay import LengthTriggeredLR, decay_rates
from rljax.schedule.surge import SurgeConfig, SurgeTracker

STUDY = SurgeConfig(ratio=2.5, warmup=10, window=100, capped_ratio=None)
"""The rules of the project's study of short runs."""
IN_USE = "in use"
FIRST_LENGTHS = 10
TIMES = 3


class Rule(NamedTuple):
    """A rule that calls a surge, with its name. A rule without a configuration is ``FirstLengthsTracker``."""

    name: str
    config: SurgeConfig | None

    def tracker(self) -> SurgeTracker:
        """Returns a new tracker of the rule."""
        return FirstLengthsTracker() if self.config is None else SurgeTracker(self.config)


class RateLaw(NamedTuple):
    """The arguments of ``LengthTriggeredLR`` without its tracker."""

    init_value: float = 1e-6
    multiplier: float = 1.8
    decay_factor: float = 0.5
    floor_ratio: float = 0.1


@dataclass(frozen=True)
class RuleOutcome:
    """The result of a replay under one rule.

    Attributes:
      surge_step: The 1-based step of the call, or None.
      crossing_step: The first step of the crossing that led to the call, or None.
      decay_period: The period that follows from the call (steps), or None.
      changes: The steps at which the rate changes, each with its new rate, from (1, initial rate) down to the floor.
        The last ones may lie behind the end of the log.
      rates: The rate of each step of the log.
      ratios: The smoothed length over the baseline at each step of the log. It is NaN after the call, and at steps
        without a smoothed length.
      ignored: The number of steps without a finite, positive length.
      held_out: The number of steps that were left out because of ``max_truncated``.
    """

    rule: Rule
    surge_step: int | None
    crossing_step: int | None
    decay_period: int | None
    changes: tuple[tuple[int, float], ...]
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    ignored: int
    held_out: int

    @property
    def nearest(self) -> tuple[int, float] | None:
        """The step with the largest ratio, from 1, and the ratio; None if no step has one."""
        known = [(step, ratio) for step, ratio in enumerate(self.ratios, 1) if not math.isnan(ratio)]
        return max(known, key=lambda level: level[1], default=None)


class FirstLengthsTracker(SurgeTracker):
    """The rule that the paper's words suggest: a length three times the level at the start.

    The level is the mean of the first ten usable lengths. The surge is called at the first later step whose length is
    at least three times the level. A single spike is enough, and truncated batches count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: list[float] = []

    @property
    def crossing_step(self) -> int | None:
        """The step of the call: this rule does not wait after a crossing."""
        return self.surge_step

    def update(self, length: Any, truncated_fraction: Any = None) -> bool:
        """Observes one batch; returns whether it calls the surge. ``truncated_fraction`` is not used."""
        self.step += 1
        value = float(length)
        if not (math.isfinite(value) and value > 0):
            self.ignored += 1
        elif len(self._first) < FIRST_LENGTHS:
            self._first.append(value)
        elif self.surge_step is None:
            self.smoothed, self.baseline = value, sum(self._first) / FIRST_LENGTHS
            if value >= TIMES * self.baseline:
                self.surge_step = self.step
                return True
        return False


def neighbours_of(config: SurgeConfig, more: Mapping[str, Sequence[float]] | None = None) -> list[Rule]:
    """Returns the rule in use, three fixed rules, and rules that differ from the rule in use in one field.

    The fixed rules are the default rule, ``STUDY`` and ``FirstLengthsTracker``. The others have other values of
    ``ratio``, ``warmup`` and ``max_truncated``, and the further values of fields in ``more``. A value that the other
    fields do not allow is left out.
    """
    rules = [Rule(IN_USE, config), Rule("shipped", SurgeConfig()), Rule("study", STUDY), Rule("three times", None)]
    changed: dict[str, tuple[float, ...]] = {"ratio": (2.0, 2.5, 3.0), "warmup": (10, 40), "max_truncated": (1.0,)}
    for name, values in (more or {}).items():
        changed[name] = tuple(dict.fromkeys([*changed.get(name, ()), *values]))
    for name, values in changed.items():
        for value in sorted(values):
            other: dict[str, Any] = {name: value}
            with contextlib.suppress(ValueError):
                rules.append(Rule(f"{name} {value:g}", dataclasses.replace(config, **other)))
    return rules


def replay_rule(rule: Rule, lengths: Sequence[float], truncated: Sequence[float], law: RateLaw) -> RuleOutcome:
    """Gives the steps of a log to a controller with the tracker of a rule, one after the other.

    ``lengths`` (tokens) and ``truncated`` have the mean response length and the truncated fraction of each step from 1
    on, NaN where it is not known.

    Raises:
      ValueError: The law is out of range, or the two sequences differ in length.
    """
    tracker = rule.tracker()
    controller = LengthTriggeredLR(tracker=tracker, **law._asdict())
    ratios, missing = [math.nan] * len(lengths), 0
    for step, (length, fraction) in enumerate(zip(lengths, truncated, strict=True), 1):
        if not math.isfinite(length) and step != tracker.config.max_wait:
            missing += 1  # The tracker would only count the step, so long stretches of missing steps cost nothing.
            continue
        tracker.step, tracker.smoothed, tracker.baseline = step - 1, None, None
        controller.step(length, fraction)
        smoothed, baseline = tracker.smoothed, tracker.baseline
        if smoothed is not None and baseline is not None:
            ratios[step - 1] = smoothed / baseline
    rates = decay_rates(law.init_value, law.decay_factor, law.floor_ratio)
    period = controller.decay_period or len(lengths) + 1  # longer than the log: no decay
    return RuleOutcome(
        rule=rule,
        surge_step=tracker.surge_step,
        crossing_step=tracker.crossing_step,
        decay_period=controller.decay_period,
        changes=rate_changes(controller.decay_period, law),
        rates=tuple(rates[min(step // period, len(rates) - 1)] for step in range(1, len(lengths) + 1)),
        ratios=tuple(ratios),
        ignored=tracker.ignored + missing,
        held_out=tracker.held_out,
    )


def rate_changes(decay_period: int | None, law: RateLaw) -> tuple[tuple[int, float], ...]:
    """Returns the steps at which the rate changes, each with its new rate, from step 1 down to the floor."""
    first, *later = decay_rates(law.init_value, law.decay_factor, law.floor_ratio)
    changes = {1: first}
    if decay_period is not None:
        for decays, rate in enumerate(later, 1):
            changes[decays * decay_period] = rate
    return tuple(changes.items())
