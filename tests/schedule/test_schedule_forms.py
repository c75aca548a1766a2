"""The host form, the graph form and replays are one law, Algorithm 1: equal decisions and equal float32 rates."""

import dataclasses
import json
import math
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_streams import CONFIGS, STEPS, compiled, streams

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker, decay_period_from_surge, length_decay_schedule
from rljax.schedule.neighbours import FirstLengthsTracker, RateLaw, Rule, replay_rule

pytestmark = pytest.mark.slow

TRACES, GOLD = (
    json.loads((Path(__file__).parents[1] / "gold" / f"schedule_{name}.json").read_text())
    for name in ("traces", "algorithm1")
)
REPLAYED = SurgeConfig(window=20, warmup=8, smooth=3, persistence=3)
LAW = (1.0, 0.5, 0.1)  # the multiplier, the factor and the floor


def check(arguments, stream):
    """Checks that both forms agree; returns the controller and its rates."""
    init_value, config, multiplier, factor, floor = arguments
    lengths, fractions = stream
    host = LengthTriggeredLR(
        init_value, tracker=SurgeTracker(config), multiplier=multiplier, decay_factor=factor, floor_ratio=floor
    )
    assert host.learning_rate == init_value
    # In the graph, NaN is an unknown fraction; on the host, None is possible, too.
    pairs = [(x, None if math.isnan(f) else f) for x, f in zip(lengths, fractions, strict=True)]
    host_rates = [host.step(*pair) for pair in pairs]
    with np.errstate(over="ignore"):
        batches = (np.asarray(lengths, np.float32), np.asarray(fractions, np.float32))
    state, (rates, periods, surges) = compiled(arguments)(batches)

    np.testing.assert_array_equal(np.asarray(rates), np.float32(host_rates))
    assert int(state.surge.surge_step) == (host.surge_step or 0)
    assert int(state.decay_period) == min(host.decay_period or 0, 2**31 - 1)
    assert (int(state.surge.ignored), int(state.surge.held_out)) == (host.tracker.ignored, host.tracker.held_out)
    if host.surge_step is not None:
        assert int(state.surge.crossing_since) == (host.tracker.crossing_step or 0)
        assert set(np.asarray(periods)[host.surge_step - 1 :].tolist()) == {int(state.decay_period)}
    assert set(np.asarray(surges).tolist()) <= {0, host.surge_step}
    assert np.all(np.diff(host_rates) <= 0)
    return host, host_rates


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"window_{config.window}_smooth_{config.smooth}")
@settings(max_examples=80, deadline=None)
@given(stream=streams())
def test_both_forms_agree_on_every_stream(config, stream):
    check((1e-6, config, *LAW), stream)


