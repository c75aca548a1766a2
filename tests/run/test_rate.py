"""The rate of each kind of schedule, step by step, and across a resume."""

import math

import numpy as np
import pytest

from rljax.run.rate import ScheduleConfig, ess_row, make_rate_controller, observed_value, schedule_row, share_row
from rljax.schedule import SurgeConfig
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import TrainerValues

LENGTHS = [10.0] * 12 + [40.0] * 28
SURGE = SurgeConfig(warmup=8, window=30)
EXPECTED = {
    "constant": [1e-3] * 40,
    "linear": [1e-3 - 9e-4 * i / 39 for i in range(40)],
    "cosine": [1e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * i / 39))) for i in range(40)],
    "length_decay": [max(1e-3 * 0.5 ** (t // 15), 1e-4) for t in range(1, 41)],
}


def controller(kind):
    period = 15 if kind == "length_decay" else None
    return make_rate_controller(ScheduleConfig(kind=kind, decay_period=period, surge=SURGE), 1e-3, 40)


def rates_of(built, lengths=LENGTHS):
    return [built.step(length, 0.0) for length in lengths]


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_rates_by_hand(kind):
    built = controller(kind)
    np.testing.assert_allclose(rates_of(built), EXPECTED[kind], rtol=1e-6)
    metrics = schedule_row(built)
    assert metrics["schedule/decay_period"] == (15 if kind == "length_decay" else None)
    # Every kind records the surge, even if it does not act on it.
    assert 13 <= metrics["schedule/surge_step"] <= 20


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("horizon", [20, 80])
def test_a_horizon_is_not_the_end_of_the_run(kind, horizon):
    rates = rates_of(make_rate_controller(ScheduleConfig(kind=kind, horizon=horizon, surge=SURGE), 1e-3, 40))
    assert rates == rates_of(make_rate_controller(ScheduleConfig(kind=kind), 1e-3, horizon))
    assert np.isclose(rates[20], 1e-4, rtol=1e-6) == (horizon == 20)


def test_triggered_rate_follows_the_call():
    built = controller("length_triggered")
    rates, metrics = rates_of(built), schedule_row(built)
    surge, period = metrics["schedule/surge_step"], metrics["schedule/decay_period"]
    assert period == int(1.8 * surge + 0.5)
    expected = [1e-3 * 0.5 ** (t // period) if t >= surge else 1e-3 for t in range(1, 41)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rates[-1] < 1e-3
    # A run without a surge decays after its wait.
    config = ScheduleConfig(kind="length_triggered", surge=SurgeConfig(max_wait=10), multiplier=1.5)
    built = make_rate_controller(config, 1e-3, 40)
    rates = rates_of(built, [10.0] * 40)
    np.testing.assert_allclose(rates, [1e-3 * 0.5 ** (t // 15) for t in range(1, 41)], rtol=1e-6)
    expected = {"schedule/surge_step": 10, "schedule/crossing_step": None, "schedule/decay_period": 15}
    assert schedule_row(built) == expected


@pytest.mark.parametrize("kind", [*sorted(EXPECTED), "length_triggered"])
def test_a_resumed_controller_goes_on_alike(kind):
    for at in (5, 30):
        whole, first, second = controller(kind), controller(kind), controller(kind)
        rates = rates_of(whole)
        rates_of(first, LENGTHS[:at])
        second.load_state_dict(first.state_dict())
        assert rates_of(second, LENGTHS[at:]) == rates[at:]
        assert schedule_row(second) == schedule_row(whole)


def test_states_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="not the state of a scheduled rate"):
        controller("constant").load_state_dict(controller("length_triggered").state_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "length_decay"}, "decay_period goes with kind = length_decay, got None and length_decay"),
        ({"kind": "constant", "horizon": 5}, "horizon is a step, for kind = linear or cosine, got 5 and constant"),
        ({"multiplier": 0.5}, "multiplier"),
        ({"ess_base": 1.5}, r"base must be in \(0, 1\], got base = 1.5"),
        ({"decay_factor": 1.5}, "decay_factor"),
        ({"floor_ratio": -0.1}, "floor_ratio"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**values)


def test_the_share_of_the_sample_size_has_unbounded_ratios():
    """The sums of the responses are 120 and 60, of which only the first weighs; a token of an environment is none."""
    config, logprobs = ScheduleConfig(ess_base=1.0), [-1.0, -1.0]
    sequences = [TrainSequence.of([1], [2, 3], {"rollout_logprobs": logprobs, "turn": [1, turn]}) for turn in (1, 0)]

    def trainer():
        return TrainerValues([np.float32([59, 59]), np.float32([59, 5])])

    row = share_row(config, sequences, trainer)
    assert row == {"schedule/effective_sample_share": pytest.approx(0.5)}
    assert ess_row(config, row) == {"schedule/ess_factor": pytest.approx(math.sqrt(0.5))}
    assert share_row(ScheduleConfig(), sequences, trainer) == {}


def test_any_recorded_metric_can_be_observed():
    row, last = {"response_length/mean": 7.0}, {"response_length/mean": 6.0, "mismatch/k3_kl": 1e-3, "gap": None}
    assert observed_value("response_length/mean", row, last) == 7.0
    assert observed_value("mismatch/k3_kl", row, last) == 1e-3
    assert math.isnan(observed_value("gap", row, last))
    assert math.isnan(observed_value("mismatch/k3_kl", row, {}))
    assert math.isnan(observed_value("eval/toy/accuracy", row, last))  # only some rows have it


def test_the_sample_size_of_the_step_before_scales_the_rate():
    config, key = ScheduleConfig(ess_base=0.5), "schedule/effective_sample_share"
    assert ess_row(ScheduleConfig(), {key: 0.1}) == {}
    assert ess_row(config, {}) == {"schedule/ess_factor": 1.0}
    assert ess_row(config, {key: 0.25}) == {"schedule/ess_factor": pytest.approx(0.5**0.5)}
    assert ess_row(config, {key: 0.75}) == {"schedule/ess_factor": 1.0}
    assert ess_row(config, {key: math.nan}) == ess_row(config, {key: None}) == {"schedule/ess_factor": 0.0}
