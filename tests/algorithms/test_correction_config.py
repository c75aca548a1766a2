"""Corrections: presets, weights and rejections by hand, totals that merge, and batches without tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.correction_choice import PRESETS, CorrectionConfig, correct, gradient_divisor
from rljax.mismatch import merge
from rljax.mismatch.correction import finalize_correction

# The first row has sequences 1 and 0, the second 3 and 2 (2 has no token in the mask). The ratios of the tokens are
# below.
IDS = np.array([[1, 1, 1, 0, 0, 0], [3, 3, 2, 2, 0, 0]], np.int32)
MASK = np.array([[1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0]], bool)
RATIOS = np.array([[4.0, 2.0, 9.0, 0.5, 0.25, 9.0], [1.0, 1.21, 9.0, 9.0, 9.0, 9.0]])
ROLLOUT = np.full((2, 6), -2.0, np.float32)
LOGPROBS = (ROLLOUT + np.log(RATIOS)).astype(np.float32)
CENTERED = {"score_centering": True}
TWO = 2.000001  # log 2 is rounded in float32, so a ratio of 2 is compared with a threshold a little above


def run(config, logprobs=LOGPROBS, rollout=ROLLOUT, mask=MASK, ids=IDS):
    # Without jit all corrections share the compiled operations of this shape.
    arrays = map(jnp.asarray, (logprobs, rollout, mask))
    weights, kept, totals = correct(config, *arrays, sequence_ids=jnp.asarray(ids), num_sequences=4)
    assert weights.dtype == jnp.float32
    assert kept.dtype == jnp.bool_
    return np.asarray(weights), np.asarray(kept), {k: float(v) for k, v in finalize_correction(totals).items()}, totals


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "weights", "changed"),
    [
        ("token", "truncate", 0.0, TWO, [2, 2, 0.5, 0.25, 1, 1.21], 1 / 6),
        ("token", "mask", 0.0, TWO, [0, 2, 0.5, 0.25, 1, 1.21], 1 / 6),
        ("token", "band", 0.5, 5.0, [4, 2, 0.5, 0, 1, 1.21], 1 / 6),
        ("sequence", "truncate", 0.0, TWO, [2, 2, 0.125, 0.125, 1.21, 1.21], 1 / 3),
        ("sequence", "mask", 0.0, TWO, [0, 0, 0.125, 0.125, 1.21, 1.21], 1 / 3),
        ("sequence", "band", 1.0, TWO, [0, 0, 0, 0, 1.21, 1.21], 2 / 3),
        ("geometric", "band", 0.5, 1.2, [0, 0, 0, 0, 1.1, 1.1], 2 / 3),
        ("geometric", "band", 0.99, 1.01, [0, 0, 0, 0, 0, 0], 1.0),
        ("geometric", "gate", 0.5, 1.2, [0, 0, 0, 0, 1, 1.21], 2 / 3),
        ("none", "truncate", 0.0, 2.0, [1, 1, 1, 1, 1, 1], 0.0),
    ],
)
def test_weights_by_hand(level, mode, low, high, weights, changed):
    found, kept, row, _ = run(CorrectionConfig(level=level, mode=mode, threshold_low=low, threshold=high))
    np.testing.assert_allclose(found[MASK], weights, rtol=2e-6)
    assert not found[~MASK].any()
    np.testing.assert_array_equal(kept, MASK)
    assert row["changed_fraction"] == pytest.approx(changed, rel=1e-6)
    assert row["dropped_sequence_fraction"] == pytest.approx(np.mean(np.reshape(weights, (3, 2)).max(axis=1) == 0))
    assert row["rejected_sequence_fraction"] == row["rejected_token_fraction"] == row["nonfinite_count"] == 0.0


def test_totals_by_hand():
    """Token truncation at 3 has the weights 3, 2, 0.5, 0.25, 1, 1.21; sequence truncation has 3, 0.125, 1.21."""
    plain, normalized = (CorrectionConfig(level="token", threshold=3.0, normalize=each) for each in (False, True))
    _, _, row, totals = run(plain)
    assert row["weight_mean"] == pytest.approx(7.96 / 6, rel=1e-6)
    assert row["weight_max"] == pytest.approx(3.0, rel=1e-6)
    assert row["effective_sample_size"] == pytest.approx(7.96**2 / (6 * 15.7766), rel=1e-6)
    assert float(gradient_divisor(plain, totals)) == 1.0
    assert float(gradient_divisor(normalized, totals)) == pytest.approx(7.96 / 6, rel=1e-6)
    _, _, row, _ = run(CorrectionConfig(level="sequence", threshold=3.0))
    assert row["weight_mean"] == pytest.approx(4.335 / 3, rel=1e-6)
    assert row["effective_sample_size"] == pytest.approx(4.335**2 / (3 * 10.479725), rel=1e-6)
    _, _, row, _ = run(CorrectionConfig())
    assert (row["weight_mean"], row["weight_max"], row["effective_sample_size"]) == (1.0, 1.0, 1.0)
    zeroed = CorrectionConfig(level="geometric", mode="band", threshold_low=0.99, threshold=1.01, normalize=True)
    assert float(gradient_divisor(zeroed, run(zeroed)[3])) == 1.0


@pytest.mark.parametrize(
    ("fields", "kept_sequences"),
    [
        # The mean k3 is (1.6137 + 0.3069) / 2 in sequence 1, (0.1931 + 0.6363) / 2 in sequence 0, and 0.0194 / 2 in 3.
        ({"reject_k3": 0.5}, {0, 3}),
        ({"reject_geometric_low": 0.9, "reject_geometric_high": 1.2}, {3}),  # the ratios are sqrt 8, sqrt 1/8, 1.1
        ({"reject_max_k3": 1.0}, {0, 3}),
        ({"reject_abs_ratio": 3.1}, {0, 1, 3}),
        ({"reject_abs_ratio": 2.9}, {3}),  # the means of exp(abs(lr)) are 3, 3 and 1.105
        ({"veto": 0.3}, {1, 3}),
        ({"reject_k3": 0.5, "veto": 0.3}, {3}),  # a sequence must pass all rules
        ({"reject_k3": 0.009}, set()),
    ],
)
def test_rejections_by_hand(fields, kept_sequences):
    config = CorrectionConfig(**fields)
    weights, kept, row, totals = run(config)
    np.testing.assert_array_equal(kept, MASK & np.isin(IDS, list(kept_sequences)))
    np.testing.assert_array_equal(weights, MASK)
    assert row["rejected_sequence_fraction"] == pytest.approx(1 - len(kept_sequences) / 3)
    assert row["rejected_token_fraction"] == pytest.approx(1 - len(kept_sequences) / 3)
    assert int(totals["sequence_count"]) == 3
    assert not config.is_off


def test_tokens_not_finite_count_and_follow_their_sequence():
    """Sequence 1 (passes) loses a token, 0 (fails) begins with a broken token, and 3 (nothing finite) is dropped."""
    rollout = ROLLOUT.copy()
    rollout[0, 1], rollout[0, 3], rollout[1, :2] = np.nan, -np.inf, np.nan
    logprobs = LOGPROBS.copy()
    logprobs[0, 0] = ROLLOUT[0, 0] + np.float32(0.01)
    weights, kept, row, totals = run(CorrectionConfig(preset="vexact"), logprobs, rollout)
    np.testing.assert_array_equal(kept, [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_allclose(weights[0], [np.exp(0.01), 0, 0, 0, 0.25, 0], rtol=1e-6)
    assert row["nonfinite_count"] == 4
    assert int(totals["weight_count"]) == 2
    assert row["rejected_sequence_fraction"] == pytest.approx(2 / 3)
    assert row["rejected_token_fraction"] == pytest.approx(4 / 6)
    assert all(np.isfinite(list(row.values())))
    weights, _, row, _ = run(CorrectionConfig(level="sequence", threshold=2.0), logprobs, rollout)
    np.testing.assert_allclose(weights[0], [np.exp(0.01), 0, 0, 0, 0.25, 0], rtol=1e-6)
    assert row["weight_mean"] == pytest.approx((np.exp(0.01) + 0.25) / 2, rel=1e-6)
    weights, kept, row, totals = run(CorrectionConfig(), logprobs, rollout)
    assert (kept == MASK).all()
    assert (weights == MASK).all()
    assert (row["nonfinite_count"], int(totals["weight_count"])) == (4, 2)


@pytest.mark.parametrize("preset", ["none", "vexact", "sequence_mis", "sequence_band", "abs_ratio"])
def test_nothing_in_the_mask_gives_zeros(preset):
    nan = np.full_like(LOGPROBS, np.nan)
    config = CorrectionConfig(preset=preset)
    weights, kept, row, totals = run(config, nan, nan, np.zeros_like(MASK))
    assert not weights.any()
    assert not kept.any()
    assert set(row.values()) == {0.0}
    assert float(gradient_divisor(CorrectionConfig(level="token", normalize=True), totals)) == 1.0
    full = run(config)[3]
    for merged in (merge(full, totals), merge(totals, full)):
        jax.tree.map(np.testing.assert_array_equal, merged, full)


def test_presets_fill_the_other_fields():
    """Score centering and the part stand beside a preset."""
    assert CorrectionConfig().is_off
    assert not CorrectionConfig(score_centering=True).is_off
    for name, fields in PRESETS.items():
        preset = CorrectionConfig(preset=name)
        assert preset.resolved() == CorrectionConfig(**fields)
        assert not preset.is_off
    for name, level, mode, low, high in (
        ("token_tis", "token", "truncate", 0.0, 2.0),
        ("token_mis", "token", "mask", 0.0, 2.0),
        ("sequence_tis", "sequence", "truncate", 0.0, 2.0),
        ("sequence_mis", "sequence", "mask", 0.0, 2.0),
        ("icepop", "token", "band", 0.5, 5.0),
        ("geometric_band", "geometric", "band", 0.99, 1.01),
        ("sequence_band", "geometric", "gate", 0.999, 1.002),
    ):
        expected = CorrectionConfig(level=level, mode=mode, threshold_low=low, threshold=high)
        assert CorrectionConfig(preset=name).resolved() == expected, name
    vexact = CorrectionConfig(preset="vexact", part="drift")
    assert vexact.resolved() == CorrectionConfig(level="token", threshold=2.0, reject_k3=1e-3, part="drift")
    rejected = [CorrectionConfig(preset=name).rejections for name in ("vexact", "max_k3", "abs_ratio")]
    assert rejected == [(("k3", 1e-3),), (("max_k3", 0.05),), (("abs_ratio", 2.0),)]
    centered = CorrectionConfig(preset="token_tis", score_centering=True)
    assert centered.resolved() == CorrectionConfig(**PRESETS["token_tis"], score_centering=True)
    assert centered.needs_tops
    assert not CorrectionConfig(preset="token_tis").needs_tops


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "tis"}, "preset must be one of .*, got 'tis'"),
        ({"preset": "icepop", "threshold": 3.0}, "'icepop' sets the other fields, got threshold as well"),
        ({"preset": "vexact", "normalize": True, "veto": 0.1}, "got normalize, veto as well"),
        ({"part": "numerics"}, "part 'numerics' does nothing without weights or a rejection"),
        ({"threshold": 3.0, "normalize": True}, "threshold, normalize do nothing at level 'none'"),
        ({"level": "token", "threshold": 0.0}, r"finite and above 0, got 0\.0"),
        ({"level": "token", "threshold": float("inf")}, "finite and above 0, got inf"),
        (
            {"level": "token", "threshold_low": 0.5},
            r"mode is band or gate, got 0\.5 with threshold 2\.0, mode truncate",
        ),
        ({"level": "token", "mode": "band", "threshold_low": 3.0}, r"got 3\.0 with threshold 2\.0, mode band"),
        ({"level": "token", "mode": "gate"}, "mode gate needs level sequence or geometric, got token"),
        ({"veto": float("nan")}, "veto must not be negative, got nan"),
        ({"reject_geometric_low": 0.9}, r"in 0 .. reject_geometric_high, got 0\.9 and 0\.0"),
        ({"reject_abs_ratio": 0.9}, r"reject_abs_ratio must be 0 or at least 1, got 0\.9"),
        ({"region_threshold": 0.1}, "do nothing without a region"),
        ({"region": "tv"}, r"region_threshold must be finite and above 0, got 0\.0"),
        ({"region": "smooth", "region_threshold": 1.0, "region_sides": "away"}, "region smooth has no sides"),
        ({"region": "kpop", "region_threshold": 1.0, "region_over": "tops"}, "region_over tops is for the regions tv"),
        ({"preset": "one_sided_tops_tv", "part": "drift"}, "region_over tops needs part whole, got drift"),
        ({"preset": "two_sided_tv", "region_threshold": 0.1}, "sets the other fields, got region_threshold as well"),
        ({"preset": "m2po", **CENTERED}, "score_centering cannot be combined with region moment"),
        ({"level": "sequence", **CENTERED}, "score_centering needs level token or none, got sequence"),
        ({"preset": "geometric_band", **CENTERED}, "score_centering needs level token or none, got geometric"),
        ({"preset": "vexact", **CENTERED}, "cannot be combined with a rejection of sequences, got reject_k3"),
        ({"veto": 0.1, "reject_max_k3": 1.0, **CENTERED}, "got veto, reject_max_k3"),
        ({"level": "token", "part": "drift", **CENTERED}, "score_centering needs part whole, got drift"),
    ],
)
def test_mistakes_are_quoted(fields, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**fields)
