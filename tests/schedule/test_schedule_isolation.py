"""`rljax.schedule` needs only jax, optax, numpy and their requirements.

An importer that finds nothing else proves it.
"""

import re
from importlib import metadata
from pathlib import Path

from isolated import run_with_only

DOCS = Path(__file__).parents[2] / "docs" / "schedule.md"


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
    by_distribution = metadata.packages_distributions()
    return sorted(
        package
        for package, owners in by_distribution.items()
        if any(owner.lower().replace("_", "-") in distributions for owner in owners)
    )


def test_the_example_of_the_docs_needs_nothing_else():
    block = re.search(r"```python\n(# A plain optax loop.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    lengths = "lengths = [1000.0] * 60 + [3500.0] * 60\n"
    state = "params = {'w': jnp.ones(3)}\n"
    setup = "import jax.numpy as jnp\n" + lengths + state
    check = "assert controller.surge_step == 66, controller.surge_step\n"
    check += "assert get_learning_rate(opt_state) == jnp.float32(5e-7)\n"
    done = run_with_only(packages_needed(), setup + block + check, room="schedule")
    assert done.stdout.strip() == "isolated", done.stderr


def test_the_refusal_works():
    done = run_with_only(packages_needed(), "import flax\n")
    assert "No module named 'flax'" in done.stderr
