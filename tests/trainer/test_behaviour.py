"""Tests of the numerics and drift of stale tokens by hand, and of the versions and responses to score for them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from number_updates import NumberUpdate
from records import train_sequence
from toy_texts import toy_config

from rljax.policy.model import copy_params, init_params, param_shardings
from rljax.sharding import MeshConfig, make_mesh, put
from rljax.trainer.behaviour import SplitUpdate, split_metrics
from rljax.trainer.update import UpdateOptions


def sequence(rollout, behind):
    tokens = np.ones(len(rollout), np.int32)
    return train_sequence(tokens[:1], tokens, rollout, staleness=behind)


def test_parts_by_hand():
    one = sequence([-1.0, -2.0, -3.0], [2, 2, 0])  # the last token is of the newest version
    two = sequence([-1.0, -1.0], [3, 3])  # both tokens are of a version that is not kept
    behaviour = {2: [np.float32([-1.1, -2.3, 9.0]), np.float32([9.0, 9.0])]}
    row = split_metrics([one, two], behaviour, [np.float32([-1.5, -2.1, -3.2]), np.float32([-5.0, -5.0])])
    numerics, drift = np.array([-0.1, -0.3, -0.2]), np.array([-0.4, 0.2, 0.0])
    assert row["mismatch_numerics/token_count"] == 3
    assert row["mismatch_numerics/kl"] == pytest.approx(-numerics.mean(), rel=1e-5)
    assert row["mismatch_numerics/logprob_abs_diff_mean"] == pytest.approx(0.2, rel=1e-5)
    assert row["mismatch_drift/kl"] == pytest.approx(-drift.mean(), rel=1e-5)
    assert row["mismatch_drift/k3_kl"] == pytest.approx(np.mean(np.exp(drift) - drift - 1), rel=1e-5)
    assert row["mismatch_drift/log_ppl_abs_diff"] == pytest.approx(abs(drift.mean()), rel=1e-5)
    assert row["mismatch_drift/2/kl"] == pytest.approx(0.1, rel=1e-5)
    assert row["mismatch_drift/2/logprob_abs_diff_max"] == pytest.approx(0.4, rel=1e-5)
    assert row["is_numerics/token_ratio_max"] == pytest.approx(np.exp(-0.1), rel=1e-5)
    ratios, size = np.exp(drift), row["is_drift/token_effective_sample_size"]
    assert size == pytest.approx(ratios.mean() ** 2 / (ratios**2).mean(), rel=1e-5)
    assert row["is_drift/token_fraction_above"] == 0


def train(inner, *steps, **options):
    """Trains from the policy 100 on tokens that are so many versions behind. Returns the row of each step."""
    split = SplitUpdate(inner, inner.forward, inner.pack, copy=lambda params: params, **options)
    state, rows = SimpleNamespace(params=100), []
    for behind in steps:
        sequences = [sequence([-1.0, -1.0], [d, d]) for d in behind]
        found = split(state, split.pack(sequences), sequences, UpdateOptions(1e-3, 0, noise=False))
        state, rows = found.state, [*rows, found.row]
    return rows


def test_each_version_is_scored_with_its_own_weights():
    inner, steps = NumberUpdate(-9.0), ([0, 0], [0, 0], [1, 0], [2, 1], [3, 3])
    rows = train(inner, *steps, versions=2, sample=8)
    has_parts = [any(key.startswith("mismatch_drift/") for key in row) for row in rows]
    assert has_parts == [bool({1, 2} & set(behind)) for behind in steps]
    # Step 3 trains from 102 and step 4 from 103. Tokens that are three versions behind are not scored.
    assert inner.counts() == [(101, 4), (102, 4), (101, 4)]


def test_a_correction_gets_logprobs_of_every_kept_version():
    seen = []

    class Seeing(NumberUpdate):
        def __call__(self, state, batch, sequences, options):
            seen.append((batch.behaviour_logprobs, [s["behaviour_logprobs"] for s in sequences]))
            return super().__call__(state, batch, sequences, options)

    rows = train(Seeing(-9.0), [0, 0], [0, 1], [2, 1], versions=1, sample=1, for_correction=True)
    nan = [np.nan, np.nan]
    np.testing.assert_array_equal([given for _, given in seen], [[nan, nan], [nan, [-100, -100]], [nan, [-101, -101]]])
    for packed, given in seen:
        known = np.sort(packed[np.isfinite(packed) & (packed != 0)])
        np.testing.assert_array_equal(known, np.sort([value for values in given for value in values if value < 0]))
    assert rows[-1]["mismatch_numerics/token_count"] == 2


def test_a_sample_is_spread_evenly_over_the_batch():
    inner = NumberUpdate(-109.0)
    row = train(inner, [0] * 7, [1, 0, 0, 1, 0, 0, 1], versions=1, sample=3)[-1]
    assert row["mismatch_numerics/token_count"] == 6
    assert inner.counts() == [(100, 6)]
    assert row["mismatch_drift/1/logprob_abs_diff_mean"] == 9.0


@pytest.mark.mesh
def test_copies_lie_where_the_parameters_lie():
    policy, mesh = toy_config(), make_mesh(MeshConfig(4, 2))
    params = put(init_params(policy, 0), param_shardings(policy, mesh))
    copies = jax.jit(copy_params, static_argnums=1)(params, "bfloat16")
    for copy, leaf in zip(jax.tree.leaves(copies), jax.tree.leaves(params), strict=True):
        assert copy.dtype == "bfloat16"
        assert copy.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(leaf).astype(copy.dtype))
