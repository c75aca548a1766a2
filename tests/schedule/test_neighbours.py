"""Replays agree with the tracker and the controller on random streams. tests/commands has what they print."""

import dataclasses
import math

import numpy as np
import pytest

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker
from rljax.schedule.neighbours import FirstLengthsTracker, RateLaw, Rule, replay_rule

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
