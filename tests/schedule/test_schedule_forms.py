"""The host form and the graph form are one law: equal decisions and equal float32 rates in all cases."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_streams import CONFIGS, STEPS, compiled, streams

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

pytestmark = pytest.mark.slow

TRACES = json.loads((Path(__file__).parents[1] / "gold" / "schedule_traces.json").read_text())
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
