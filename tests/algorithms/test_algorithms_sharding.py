"""Rows on eight devices must have the gradient and the totals of the same rows on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rljax.algorithms.correction_choice import CorrectionConfig, correct, gradient_divisor
from rljax.algorithms.losses import LossConfig, aggregation_weights, policy_loss
from rljax.mismatch.correction import finalize_correction

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize(
    ("loss", "correction"),
    [
        (
            LossConfig(kind="gspo", clip_low=0.05, clip_high=0.05, aggregation="sequence_mean"),
            CorrectionConfig(level="sequence", threshold=1.1, normalize=True, reject_k3=0.03),
        ),
        (LossConfig(), CorrectionConfig(preset="icepop")),
    ],
    ids=["gspo", "paper"],
)
def test_sharded_rows(loss, correction):
    rng = np.random.default_rng(0)
    shape = (8, 12)
    old = -rng.exponential(1.0, shape)
    ids = (np.arange(8)[:, None] * 3 + np.arange(12) // 4).astype(np.int32)
    arrays = (
        old + 0.2 * rng.standard_normal(shape),
        old,
        old + 0.2 * rng.standard_normal(shape),
        rng.normal(size=24)[ids],
    )
    logprobs, old, rollout, advantages = (array.astype(np.float32) for array in arrays)
    mask = rng.random(shape) < 0.9

    @jax.jit
    def run(logprobs, old, rollout, advantages, mask, ids):
        where = {"sequence_ids": ids, "num_sequences": 24}
        weights, kept, totals = correct(correction, old, rollout, mask, **where)
        share, denominator = aggregation_weights(loss.aggregation, kept, constant=12, **where)

        def total(logprobs):
            losses, _ = policy_loss(loss, logprobs, old, advantages, kept, **where)
            return jnp.sum(share * weights * losses) / denominator / gradient_divisor(correction, totals)

        return jax.grad(total)(logprobs), kept, finalize_correction(totals)

    batch = (logprobs, old, rollout, advantages, mask, ids)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("rows")))
    (gradient, kept, row), (gradient_8, kept_8, row_8) = run(*batch), run(*sharded)
    assert len(gradient_8.sharding.device_set) == 8
    np.testing.assert_array_equal(kept_8, kept)
    assert 0 < kept.sum() <= mask.sum()
    np.testing.assert_allclose(gradient_8, gradient, rtol=1e-5, atol=1e-5 * np.abs(gradient).max())
    for name, value in row.items():
        assert float(row_8[name]) == pytest.approx(float(value), rel=1e-6), name
