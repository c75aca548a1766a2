"""rljax.mismatch belongs to level 0: it needs jax and numpy and nothing above."""

import subprocess
import sys

PROGRAM = """
import sys
import jax, numpy
allowed = {"jax", "jaxlib", "numpy", "rljax", "ml_dtypes", "opt_einsum", "scipy"} | sys.stdlib_module_names

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed or (name.startswith("rljax.") and not name.startswith("rljax.mismatch")):
            raise ImportError(f"refused: {name}")

sys.meta_path.insert(0, Refuse())
import rljax.mismatch
print(rljax.mismatch.mismatch_metrics(numpy.zeros((1, 2)), numpy.zeros((1, 2)), numpy.ones((1, 2)))["kl"])
"""


def test_import_needs_only_jax_and_numpy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 0.0
