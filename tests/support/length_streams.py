"""Streams of lengths, rules for them, and the compiled optax form that the other forms are compared with."""

import functools
import math

import jax
import numpy as np
from hypothesis import strategies as st

from rljax.schedule import SurgeConfig, length_triggered_schedule

STEPS = 48
ABOVE, BELOW = (float(np.nextafter(np.float32(300), np.float32(x))) for x in (np.inf, 0))
BAD = [math.nan, math.inf, -math.inf, 0.0, -0.0, -100.0, 1e-45, 1e-39, 3.5e38]
EXTREME = [1.17549435e-38, 3.6e-38, 1.2e38, 3.4e38]
# These lists have ties: 300 is exactly three times 100.
LOW = [100.0, 100.0, 100.0, 99.0, 110.0, 1.0 / 3.0]
HIGH = [300.0, 300.0, BELOW, ABOVE, 1e4, 1.0]
ODD = BAD + EXTREME
FRACTIONS = [0.0, 0.25, float(np.nextafter(np.float32(0.25), np.float32(1))), 0.9, math.nan]

CONFIGS = [
    SurgeConfig(ratio=3.0, window=12, warmup=6, smooth=3, persistence=1),
    SurgeConfig(ratio=3.0, window=12, warmup=6, smooth=3, persistence=4, held_ratio=3.0, baseline_quantile=0.5),
    SurgeConfig(ratio=3.0, window=20, warmup=8, capped_ratio=None),
    SurgeConfig(window=5, warmup=2, smooth=1, persistence=1, baseline_quantile=1.0),
    SurgeConfig(window=9, warmup=9, smooth=5, baseline_quantile=0.0, ratio=1.1, held_ratio=0.9, max_truncated=0.9),
    SurgeConfig(window=12, warmup=6, smooth=3, persistence=2, capped_ratio=1.5, max_wait=30),
    SurgeConfig(max_wait=20),
]


def stream_of(seed):
    """Returns lengths [STEPS] and truncated fractions [STEPS]; the first are mostly low, the later ones arbitrary."""
    rng = np.random.default_rng(seed)
    quiet = rng.integers(4, 21)
    with np.errstate(invalid="ignore"):  # NaN would warn
        bits = rng.integers(0, 2**32, STEPS, np.uint32).view(np.float32).astype(float)  # any float32
    columns = [rng.choice(values, STEPS) for values in (LOW, LOW, LOW, ODD, HIGH, HIGH)]
    columns = np.stack([*columns, bits, rng.uniform(1, 1e4, STEPS)])
    kind = np.where(np.arange(STEPS) < quiet, rng.integers(0, 4, STEPS), rng.integers(2, 8, STEPS))
    fractions = np.where(rng.integers(0, 2, STEPS), rng.choice(FRACTIONS, STEPS), 0.0)
    return columns[kind, np.arange(STEPS)].tolist(), fractions.tolist()


def streams():
    """Returns a strategy that draws a seed for each stream. To draw its numbers would take longer than to test them."""
    return st.integers(0, 2**32 - 1).map(stream_of)


@functools.cache
def compiled(schedule_arguments):
    """Returns a jitted function from (lengths, fractions) to rates, periods and surge steps of the optax form."""
    init_value, config, *rest = schedule_arguments
    names = ("multiplier", "decay_factor", "floor_ratio")
    schedule = length_triggered_schedule(init_value, config=config, **dict(zip(names, rest, strict=True)))

    def step(state, batch):
        extra = {"response_length": batch[0], "truncated_fraction": batch[1]}
        rate = schedule(state, **extra)
        state = schedule.update(state, **extra)
        return state, (rate, state.decay_period, state.surge.surge_step)

    return jax.jit(lambda batches: jax.lax.scan(step, schedule.init(), batches))
