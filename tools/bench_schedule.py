"""Measures the time that the length-triggered schedule adds to a training step, in microseconds.

    python tools/bench_schedule.py --json benchmarks/schedule_cost.json

Each number is the shortest time of several repeats, because other programs on the machine only make a repeat longer.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.schedule import (
    LengthTriggeredLR,
    SurgeTracker,
    get_learning_rate,
    inject_learning_rate,
    length_triggered_schedule,
    set_learning_rate,
)

LEAVES = 400


def microseconds(function: Callable[[], Any], calls: int, repeats: int) -> float:
    """Returns the time of one call (microseconds) in the fastest of the repeats."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)


def lengths_without_surge() -> Callable[[], float]:
    """Returns a function that returns a new noisy length at each call; the lengths have no surge."""
    values = np.random.default_rng(0).normal(1000, 100, 997).tolist()
    position = 0

    def next_length() -> float:
        nonlocal position
        position += 1
        return values[position % len(values)]

    return next_length


def compiled_step(tx: optax.GradientTransformationExtraArgs) -> Callable[[], Any]:
    """Returns a compiled optimizer step on one small parameter, so that the learning rate takes most of its time."""
    params = {"w": jnp.ones(8)}
    step = jax.jit(lambda state, length: tx.update(params, state, params, response_length=length)[1], donate_argnums=0)
    state, length = tx.init(params), np.float32(1000)

    def run() -> Any:
        nonlocal state
        state = jax.block_until_ready(step(state, length))

    run()
    return run


def measure(repeats: int) -> dict[str, float]:
    """Returns every number of the report, in microseconds by name."""
    next_length = lengths_without_surge()
    tracker, controller = SurgeTracker(), LengthTriggeredLR(1e-6)
    for _ in range(200):
        tracker.update(next_length())
        controller.step(next_length())
    tx = optax.chain(optax.clip_by_global_norm(1.0), inject_learning_rate(optax.adamw, 1e-6))
    state = tx.init({f"layer_{index}": jnp.ones(4) for index in range(LEAVES)})
    return {
        "tracker_update_us": microseconds(lambda: tracker.update(next_length()), 2000, repeats),
        "controller_step_us": microseconds(lambda: controller.step(next_length()), 2000, repeats),
        "controller_state_dict_us": microseconds(controller.state_dict, 200, repeats),
        f"set_learning_rate_{LEAVES}_leaves_us": microseconds(lambda: set_learning_rate(state, 5e-7), 50, repeats),
        f"get_learning_rate_{LEAVES}_leaves_us": microseconds(lambda: get_learning_rate(state), 50, repeats),
        "optimizer_step_constant_us": microseconds(compiled_step(inject_learning_rate(optax.sgd, 1e-6)), 300, repeats),
        "optimizer_step_in_graph_us": microseconds(
            compiled_step(inject_learning_rate(optax.sgd, length_triggered_schedule(1e-6))), 300, repeats
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="repeats of each measurement (default: 25)")
    parser.add_argument("--json", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    numbers = {name: round(value, 2) for name, value in measure(args.repeats).items()}
    for name, value in numbers.items():
        print(f"{name:40} {value:10.2f}")
    if args.json:
        hardware = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}"
        record = {"hardware": hardware, "jax": jax.__version__, "optax": optax.__version__, **numbers}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
