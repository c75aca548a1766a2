"""Each rule for the call of a surge is tested by itself, together with resume and refusals."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.schedule import SurgeConfig, SurgeTracker

BASE = 1000.0
DEFAULT = SurgeConfig()
# Every rule takes effect within a few steps.
SMALL = SurgeConfig(ratio=3.0, window=30, warmup=15, persistence=4)


def call_of(lengths, config=SMALL, truncated=None):
    tracker = SurgeTracker(config)
    for index, length in enumerate(lengths):
        tracker.update(length, None if truncated is None else truncated[index])
    return tracker.surge_step


def flat(steps, level=BASE):
    return [level] * steps


def test_a_jump_is_called_once_enough_lengths_have_stayed_up():
    # Steps 21-23 are high: the median of five is high at step 23, and four in a row are high at step 24.
    tracker = SurgeTracker(SMALL)
    calls = [tracker.update(length) for length in flat(20) + flat(10, 3 * BASE)]
    assert [step for step, called in enumerate(calls, 1) if called] == [24]
    assert (tracker.surge_step, tracker.crossing_step, tracker.step) == (24, 23, 30)


def test_exactly_the_ratio_is_a_crossing_and_just_below_is_none():
    assert call_of(flat(20) + flat(20, 3000.0)) == 24
    assert call_of(flat(20) + flat(20, float(np.nextafter(np.float32(3000), np.float32(0))))) is None


def test_crossing_step_is_unknown_until_the_call():
    tracker = SurgeTracker(SMALL)
    for length in flat(20) + flat(3, 3 * BASE):
        tracker.update(length)
    assert tracker.surge_step is None
    assert tracker.crossing_step is None


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("height", [3.0, 30.0])
def test_spikes_of_one_and_two_steps_are_no_surge(width, height):
    cycle = flat(8) + flat(width, height * BASE)
    assert call_of(flat(20) + cycle * 50, SMALL) is None
    assert call_of(flat(60) + cycle * 50, DEFAULT) is None


def test_a_spike_of_three_steps_is_over_before_it_could_call():
    assert call_of(flat(20) + flat(3, 9 * BASE) + flat(30)) is None


def test_spikes_close_together_are_no_surge():
    # From the second pair on, most of the newest five lengths are high at every step.
    pairs = ([9 * BASE] * 2 + [BASE]) * 20
    assert call_of(flat(60) + pairs, DEFAULT) is None


def test_a_low_step_inside_a_surge_delays_the_call():
    surge = [*flat(20), *flat(3, 4 * BASE), BASE, *flat(10, 4 * BASE)]
    assert call_of(surge) == 28
    # A step half way up counts as high.
    surge[23] = 1.5 * BASE
    assert call_of(surge) == 24


def test_a_rise_of_five_steps_pays_nothing_for_persistence():
    rise = [*flat(60), 1400.0, 1800.0, 2200.0, 2600.0, *flat(10, 3000.0)]
    # At step 66 three of the newest five lengths are 2500 or more; at step 67 the newest six are 1500 or more.
    assert call_of(rise, DEFAULT) == 67


def test_growth_slower_than_the_window_is_no_surge():
    steps = np.arange(2000)
    for per_threefold in (200, 300, 800):
        assert call_of(1000 * 3 ** np.minimum(steps / per_threefold, 6), DEFAULT) is None
        assert call_of(1000 * (1 + 2 * steps / per_threefold), DEFAULT) is None


def test_the_rise_out_of_an_early_dip_is_no_surge():
    dip = [1000.0] * 10 + [450.0] * 12 + [1000.0] * 200
    assert call_of(dip, DEFAULT) is None


def test_no_call_during_the_warmup():
    early = flat(8) + flat(20, 5 * BASE)
    assert call_of(early, SMALL) == 15
    assert call_of(early, dataclasses.replace(SMALL, warmup=9)) == 12


def test_a_wider_window_admits_slower_growth():
    lengths = 1000 * 3 ** (np.arange(400) / 130)
    assert call_of(lengths, SurgeConfig(window=100)) is None
    assert call_of(lengths, SurgeConfig(window=250)) is not None


def test_more_persistence_calls_as_many_steps_later():
    surge = flat(20) + flat(20, 5 * BASE)
    assert [call_of(surge, dataclasses.replace(SMALL, persistence=p)) for p in (1, 4, 7)] == [23, 24, 27]


def test_truncated_batches_make_no_call():
    lengths = flat(20) + flat(20, 4.4 * BASE)
    assert call_of(lengths, SMALL, [0.0] * 20 + [0.26] * 20) is None
    assert call_of(lengths, SMALL, [0.0] * 20 + [0.25] * 20) == 24


def test_a_surge_that_runs_into_the_limit_is_called():
    truncated = [0.0] * 20 + [0.9] * 20
    assert call_of(flat(20) + flat(20, 4.5 * BASE), SMALL, truncated) == 24
    below = float(np.nextafter(np.float32(4500), np.float32(0)))
    assert call_of(flat(20) + flat(20, below), SMALL, truncated) is None
    assert call_of(flat(20) + flat(20, 9.0 * BASE), dataclasses.replace(SMALL, capped_ratio=None), truncated) is None


def test_a_truncated_batch_before_any_baseline_is_left_out():
    # Smoothing takes five lengths, so the first baseline exists with the sixth length.
    assert call_of(flat(5) + flat(20, 9.0 * BASE), SMALL, [0.0] * 4 + [0.9] + [0.0] * 20) == 16
    tracker = SurgeTracker(SMALL)
    for _ in range(9):
        tracker.update(9.0 * BASE, 0.9)
    assert tracker.held_out == 9


def test_truncated_batches_reset_no_call():
    lengths = [*flat(20), *flat(3, 5 * BASE), *flat(6, 8 * BASE), *flat(3, 5 * BASE)]
    truncated = [0.0] * 23 + [0.9] * 6 + [0.0] * 3
    tracker = SurgeTracker(dataclasses.replace(SMALL, capped_ratio=8.5))
    for length, fraction in zip(lengths, truncated, strict=True):
        tracker.update(length, fraction)
    assert (tracker.surge_step, tracker.crossing_step, tracker.held_out) == (30, 23, 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -5.0, 1e-45, 1e300])
def test_a_bad_length_counts_as_a_step_and_is_otherwise_ignored(bad):
    tracker = SurgeTracker(SMALL)
    for length in [*flat(10), bad, *flat(10), *flat(2, 3 * BASE), bad, bad, *flat(5, 3 * BASE)]:
        tracker.update(length)
    # The jump comes one step later because of the first bad length, and two more bad lengths are inside it.
    assert (tracker.surge_step, tracker.ignored, tracker.step) == (27, 3, 30)


def test_an_unknown_truncation_is_none():
    lengths = flat(20) + flat(20, 5 * BASE)
    assert call_of(lengths, SMALL, [math.nan] * 40) == 24


def test_there_is_one_call_per_run():
    tracker = SurgeTracker(SMALL)
    lengths = flat(20) + flat(60, 3 * BASE) + flat(60, 9 * BASE) + flat(60, 27 * BASE)
    assert sum(tracker.update(length) for length in lengths) == 1
    assert tracker.surge_step == 24


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.float32(1.5), np.asarray(1.5), jnp.float32(1.5), 1])
def test_lengths_may_be_any_scalar(scalar):
    tracker = SurgeTracker(SMALL)
    tracker.update(scalar, scalar / 2)
    assert tracker.held_out == 1


def stream(rng, steps=140):
    level = np.where(np.arange(steps) < 80, 1000.0, 3600.0)
    lengths = level * np.exp(rng.normal(0, 0.15, steps))
    lengths[rng.random(steps) < 0.05] = np.nan
    truncated = np.where(rng.random(steps) < 0.1, 0.8, 0.1)
    return lengths.tolist(), truncated.tolist()


def test_the_state_is_under_4_kb_whatever_the_lengths():
    tracker = SurgeTracker()
    for length in np.random.default_rng(0).uniform(1e-30, 1e-29, 500):
        tracker.update(length)
    assert len(json.dumps(tracker.state_dict())) < 4096


def test_a_narrower_window_keeps_the_newest_lengths():
    wide, narrow = SurgeTracker(SurgeConfig(window=100)), SurgeTracker(SurgeConfig(window=40))
    for length in range(1, 101):
        wide.update(length)
        narrow.update(length)
    resumed = SurgeTracker(SurgeConfig(window=40))
    resumed.load_state_dict(wide.state_dict())
    assert resumed.state_dict() == narrow.state_dict()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ratio": 1.0}, "ratio = 1.0"),
        ({"ratio": math.nan}, "ratio = nan"),
        ({"baseline_quantile": 1.5}, "baseline_quantile = 1.5"),
        ({"smooth": 4}, "smooth = 4"),
        ({"smooth": -1}, "smooth = -1"),
        ({"persistence": 0}, "persistence = 0"),
        ({"held_ratio": 0.0}, "held_ratio = 0.0"),
        ({"held_ratio": 3.1}, "held_ratio = 3.1"),
        ({"warmup": 5}, "warmup = 5"),
        ({"persistence": 41}, "persistence = 41"),
        ({"window": 9}, "window = 9"),
        ({"max_truncated": 1.5}, "max_truncated = 1.5"),
        ({"capped_ratio": 1.0}, "capped_ratio = 1.0"),
        ({"capped_ratio": math.nan}, "capped_ratio = nan"),
        ({"max_wait": 0}, "max_wait = 0"),
        ({"max_wait": 2**31}, "max_wait = 2147483648"),
    ],
)
def test_a_rule_out_of_range_is_refused_with_its_value(bad, message):
    with pytest.raises(ValueError, match=message):
        SurgeConfig(**bad)


def test_nothing_calls_on_a_flat_run_unless_it_waits_too_long():
    assert call_of(flat(400)) is None
    assert call_of(flat(400), dataclasses.replace(SMALL, max_wait=300)) == 300


def test_the_wait_counts_batches_that_are_left_out():
    config = dataclasses.replace(SMALL, max_wait=8)
    tracker = SurgeTracker(config)
    calls = [tracker.update(length, share) for length, share in zip([math.nan, 5.0] * 5, [0.0, 0.9] * 5, strict=True)]
    assert calls == [False] * 7 + [True] + [False] * 2
    assert (tracker.surge_step, tracker.crossing_step, tracker.ignored, tracker.held_out) == (8, None, 5, 5)


def test_a_surge_before_the_end_of_the_wait_is_called_as_ever():
    lengths = flat(20) + flat(20, 5 * BASE)
    for max_wait, called, crossing in ((25, 24, 23), (24, 24, 23), (23, 23, None)):
        tracker = SurgeTracker(dataclasses.replace(SMALL, max_wait=max_wait))
        for length in lengths:
            tracker.update(length)
        assert (tracker.surge_step, tracker.crossing_step) == (called, crossing)


def test_a_resumed_tracker_past_its_wait_calls_at_once():
    tracker = SurgeTracker(SMALL)
    for length in flat(50):
        tracker.update(length)
    resumed = SurgeTracker(dataclasses.replace(SMALL, max_wait=30))
    resumed.load_state_dict(tracker.state_dict())
    assert resumed.update(BASE)
    assert resumed.surge_step == 51


def test_any_positive_signal_will_do():
    lengths, truncated = stream(np.random.default_rng(7))
    called = call_of(lengths, DEFAULT, truncated)
    assert called is not None
    # Powers of two scale float32 exactly, so rounding cannot change the decisions.
    assert call_of([length * 2.0**-20 for length in lengths], DEFAULT, truncated) == called


def test_the_rules_are_a_command_line():
    tyro = pytest.importorskip("tyro")
    config = tyro.cli(SurgeConfig, args=["--ratio", "2.5", "--warmup", "15"])
    assert config == SurgeConfig(ratio=2.5, warmup=15)
