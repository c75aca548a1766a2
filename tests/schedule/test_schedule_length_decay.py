"""Algorithm 1 is tested to the exact update, together with the host controller and the message of every refusal."""

import json
import math
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.schedule import (
    LengthTriggeredLR,
    SurgeConfig,
    SurgeTracker,
    decay_period_from_surge,
    length_decay_schedule,
    length_triggered_schedule,
)

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "schedule_algorithm1.json").read_text())
QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)


@pytest.mark.parametrize("case", GOLD, ids=lambda case: f"period_{case['decay_period']}_factor_{case['decay_factor']}")
def test_golden_rates_of_every_update(case):
    schedule = length_decay_schedule(
        case["init_value"], case["decay_period"], decay_factor=case["decay_factor"], floor_ratio=case["floor_ratio"]
    )
    last = case["segments"][-1]["from_update"] + 300
    rates = np.asarray(schedule(jnp.arange(last)))
    expected = np.empty(last, np.float32)
    for segment in case["segments"]:
        expected[segment["from_update"] - 1 :] = segment["rate"]
    np.testing.assert_array_equal(rates, expected)


def test_a_vectorised_a_jitted_and_a_plain_call_agree():
    schedule = length_decay_schedule(3e-4, 7)
    counts = jnp.arange(40)
    one_by_one = np.asarray([schedule(int(count)) for count in counts])
    np.testing.assert_array_equal(jax.vmap(schedule)(counts), one_by_one)
    np.testing.assert_array_equal([jax.jit(schedule)(count) for count in counts], one_by_one)


def test_the_rate_is_strong_float32():
    rate = length_decay_schedule(1e-6, 204)(0)
    assert (rate.dtype, rate.weak_type, rate.shape) == (jnp.float32, False, ())


def test_without_a_period_the_rate_is_constant():
    rates = length_decay_schedule(1e-6, None)(jnp.asarray([0, 10_000, 2**31 - 1]))
    np.testing.assert_array_equal(rates, np.full(3, 1e-6, np.float32))


def test_an_optax_count_at_int32_max_does_not_wrap_around():
    schedule = length_decay_schedule(1.0, 2**30, floor_ratio=0.0)
    # At update 2**31 = 2 * 2**30 the rate has decayed twice.
    assert float(schedule(jnp.int32(2**31 - 1))) == 0.25


def test_a_floor_of_zero_decays_to_float32_zero():
    rates = np.asarray(length_decay_schedule(1.0, 1, floor_ratio=0.0)(jnp.arange(300)))
    np.testing.assert_array_equal(rates[:149], np.float32(0.5) ** np.arange(1, 150, dtype=np.float32))
    assert rates[149:].max() == 0.0


def test_a_factor_near_one_has_a_table_of_bounded_length():
    schedule = length_decay_schedule(1.0, 1, decay_factor=1 - 1e-9)
    counts = jnp.asarray([0, 999, 2**16 - 1, 2**16, 2**30])
    expected = np.float32([(1 - 1e-9) ** min(int(count) + 1, 2**16) for count in counts])
    np.testing.assert_array_equal(schedule(counts), expected)


@pytest.mark.parametrize(("surge", "multiplier", "period"), [(110, 1.8, 198), (90, 1.8, 162), (15, 2.1, 32), (7, 1, 7)])
def test_decay_period_from_surge(surge, multiplier, period):
    assert decay_period_from_surge(surge, multiplier) == period


def test_the_period_rounds_half_up_in_decimal():
    for surge in range(1, 400):
        for multiplier in ("1.0", "1.1", "1.25", "1.5", "1.8", "1.9", "2.1", "2.675", "3.14159"):
            exact = (surge * Decimal(multiplier)).quantize(Decimal(1), ROUND_HALF_UP)
            assert decay_period_from_surge(surge, float(multiplier)) == int(exact)


def test_a_loaded_period_outlives_another_multiplier():
    first = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK))
    for length in [1000.0] * 19 + [4000.0] * 11:
        first.step(length)
    second = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=5.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.decay_period == 38
    assert [second.step(4000.0) for _ in range(100)] == [first.step(4000.0) for _ in range(100)]


BAD = [
    ({"init_value": 0.0}, "init_value = 0.0"),
    ({"init_value": -1e-6}, "init_value = -1e-06"),
    ({"init_value": math.inf}, "init_value = inf"),
    ({"decay_factor": 0.0}, "decay_factor = 0.0"),
    ({"decay_factor": 1.0}, "decay_factor = 1.0"),
    ({"decay_factor": math.nan}, "decay_factor = nan"),
    ({"floor_ratio": -0.1}, "floor_ratio = -0.1"),
    ({"floor_ratio": 1.1}, "floor_ratio = 1.1"),
    ({"multiplier": 0.99}, "multiplier = 0.99"),
    ({"multiplier": math.inf}, "multiplier = inf"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_out_of_range_is_refused_with_its_value(bad, message):
    arguments = {"init_value": 1e-6, **bad}
    init_value = arguments.pop("init_value")
    with pytest.raises(ValueError, match=message):
        LengthTriggeredLR(init_value, **arguments)
    with pytest.raises(ValueError, match=message):
        length_triggered_schedule(init_value, **arguments)
    if "multiplier" not in bad:
        with pytest.raises(ValueError, match=message):
            length_decay_schedule(init_value, 100, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: length_decay_schedule(1e-6, 0), "decay_period = 0"),
        (lambda: length_decay_schedule(1e-6, -3), "decay_period = -3"),
        (lambda: decay_period_from_surge(0), "surge_step = 0"),
        (lambda: LengthTriggeredLR(1e-3).load_state_dict({"tracker": {}}), "decay_period"),
    ],
)
def test_steps_below_one_and_other_states_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_fractional_period_is_refused():
    with pytest.raises(TypeError):
        length_decay_schedule(1e-6, 12.5)
    with pytest.raises(TypeError):
        decay_period_from_surge(12.5)
