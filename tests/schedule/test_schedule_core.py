"""The core of `rljax.schedule` needs only numpy.

A process that can import neither jax nor optax nor torch uses it.
"""

import json

import pytest
from isolated import run_with_only

USE = """
import json
import rljax.schedule as schedule

lengths = [1000.0] * 60 + [3500.0] * 60
tracker = schedule.SurgeTracker(schedule.SurgeConfig())
calls = [step for step, length in enumerate(lengths, 1) if tracker.update(length, 0.0)]
controller = schedule.LengthTriggeredLR(1e-6, tracker=schedule.SurgeTracker())
rates = [controller.step(length) for length in lengths]
state = json.loads(json.dumps(controller.state_dict()))
print(json.dumps([calls, controller.decay_period, rates[117], rates[118], state["decay_period"]]))
assert schedule.decay_period_from_surge(110) == 198
assert "length_triggered_schedule" in dir(schedule)
"""

REPLAY = """
import sys
from rljax.errors import run_cli
from rljax.commands import replay
sys.exit(run_cli(replay.main, sys.argv[1:]))
"""


def test_tracker_and_controller_run_with_numpy_alone():
    """The call is at step 66, when six lengths in a row are long. The period is 118.8, rounded to 119."""
    done = run_with_only(["numpy"], USE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[66], 119, 1e-6, 5e-7, 119]


def test_replay_runs_without_jax(tmp_path):
    log = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "response_length/mean": 1000.0 if step <= 60 else 3500.0} for step in range(1, 121)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_with_only(["numpy"], REPLAY, log)
    assert done.returncode == 0, done.stderr
    assert "surge called at step 66 (crossing since step 63), decay period 119" in done.stdout


@pytest.mark.parametrize("name", ["length_decay_schedule", "inject_learning_rate"])
def test_what_needs_optax_says_how_to_install_it(name):
    done = run_with_only(["numpy"], f"import rljax.schedule\nrljax.schedule.{name}\n")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: rljax.schedule.{name} needs ")
    remedy = "pip install '.[optax]' in a checkout of rljax, or 'WHEEL[optax]' with its wheel"
    assert last.endswith(f"which is not installed: {remedy}")


def test_an_unknown_name_is_an_attribute_error():
    schedule = pytest.importorskip("rljax.schedule")
    with pytest.raises(AttributeError, match="no attribute 'length_trigered_schedule'"):
        schedule.length_trigered_schedule  # noqa: B018
