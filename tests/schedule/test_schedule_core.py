"""`rljax.schedule` runs where only jax, optax, numpy and their requirements can be imported, its core with numpy."""

import json
import re
from importlib import metadata

import pytest
from isolated import run_with_only
from pages import code_block

import rljax.schedule

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


def test_tracker_and_controller_run_with_numpy_alone():
    """The call is at step 66, when six lengths in a row are long. The period is 118.8, rounded to 119."""
    done = run_with_only(["numpy"], USE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[66], 119, 1e-6, 5e-7, 119]


def test_what_needs_optax_says_how_to_install_it():
    done = run_with_only(["numpy"], "import rljax.schedule\nrljax.schedule.inject_learning_rate\n")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: rljax.schedule.inject_learning_rate needs ")
    assert last.endswith("pip install '.[optax]' in a checkout of rljax, or 'WHEEL[optax]' with its wheel")
    with pytest.raises(AttributeError, match="no attribute 'length_trigered_schedule'"):
        rljax.schedule.length_trigered_schedule  # noqa: B018


def packages_needed():
    """Returns the top-level names of jax, optax, numpy and all packages that they require without extras."""
    distributions, todo = set(), ["jax", "optax", "numpy"]
    while todo:
        name = todo.pop()
        if name in distributions:
            continue
        distributions.add(name)
        needed = [line for line in metadata.requires(name) or [] if "extra ==" not in line]
        todo += [re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-") for line in needed]
    owners = metadata.packages_distributions().items()
    return sorted(name for name, of in owners if distributions & {one.lower().replace("_", "-") for one in of})


def test_the_example_of_the_docs_needs_nothing_else():
    block = code_block("schedule.md", "# A plain optax loop")
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    given = "import jax.numpy as jnp\nlengths = [1000.0] * 60 + [3500.0] * 60\nparams = {'w': jnp.ones(3)}\n"
    check = "assert controller.surge_step == 66, controller.surge_step\n"
    check += "assert get_learning_rate(opt_state) == jnp.float32(5e-7)\n"
    done = run_with_only(packages_needed(), given + block + check, room="schedule")
    assert done.stdout.strip() == "isolated", done.stderr
