"""Tests of the places of a step's mismatch: buckets in the row, the split of a rise, and the noise of the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import train_sequence

from rljax.mismatch import merge, zeros
from rljax.mismatch.metrics import bin_edges
from rljax.policy.head import TokenScores
from rljax.policy.layers import RoutingRecord
from rljax.policy.model import ForwardStats
from rljax.trainer import measure
from rljax.trainer.measure import HISTOGRAM, DiagnosisConfig, finalize_measured
from rljax.trainer.packing import pack
from rljax.trainer.totals import gradient_noise

DIAGNOSIS = DiagnosisConfig(position_edges=(3, 6), is_threshold=1.5)


@functools.partial(jax.jit, static_argnames=("used", "count"))
def row_of_arrays(batch, logprobs, entropy, *, used, count):
    total = None
    for i in range(used):
        micro = jax.tree.map(lambda array, i=i: array[i], batch)
        scores = TokenScores(logprobs[i], entropy[i], stats=ForwardStats(jnp.float32(i + 1), None))
        found = measure.measure(scores, micro, count, DIAGNOSIS)
        total = merge(zeros(found) if total is None else total, found)
    return finalize_measured(total, DIAGNOSIS)


@pytest.mark.slow
def test_buckets_of_a_step_by_hand():
    """The trainer's log-probabilities are the rollout's, which are -1, and a gap that each sequence has."""
    kinds = zip([7, 4, 2], [1.0, -1.0, 0.0], [0, 1, 4], strict=True)
    sequences = [train_sequence([0, 0], [0] * n, [-1.0] * n, a, staleness=[behind] * n) for n, a, behind in kinds]
    batch = pack(sequences, row_tokens=12, rows_per_micro_batch=2, micro_batches=2)
    gaps = np.float32([0.1, -0.3, 0.2])[batch.sequence_ids]
    logprobs = np.where(batch.response_mask, gaps - np.float32(1.0), np.float32(0.0))
    entropy = jnp.where(jnp.asarray(batch.sequence_ids) == 0, 0.25, 1.0)
    arrays = batch._replace(with_loss=None, used=None)
    row = jax.device_get(row_of_arrays(arrays, logprobs, entropy, used=int(batch.used), count=3))
    # The buckets hold positions 1-2, 3-5 and 6 on. Sequence 0 gives them 2, 3 and 2 tokens, sequence 1 gives 2, 2 and
    # 0, and sequence 2 gives 2, 0 and 0.
    assert [int(row[f"mismatch_position/{b}/token_count"]) for b in ("lt_3", "3_to_6", "ge_6")] == [6, 5, 2]
    assert row["mismatch_position/lt_3/logprob_abs_diff_mean"] == pytest.approx((0.1 + 0.3 + 0.2) / 3, rel=1e-5)
    assert row["mismatch_position/3_to_6/kl"] == pytest.approx(-(3 * 0.1 - 2 * 0.3) / 5, rel=1e-5)
    assert row["mismatch_position/ge_6/logprob_abs_diff_mean"] == pytest.approx(0.1, rel=1e-5)
    assert row["mismatch_entropy/0.1_to_0.5/logprob_abs_diff_max"] == pytest.approx(0.1, rel=1e-5)
    assert int(row["mismatch_entropy/1_to_2/token_count"]) == 6
    for bucket, gap in (("0", 0.1), ("1", 0.3), ("ge_3", 0.2)):
        assert row[f"mismatch_staleness/{bucket}/logprob_abs_diff_mean"] == pytest.approx(gap, rel=1e-5)
    # The advantage is +1 on 7 tokens with lr 0.1, and -1 on 4 tokens with lr -0.3. The mean is over 11 tokens.
    assert row["mismatch_sign/log_ratio_skew"] == pytest.approx((7 * 0.1 + 4 * 0.3) / 11, rel=1e-5)
    assert row["mismatch_sign/sign_skew"] == pytest.approx(1.0)
    assert row["is/token_fraction_above"] == 0.0
    assert row[HISTOGRAM].shape == (len(bin_edges()) + 1,)
    assert row[HISTOGRAM].sum() == 13


def test_buckets_without_tokens_leave_the_row():
    kept = {f"{group}/{name}": 0 for group in ("mismatch_position/lt_3", "mismatch") for name in ("token_count", "kl")}
    kept["mismatch_position/lt_3/token_count"] = 2
    empty = {"mismatch_position/ge_3/token_count": 0, "mismatch_position/ge_3/kl": 0.0}
    assert measure.without_empty_buckets(kept | empty) == kept


def test_gradient_noise_is_the_variance_of_the_sum():
    """Only the squared norms of three gradients are known. The noise is their sample variance, times their number."""
    g = np.array([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
    expected = 3 * np.var(g, axis=0, ddof=1).sum()
    found = gradient_noise(jnp.float32((g**2).sum()), jnp.float32((g.sum(0) ** 2).sum()), jnp.int32(3))
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(float(gradient_noise(jnp.float32(5.0), jnp.float32(5.0), jnp.int32(1))))


@pytest.mark.parametrize(("load", "dropped"), [(6250, 0.0), (5000, 0.2)])
def test_routers_of_more_choices_than_int32_holds(load, dropped):
    """A row has 100,000 tokens with 8 choices each for 128 experts, 6,250 for each of them; a tenth differs."""
    sums = {"tokens": 100_000, "entropy": 50_000.0, "given": 800_000, "differing": 80_000}
    records = RoutingRecord(
        choices=jnp.zeros((48, 64, 1, 8), jnp.int32),
        load=jnp.full((48, 64, 128), load),
        probability=jnp.zeros((48, 64, 128)),
        **{name: jnp.full((48, 64), value) for name, value in sums.items()},
    )
    found = measure.router_statistics(records, replayed=True)
    expected = {"load_max": 1, "load_min": 1, "entropy": 0.5, "dropped_fraction": dropped, "disagreement": 0.1}
    assert measure.finalize_router(merge(found, found)) == pytest.approx(expected, rel=1e-5)


def test_settings_that_make_no_sense():
    wrong = (("position_edges", (4, 4)), ("position_edges", ()), ("is_threshold", 0.5), ("grad_noise_every", -1))
    for field, value in wrong:
        with pytest.raises(ValueError, match=f"{field} must"):
            DiagnosisConfig(**{field: value})
