"""Each rule for the call of a surge is tested by itself, together with waits and truncated batches."""

import dataclasses
import json
import math

import numpy as np
import pytest

from rljax.schedule import SurgeConfig, SurgeTracker

BASE = 1000.0
DEFAULT = SurgeConfig()
# Every rule takes effect within a few steps.
SMALL = SurgeConfig(ratio=3.0, window=30, warmup=15, persistence=4)


def tracked(lengths, config=SMALL, truncated=None):
    tracker = SurgeTracker(config)
    for length, share in zip(lengths, truncated or [None] * len(lengths), strict=True):
        tracker.update(length, share)
    return tracker


def flat(steps, level=BASE):
    return [level] * steps


def small(**fields):
    return dataclasses.replace(SMALL, **fields)


def test_a_jump_is_called_once_enough_lengths_have_stayed_up():
    # Steps 21-23 are high: the median of five is high at step 23, and four in a row are high at step 24.
    tracker = SurgeTracker(SMALL)
    calls = [tracker.update(length) for length in flat(20) + flat(3, 3 * BASE)]
    assert (tracker.surge_step, tracker.crossing_step) == (None, None)
    calls += [tracker.update(length) for length in flat(3, 3 * BASE) + flat(2, 9 * BASE) + flat(2, 27 * BASE)]
    assert [step for step, called in enumerate(calls, 1) if called] == [24]
    assert (tracker.surge_step, tracker.crossing_step, tracker.step) == (24, 23, 30)


NEAR_3, NEAR_4_5 = (float(np.nextafter(np.float32(x), np.float32(0))) for x in (3000, 4500))
# One step of the surge is low, or half way up, which counts as high.
LOW, HALF = ([*flat(20), *flat(3, 4 * BASE), level, *flat(10, 4 * BASE)] for level in (BASE, 1.5 * BASE))
# At step 66 three of the newest five lengths are 2500 or more; at step 67 the newest six are 1500 or more.
RISE = [*flat(60), 1400.0, 1800.0, 2200.0, 2600.0, *flat(10, 3000.0)]
EARLY, HIGH, LATE = flat(8) + flat(20, 5 * BASE), flat(20) + flat(20, 5 * BASE), [0.0] * 20
GROWTH = 1000 * 3 ** (np.arange(400) / 130)
SPIKES = (flat(8) + flat(2, 30 * BASE)) * 50


@pytest.mark.parametrize(
    ("lengths", "config", "truncated", "step"),
    [
        pytest.param(flat(20) + flat(20, 3000.0), SMALL, None, 24, id="exactly the ratio"),
        pytest.param(flat(20) + flat(20, NEAR_3), SMALL, None, None, id="just below the ratio"),
        pytest.param(flat(20) + flat(3, 9 * BASE) + flat(30), SMALL, None, None, id="a spike of three steps"),
        pytest.param(flat(60) + SPIKES, SMALL, None, None, id="a spike in each ten steps"),
        pytest.param(flat(60) + SPIKES, DEFAULT, None, None, id="the same under the default rule"),
        # From the second pair on, most of the newest five lengths are high at every step.
        pytest.param(flat(60) + ([9 * BASE] * 2 + [BASE]) * 20, DEFAULT, None, None, id="spikes close together"),
        pytest.param(LOW, SMALL, None, 28, id="a low step delays the call"),
        pytest.param(HALF, SMALL, None, 24, id="a step half way up is high"),
        pytest.param(RISE, DEFAULT, None, 67, id="a rise of five steps pays nothing for persistence"),
        pytest.param([1000.0] * 10 + [450.0] * 12 + [1000.0] * 200, DEFAULT, None, None, id="out of an early dip"),
        pytest.param(EARLY, SMALL, None, 15, id="no call during the warmup"),
        pytest.param(EARLY, small(warmup=9), None, 12, id="a shorter warmup"),
        pytest.param(GROWTH, SurgeConfig(window=100), None, None, id="growth slower than the window"),
        pytest.param(GROWTH, SurgeConfig(window=250), None, 157, id="a wider window admits it"),
        pytest.param(1000 * (1 + np.arange(1200) / 100), DEFAULT, None, None, id="growth along a line"),
        pytest.param(HIGH, small(persistence=1), None, 23, id="less persistence"),
        pytest.param(HIGH, small(persistence=7), None, 27, id="more persistence calls as many steps later"),
        pytest.param(flat(20) + flat(20, 4.4 * BASE), SMALL, LATE + [0.26] * 20, None, id="truncated batches"),
        pytest.param(flat(20) + flat(20, 4.4 * BASE), SMALL, LATE + [0.25] * 20, 24, id="few are truncated"),
        pytest.param(flat(20) + flat(20, 4.5 * BASE), SMALL, LATE + [0.9] * 20, 24, id="it runs into the limit"),
        pytest.param(flat(20) + flat(20, NEAR_4_5), SMALL, LATE + [0.9] * 20, None, id="just below that ratio"),
        pytest.param(flat(20) + flat(20, 9 * BASE), small(capped_ratio=None), LATE + [0.9] * 20, None, id="no ratio"),
        pytest.param(HIGH, SMALL, [math.nan] * 40, 24, id="an unknown truncation is none"),
        pytest.param(flat(400), SMALL, None, None, id="a flat run"),
        pytest.param(flat(400), small(max_wait=300), None, 300, id="a flat run that waits too long"),
    ],
)
def test_the_step_of_the_call(lengths, config, truncated, step):
    assert tracked(lengths, config, truncated).surge_step == step


