"""Golden traces of recorded lengths and their call hold for both forms."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker, length_triggered_schedule

TRACES = json.loads((Path(__file__).parents[1] / "gold" / "schedule_traces.json").read_text())


@pytest.fixture(params=TRACES, ids=lambda trace: trace["name"])
def trace(request):
    fractions = request.param["truncated"] or [0.0] * len(request.param["lengths"])
    return {**request.param, "batches": list(zip(request.param["lengths"], fractions, strict=True))}


def controller_of(trace):
    return LengthTriggeredLR(1e-6, tracker=SurgeTracker(SurgeConfig(**trace["config"])))


def rates_of(trace):
    period = trace["decay_period"] or 10**9
    steps = range(1, len(trace["lengths"]) + 1)
    return [max(1e-6 * 0.5 ** (step // period), 1e-7) for step in steps]


def test_host_form(trace):
    controller = controller_of(trace)
    assert controller.learning_rate == 1e-6
    assert [controller.step(*batch) for batch in trace["batches"]] == rates_of(trace)
    assert controller.learning_rate == rates_of(trace)[-1]
    assert controller.surge_step == trace["surge_step"]
    assert controller.tracker.crossing_step == trace["crossing_step"]
    assert controller.decay_period == trace["decay_period"]


def test_in_graph_form(trace):
    schedule = length_triggered_schedule(1e-6, config=SurgeConfig(**trace["config"]))

    def step(state, batch):
        extra = {"response_length": batch[0], "truncated_fraction": batch[1]}
        return schedule.update(state, **extra), schedule(state, **extra)

    batches = tuple(np.asarray(column, np.float32) for column in zip(*trace["batches"], strict=True))
    state, rates = jax.lax.scan(step, schedule.init(), batches)
    np.testing.assert_array_equal(rates, np.float32(rates_of(trace)))
    assert int(state.surge.surge_step) == (trace["surge_step"] or 0)
    assert int(state.decay_period) == (trace["decay_period"] or 0)
