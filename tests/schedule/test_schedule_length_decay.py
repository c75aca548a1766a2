"""Algorithm 1 is tested to the exact update, together with the period that a surge sets."""

import json
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker, decay_period_from_surge, length_decay_schedule

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "schedule_algorithm1.json").read_text())
QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)


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
    first = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK))
    for length in [1000.0] * 19 + [4000.0] * 11:
        first.step(length)
    second = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=5.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.decay_period == 38
    assert [second.step(4000.0) for _ in range(100)] == [first.step(4000.0) for _ in range(100)]
