"""`rljax.schedule` needs only jax, optax, numpy and their requirements.

An importer that finds nothing else proves it.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "schedule.md"

# This importer finds only the standard library, rljax and the packages on the command line.
REFUSE = """
import sys

allowed = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names) | {"rljax"}

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in allowed or name.startswith("_sysconfigdata"):
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
"""
AFTER = """
# A module without a spec was made inside an extension module, not imported.
loaded = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__spec__", None)}
strangers = {name for name in loaded - allowed if not name.startswith("_")}
assert not strangers, strangers
rooms = {name for name in sys.modules if name.startswith("rljax.") and not name.startswith("rljax.schedule")}
assert not rooms, rooms
print("isolated")
"""


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


def run(body):
    command = [sys.executable, "-c", REFUSE + body + AFTER, ",".join(packages_needed())]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_import_needs_nothing_else():
    done = run("import rljax.schedule\n")
    assert done.stdout.strip() == "isolated", done.stderr


def test_the_example_of_the_docs_needs_nothing_else():
    block = re.search(r"```python\n(# A plain optax loop.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    lengths = "lengths = [1000.0] * 60 + [3500.0] * 60\n"
    state = "params = {'w': jnp.ones(3)}\n"
    setup = "import jax.numpy as jnp\n" + lengths + state
    check = "assert controller.surge_step == 66, controller.surge_step\n"
    check += "assert get_learning_rate(opt_state) == jnp.float32(5e-7)\n"
    done = run(setup + block + check)
    assert done.stdout.strip() == "isolated", done.stderr


def test_the_refusal_works():
    done = run("import flax\n")
    assert "No module named 'flax'" in done.stderr
