"""Replays under several rules are checked by hand, and against the tracker and the controller on random streams."""

import dataclasses
import math

import numpy as np
import pytest

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker
from rljax.schedule.neighbours import FirstLengthsTracker, RateLaw, Rule, neighbours_of, replay_rule

SMALL = SurgeConfig(window=20, warmup=8, smooth=3, persistence=3)


def streams(count):
    """Yields lengths with a jump of up to 4 times, noise, and a few steps without a length."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        levels = np.where(np.arange(60) < rng.integers(10, 50), 100.0, 100 * rng.uniform(1, 4))
        lengths = levels * rng.uniform(0.8, 1.25, 60)
        lengths[rng.integers(60, size=3)] = math.nan
        yield lengths.tolist()


def test_three_times_the_first_ten_lengths():
    """Ten lengths have the mean 100, and one step between them has no length. A batch at the limit counts."""
    tracker = FirstLengthsTracker()
    lengths = [90.0, 110.0] * 4 + [math.nan, 80.0, 120.0] + [299.0, 300.0, 900.0]
    assert [tracker.update(length, 0.9) for length in lengths] == [False] * 12 + [True, False]
    assert (tracker.step, tracker.surge_step, tracker.crossing_step, tracker.ignored) == (14, 13, 13, 1)


@pytest.mark.filterwarnings("ignore:20 of .* mean response lengths")
@pytest.mark.parametrize(
    ("multiplier", "max_wait", "silent"),
    [(1.0, None, 0), (1.3, None, 0), (1.8, None, 20), (1.8, 1, 20), (1.8, 30, 20), (1.8, 45, 20), (1.8, 61, 20)],
)
def test_a_replay_agrees_with_the_controller(multiplier, max_wait, silent):
    """Some streams have a run of 20 steps without a length. After the floor the rate changes no more."""
    config, called = dataclasses.replace(SMALL, max_wait=max_wait), 0
    for lengths in streams(12):
        lengths[20 : 20 + silent] = [math.nan] * silent
        outcome = replay_rule(Rule("", config), lengths, [math.nan] * 60, RateLaw(1e-3, multiplier, 0.5, 0.1))
        tracker = SurgeTracker(config)
        controller = LengthTriggeredLR(1e-3, tracker=tracker, multiplier=multiplier)
        rates = [controller.step(length) for length in lengths]
        assert outcome.rates == tuple(rates)
        assert [[rate for at, rate in outcome.changes if at <= step][-1] for step in range(1, 61)] == rates
        assert len(outcome.changes) == len({rate for _, rate in outcome.changes})
        found = (outcome.surge_step, outcome.crossing_step, outcome.ignored, outcome.held_out)
        assert found == (tracker.surge_step, tracker.crossing_step, tracker.ignored, tracker.held_out)
        called += outcome.surge_step is not None
    assert called == 12 if max_wait and max_wait < 60 else 0 < called < 12


def test_the_nearest_level_of_a_rule_that_never_calls():
    """At step 11 the median of three is 200, and the baseline is 100."""
    outcome = replay_rule(Rule("", SMALL), [100.0] * 9 + [200.0] * 5, [0.0] * 14, RateLaw())
    assert outcome.nearest == (11, 2.0)
    assert [step for step, ratio in enumerate(outcome.ratios, 1) if math.isnan(ratio)] == list(range(1, 8))
    assert (outcome.surge_step, outcome.changes) == (None, ((1, 1e-6),))


def test_neighbours_are_named_and_further_values_join_them():
    """A window of 5 steps is shorter than the warm-up."""
    found = neighbours_of(SurgeConfig(warmup=12), {"ratio": (4.0, 2.0), "window": (5, 50)})
    rules = {rule.name: rule for rule in found}
    first = ["in use", "shipped", "study", "three times", "ratio 2", "ratio 2.5", "ratio 3", "ratio 4"]
    assert list(rules) == [*first, "warmup 10", "warmup 40", "max_truncated 1", "window 50"]
    assert rules["ratio 2"].config == SurgeConfig(warmup=12, ratio=2.0)
