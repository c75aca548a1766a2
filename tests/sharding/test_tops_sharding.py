"""The step with the sampler's likeliest tokens is the same on several meshes as on one device.

test_context_sharding.py has one form of it in the suite.
"""

import jax
import numpy as np
import pytest
from cut_batches import with_supports
from sharded_step import CONFIG, COUNT, LOSS, batch, gradient_keeper, shape

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.policy.model import init_params
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.precision import PrecisionConfig
from rljax.trainer.state import create_state
from rljax.trainer.step import TrainStep

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.harness]

CENTERED = CorrectionConfig(level="token", threshold=1.2, score_centering=True)
REGION = CorrectionConfig(region="tv", region_over="tops", region_threshold=0.3)


def run(correction, cut, fsdp, tp, replica=1):
    mesh, tx = make_mesh(MeshConfig(fsdp, tp, replica)), gradient_keeper()
    step = TrainStep(
        CONFIG,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype="float32"),
        objective=Objective(LOSS, correction, COUNT, 16, has_tail=not cut),
        batch_shape=shape(),
        diagnosis=DiagnosisConfig(),
        cut=cut,
    )
    state = create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False)
    state, metrics, values = step(state, with_supports(batch(), CONFIG.vocab_size, 6), 0.1, True)
    return jax.device_get((state.opt_state.inner_state.trace, metrics, values.logprobs))


@pytest.mark.parametrize(
    ("correction", "cut", "mesh"),
    [
        (CENTERED, True, (2, 4)),
        (REGION, True, (2, 2, 2)),
        (CENTERED, False, (2, 2, 2)),
    ],
)
def test_a_step_with_tops_does_not_depend_on_the_mesh(correction, cut, mesh):
    (grads, metrics, logprobs), (expected, row, values) = run(correction, cut, *mesh), run(correction, cut, 1, 1)
    for g, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.abs(wanted).max() > 0
        assert np.abs(g - wanted).max() / np.abs(wanted).max() <= 1e-5
    for name, value in metrics.items():
        np.testing.assert_allclose(value, row[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(logprobs, values, atol=2e-5, rtol=0)