def test_truncated_batches_change_no_baseline_and_reset_no_call():
    # Smoothing takes five lengths, so the first baseline exists with the sixth length.
    assert tracked(flat(5) + flat(20, 9.0 * BASE), SMALL, [0.0] * 4 + [0.9] + [0.0] * 20).surge_step == 16
    assert tracked(flat(9, 9.0 * BASE), SMALL, [0.9] * 9).held_out == 9
    lengths = [*flat(20), *flat(3, 5 * BASE), *flat(6, 8 * BASE), *flat(3, 5 * BASE)]
    tracker = tracked(lengths, small(capped_ratio=8.5), [0.0] * 23 + [0.9] * 6 + [0.0] * 3)
    assert (tracker.surge_step, tracker.crossing_step, tracker.held_out) == (30, 23, 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e-45, 1e300])
def test_a_bad_length_counts_as_a_step_and_is_otherwise_ignored(bad):
    """The jump comes one step later because of the first bad length, and two more bad lengths are inside it."""
    tracker = tracked([*flat(10), bad, *flat(10), *flat(2, 3 * BASE), bad, bad, *flat(5, 3 * BASE)])
    assert (tracker.surge_step, tracker.ignored, tracker.step) == (27, 3, 30)


def test_the_state_is_under_4_kb_whatever_the_lengths():
    tracker = tracked(np.random.default_rng(0).uniform(1e-30, 1e-29, 500).tolist(), DEFAULT)
    assert len(json.dumps(tracker.state_dict())) < 4096


def test_a_narrower_window_keeps_the_newest_lengths():
    wide, narrow = (tracked(range(1, 101), SurgeConfig(window=window)) for window in (100, 40))
    resumed = SurgeTracker(SurgeConfig(window=40))
    resumed.load_state_dict(wide.state_dict())
    assert resumed.state_dict() == narrow.state_dict()


def test_the_wait_counts_batches_that_are_left_out():
    tracker = SurgeTracker(small(max_wait=8))
    calls = [tracker.update(length, share) for length, share in zip([math.nan, 5.0] * 5, [0.0, 0.9] * 5, strict=True)]
    assert calls == [False] * 7 + [True] + [False] * 2
    assert (tracker.surge_step, tracker.crossing_step, tracker.ignored, tracker.held_out) == (8, None, 5, 5)


def test_a_surge_before_the_end_of_the_wait_is_called_as_ever():
    for max_wait, called, crossing in ((25, 24, 23), (24, 24, 23), (23, 23, None)):
        tracker = tracked(HIGH, small(max_wait=max_wait))
        assert (tracker.surge_step, tracker.crossing_step) == (called, crossing)
    # A resumed tracker past its wait calls at once.
    resumed = SurgeTracker(small(max_wait=30))
    resumed.load_state_dict(tracked(flat(50)).state_dict())
    assert resumed.update(BASE)
    assert resumed.surge_step == 51


def test_any_positive_signal_will_do():
    """Powers of two scale float32 exactly, so rounding cannot change the decisions."""
    rng = np.random.default_rng(7)
    lengths = np.where(np.arange(140) < 80, 1000.0, 3600.0) * np.exp(rng.normal(0, 0.15, 140))
    lengths[rng.random(140) < 0.05] = np.nan
    truncated = np.where(rng.random(140) < 0.1, 0.8, 0.1).tolist()
    called = tracked(lengths.tolist(), DEFAULT, truncated).surge_step
    assert called is not None
    assert tracked((lengths * 2.0**-20).tolist(), DEFAULT, truncated).surge_step == called
