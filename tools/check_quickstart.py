"""Checks that runs of the quickstart do what the README says; prints one line for each run.

    for s in 0 1 2 3 4; do
      python tools/make_toy_base.py runs/base$s --seed $s
      python -m rljax.train configs/quickstart.yaml --run.dir runs/seed$s --model.path runs/base$s --run.seed $s
    done
    python tools/check_quickstart.py runs/seed? --json benchmarks/quickstart_seeds.json

A run passes if all of these hold: its mean length stays for 20 steps (the 5-step mean is under 1.5 times the mean of
the first ten) and then triples within 40 steps; the surge is called within 10 steps of that crossing; the rate follows
Algorithm 1; the mean reward of the last ten steps is at least 0.3 above the first ten; and the mismatch is finite and
not 0 in every row. The exit status is 1 if a run fails.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.errors import ConfigError, run_cli
from rljax.record.rows import read_rows
from rljax.run.options import Positional, parse_arguments
from rljax.schedule import decay_period_from_surge

HOLD_STEPS, HOLD_RATIO, RATIO, WINDOW, CALL_WITHIN, GAIN = 20, 1.5, 3.0, 40, 10, 0.3
DECAY_FACTOR, FLOOR_RATIO = 0.5, 0.1


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command."""

    runs: Positional[tuple[Path, ...]]
    """The run directories of the quickstart."""
    json: Path | None = None
    """The file for the figures."""


def first_step(condition: np.ndarray) -> int | None:
    """Returns the 1-based step of the first True, or None."""
    return int(np.argmax(condition)) + 1 if condition.any() else None


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers that the check uses; steps are 1-based."""
    lengths = np.array([row["response_length/mean"] for row in rows])
    means = np.array([lengths[max(end - 5, 0) : end].mean() for end in range(1, len(lengths) + 1)])
    start = lengths[:10].mean()
    rewards = np.array([row["reward/mean"] for row in rows])
    windows = [k for k in range(1, len(means) - 4) if (means[4 + k :] >= RATIO * means[4 : len(means) - k]).any()]
    gaps = np.array([row["mismatch/log_ppl_abs_diff"] or math.nan for row in rows], float)
    last = rows[-1]
    return {
        "steps": len(rows),
        "left_hold_step": first_step(means >= HOLD_RATIO * start),
        "tripled_step": first_step(means >= RATIO * start),
        "narrowest_tripling_steps": windows[0] if windows else None,
        "surge_step": last["schedule/surge_step"],
        "decay_period": last["schedule/decay_period"],
        "rate_follows_algorithm_1": follows_algorithm_1(rows),
        "reward_first_10": float(rewards[:10].mean()),
        "reward_last_10": float(rewards[-10:].mean()),
        "accuracy_last": last.get("eval/toy/accuracy"),
        "mismatch_smallest": float(gaps.min()),
        "mismatch_largest": float(gaps.max()),
    }


def follows_algorithm_1(rows: list[dict[str, Any]]) -> bool:
    """Whether the rate is constant before the call, then halved at multiples of the period down to the floor."""
    initial = rows[0]["schedule/learning_rate"]
    for row in rows:
        surge, step = row["schedule/surge_step"], row["step"]
        expected = initial
        if surge is not None:
            period = decay_period_from_surge(surge)
            if row["schedule/decay_period"] != period:
                return False
            expected = max(initial * DECAY_FACTOR ** (step // period), initial * FLOOR_RATIO)
        if not math.isclose(row["schedule/learning_rate"], expected, rel_tol=1e-6):
            return False
    return True


def failed_points(f: dict[str, Any]) -> list[str]:
    """Returns the names of the points that do not hold."""
    points = {
        "hold": f["left_hold_step"] is not None and f["left_hold_step"] > HOLD_STEPS,
        "tripling": f["narrowest_tripling_steps"] is not None and f["narrowest_tripling_steps"] <= WINDOW,
        "call": f["surge_step"] is not None
        and f["tripled_step"] is not None
        and abs(f["surge_step"] - f["tripled_step"]) <= CALL_WITHIN,
        "rate": f["rate_follows_algorithm_1"],
        "reward": f["reward_last_10"] - f["reward_first_10"] >= GAIN,
        "mismatch": f["mismatch_smallest"] > 0 and math.isfinite(f["mismatch_largest"]),
    }
    return [name for name, is_met in points.items() if not is_met]


def main(argv: Sequence[str]) -> int:
    """Checks the runs; returns the exit status."""
    arguments = parse_arguments(Arguments, argv, prog="python tools/check_quickstart.py", description=__doc__ or "")
    results, failed = {}, False
    for run in arguments.runs:
        if not (run / "metrics.jsonl").is_file():
            raise ConfigError(f"{run} is not a run directory: it has no metrics.jsonl")
        f = figures(read_rows(run / "metrics.jsonl"))
        broken = failed_points(f)
        failed |= bool(broken)
        results[run.name] = f | {"broken": broken}
        print(
            f"{run.name}: left hold {f['left_hold_step']}, tripled {f['tripled_step']} "
            f"(within {f['narrowest_tripling_steps']}), surge {f['surge_step']}, period {f['decay_period']}, "
            f"reward {f['reward_first_10']:.3f} -> {f['reward_last_10']:.3f}, "
            + ("PASS" if not broken else f"FAIL: {', '.join(broken)}")
        )
    if arguments.json:
        command = "python tools/check_quickstart.py " + " ".join(argv)
        arguments.json.write_text(json.dumps({"command": command, "runs": results}, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_cli(main))
