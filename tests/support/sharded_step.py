"""A training step on several meshes: its batch, its outcome, and the comparison of two outcomes."""

import functools

import jax
import numpy as np
import tiny_step
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig

CONFIG = PolicyConfig(32, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
ROW, ROWS, COUNT, LONGEST = 64, 8, 48, 30
MEASURED = DiagnosisConfig()

# Normalised weights beside a KL penalty need sums over all rows before, within and after the micro-batches.
LOSS = LossConfig(kl="k3", kl_coefficient=0.1)
CORRECTION = CorrectionConfig(level="token", threshold=1.2, normalize=True)


def sequences(seed=0):
    rng = np.random.default_rng(seed)
    result = []
    for i in range(COUNT):
        p, r = int(rng.integers(2, 9)), int(rng.integers(1, 22))
        rollout, old, reference = (rng.normal(-3.0, 0.5, r).astype(np.float32) for _ in range(3))
        ids = [rng.integers(0, 32, n).astype(np.int32) for n in (p, r)]
        others = {"old_logprobs": old, "reference_logprobs": reference}
        result.append(train_sequence(*ids, rollout, float(rng.normal()), i % 5 != 0, **others))
    return result


def shape():
    return tiny_step.batch_shape(ROW, ROWS, COUNT, LONGEST)


def batch(seed=0):
    return tiny_step.packed(sequences(seed), ROW, ROWS, COUNT, LONGEST)


def make_step(mesh, *, tx=None, params=None, **options):
    """Returns a step on a mesh of these sizes, and its first state. Without ``tx`` the state keeps the gradient."""
    mesh = make_mesh(mesh)
    usual = {"config": CONFIG, "shape": shape(), "loss": LOSS, "correction": CORRECTION, "count": COUNT}
    step = tiny_step.make_step(tx, mesh=mesh, **{**usual, "diagnosis": MEASURED, **options})
    of_step = {"config": step.config, "dtype": step.precision.compute_dtype, "lora": step.lora}
    return step, tiny_step.fresh_state(tx, mesh=mesh, params=params, **of_step)


def outcome(mesh, made=None, **options):
    """Returns the gradient, the metrics and the log-probabilities of a step on the batch ``made``."""
    made = batch() if made is None else made
    computed = made.tokens if made.trees is None else made.trees.tokens
    step, state = make_step(mesh, shape=computed.shape, **options)
    before = step.compilations  # another test may have run an equal step on batches of other arrays
    state, metrics, values = step(state, made, 0.1, True)
    assert step.compilations <= before + 1
    return jax.device_get((state.opt_state.inner_state.trace, metrics, values.logprobs))


@functools.cache
def alone():
    return outcome(MeshConfig(1))


def check_equal(found, expected, most=1e-5):
    tiny_step.check_close(found[0], expected[0], most)
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        np.testing.assert_allclose(value, expected[1][name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(found[2], expected[2], atol=2e-5, rtol=0)
