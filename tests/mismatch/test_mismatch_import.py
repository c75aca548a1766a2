"""rljax.mismatch belongs to level 0: it needs jax and numpy and nothing above."""

from isolated import run_with_only

PROGRAM = """
import numpy, rljax.mismatch
assert rljax.mismatch.mismatch_metrics(numpy.zeros((1, 2)), numpy.zeros((1, 2)), numpy.ones((1, 2)))["kl"] == 0.0
"""


def test_import_needs_only_jax_and_numpy():
    packages = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy")
    done = run_with_only(packages, PROGRAM, room="mismatch")
    assert done.stdout.strip() == "isolated", done.stderr