@settings(max_examples=12, deadline=None)  # each example compiles a program
@given(
    init_value=st.floats(1e-12, 1e3),
    config=st.sampled_from(CONFIGS),
    multiplier=st.one_of(st.sampled_from([1.0, 1.5, 1.8, 2.1, 1.000000001, 1e12]), st.floats(1, 3)),
    factor=st.floats(0.01, 0.99),
    floor=st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)),
    stream=streams(),
)
def test_both_forms_agree_for_all_arguments(init_value, config, multiplier, factor, floor, stream):
    check((init_value, config, multiplier, factor, floor), stream)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_golden_traces_of_recorded_lengths(trace):
    lengths = trace["lengths"]
    arguments = (1e-6, SurgeConfig(**trace["config"]), 1.8, 0.5, 0.1)
    host, rates = check(arguments, (lengths, trace["truncated"] or [0.0] * len(lengths)))
    period = trace["decay_period"] or 10**9
    assert rates == [max(1e-6 * 0.5 ** (step // period), 1e-7) for step in range(1, len(lengths) + 1)]
    assert host.learning_rate == rates[-1]
    found = host.surge_step, host.tracker.crossing_step, host.decay_period
    assert found == (trace["surge_step"], trace["crossing_step"], trace["decay_period"])


def test_the_strategy_reaches_calls():
    """Every one of these configurations must call a surge on a plain stream, or the properties would test nothing."""
    for config in CONFIGS:
        host, _ = check((1e-6, config, *LAW), ([100.0] * 20 + [300.0] * (STEPS - 20), [0.0] * STEPS))
        assert host.surge_step is not None


@pytest.mark.parametrize("multiplier", [1.0, 2.675, 1.999999999, 3.141592653589793])
def test_the_period_is_the_same_at_every_step_of_the_call(multiplier):
    """The graph adds up the period step by step; the host multiplies."""
    for quiet in range(8, STEPS - 4, 3):
        lengths = [100.0] * quiet + [400.0] * (STEPS - quiet)
        host, _ = check((1.0, CONFIGS[0], multiplier, 0.5, 0.1), (lengths, [0.0] * STEPS))
        assert host.surge_step == quiet + 2


@settings(max_examples=40, deadline=None)
@given(stream=streams(), cut=st.integers(0, STEPS - 1))
def test_resuming_the_controller_anywhere_gives_the_same_future(stream, cut):
    pairs = list(zip(*stream, strict=True))

    def fresh():
        return LengthTriggeredLR(1e-6, tracker=SurgeTracker(CONFIGS[0]), multiplier=1.2)

    whole, first = fresh(), fresh()
    rates = [whole.step(*pair) for pair in pairs]
    for pair in pairs[:cut]:
        first.step(*pair)
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.learning_rate == first.learning_rate
    assert [second.step(*pair) for pair in pairs[cut:]] == rates[cut:]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("case", GOLD, ids=lambda case: f"period_{case['decay_period']}_factor_{case['decay_factor']}")
def test_golden_rates_of_every_update(case):
    schedule = length_decay_schedule(
        case["init_value"], case["decay_period"], decay_factor=case["decay_factor"], floor_ratio=case["floor_ratio"]
    )
    last = case["segments"][-1]["from_update"] + 300
    expected = np.empty(last, np.float32)
    for segment in case["segments"]:
        expected[segment["from_update"] - 1 :] = segment["rate"]
    np.testing.assert_array_equal(schedule(jnp.arange(last)), expected)


def test_a_vectorised_a_jitted_and_a_plain_call_agree():
    schedule, counts = length_decay_schedule(3e-4, 7), jnp.arange(40)
    one_by_one = [schedule(int(count)) for count in counts]
    np.testing.assert_array_equal(jax.vmap(schedule)(counts), one_by_one)
    np.testing.assert_array_equal([jax.jit(schedule)(count) for count in counts], one_by_one)
    assert (one_by_one[0].dtype, one_by_one[0].weak_type, one_by_one[0].shape) == (jnp.float32, False, ())


def test_extreme_counts_factors_and_floors():
    none = length_decay_schedule(1e-6, None)(jnp.asarray([0, 10_000, 2**31 - 1]))
    np.testing.assert_array_equal(none, np.full(3, 1e-6, np.float32))
    # At update 2**31 = 2 * 2**30 the rate has decayed twice: the count does not wrap around.
    assert float(length_decay_schedule(1.0, 2**30, floor_ratio=0.0)(jnp.int32(2**31 - 1))) == 0.25
    rates = np.asarray(length_decay_schedule(1.0, 1, floor_ratio=0.0)(jnp.arange(300)))
    np.testing.assert_array_equal(rates[:149], np.float32(0.5) ** np.arange(1, 150, dtype=np.float32))
    assert rates[149:].max() == 0.0
    # A factor near one has a table of bounded length.
    counts = jnp.asarray([0, 999, 2**16 - 1, 2**16, 2**30])
    expected = np.float32([(1 - 1e-9) ** min(int(count) + 1, 2**16) for count in counts])
    np.testing.assert_array_equal(length_decay_schedule(1.0, 1, decay_factor=1 - 1e-9)(counts), expected)


def test_the_period_rounds_half_up_in_decimal():
    assert [decay_period_from_surge(surge) for surge in (110, 90)] == [198, 162]
    for surge in range(1, 400):
        for multiplier in ("1.0", "1.1", "1.25", "1.5", "1.8", "1.9", "2.1", "2.675", "3.14159"):
            exact = (surge * Decimal(multiplier)).quantize(Decimal(1), ROUND_HALF_UP)
            assert decay_period_from_surge(surge, float(multiplier)) == int(exact)


def test_a_loaded_period_outlives_another_multiplier():
    first = LengthTriggeredLR(1e-3, tracker=SurgeTracker(CONFIGS[0]))
    for length in [1000.0] * 19 + [4000.0] * 11:
        first.step(length)
    second = LengthTriggeredLR(1e-3, tracker=SurgeTracker(CONFIGS[0]), multiplier=5.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.decay_period == 38
    assert [second.step(4000.0) for _ in range(100)] == [first.step(4000.0) for _ in range(100)]


def noisy_streams(count):
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
    config, called = dataclasses.replace(REPLAYED, max_wait=max_wait), 0
    for lengths in noisy_streams(12):
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
