"""Importance weights and rejection are compared with numbers by hand and an independent text of equations 4-6."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.mismatch import importance_weights, mismatch_metrics, read_tokens, rejection_mask
from rljax.mismatch.correction import finalize_importance, importance_statistics

# Two sequences have three and two tokens, and the third row is empty. The token ratios are 4, 1/2, 1 and 3, 1/3, with
# products 2 and 1.
RATIO = np.array([[4.0, 0.5, 1.0], [3.0, 1 / 3, 9.0], [5.0, 5.0, 5.0]])
MASK = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
ROLLOUT = np.log(np.array([[0.1, 0.4, 0.5], [0.2, 0.6, 0.1], [0.1, 0.1, 0.1]]))
TRAINER = ROLLOUT + np.log(RATIO)
CUBE_ROOT = 2 ** (1 / 3)


def importance(*arrays, threshold):
    return finalize_importance(importance_statistics(read_tokens(*arrays), threshold))


def weights(**options):
    return importance_weights(TRAINER, ROLLOUT, MASK, **options)


@pytest.mark.parametrize(
    ("level", "mode", "threshold", "expected"),
    [
        ("token", "truncate", 2.0, [[2, 0.5, 1], [2, 1 / 3, 0], [0, 0, 0]]),
        ("token", "mask", 2.0, [[0, 0.5, 1], [0, 1 / 3, 0], [0, 0, 0]]),
        ("token", "band", (0.5, 5.0), [[4, 0.5, 1], [3, 0, 0], [0, 0, 0]]),
        ("sequence", "truncate", 1.5, [[1.5, 1.5, 1.5], [1, 1, 0], [0, 0, 0]]),
        ("sequence", "mask", 1.5, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("sequence", "band", (1.5, 3.0), [[2, 2, 2], [0, 0, 0], [0, 0, 0]]),
        ("geometric", "truncate", 1.1, [[1.1, 1.1, 1.1], [1, 1, 0], [0, 0, 0]]),
        ("geometric", "mask", 2.0, [[CUBE_ROOT] * 3, [1, 1, 0], [0, 0, 0]]),
        ("geometric", "band", (0.99, 1.01), [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
    ],
)
def test_hand_worked_weights(level, mode, threshold, expected):
    found, stats = weights(level=level, mode=mode, threshold=threshold)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    flat = np.array(expected)[MASK == 1] if level == "token" else np.array([expected[0][0], expected[1][0]])
    assert stats["weight_mean"] == pytest.approx(flat.mean())
    assert stats["weight_max"] == pytest.approx(flat.max())
    assert stats["effective_sample_size"] == pytest.approx(flat.mean() ** 2 / (flat**2).mean())
    assert all(type(value) is float for value in stats.values())


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [4.0, 0.5, 1.0, 3.0, 1 / 3]),
        ("sequence", [2.0, 2.0, 2.0, 1.0, 1.0]),
        ("geometric", [CUBE_ROOT, CUBE_ROOT, CUBE_ROOT, 1.0, 1.0]),
    ],
)
@pytest.mark.parametrize("fill", [0.0, -40.0, np.nan])
def test_tokens_of_an_environment_have_no_part_in_a_ratio(level, expected, fill):
    """The tokens above have holes between and behind them. They come as rows, and packed into one row."""
    mask = np.array([[0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0]], bool)
    trainer, rollout = (np.full(mask.shape, value) for value in (fill, 0.0))
    trainer[mask], rollout[mask] = TRAINER[MASK == 1], ROLLOUT[MASK == 1]
    options = {"level": level, "mode": "truncate", "threshold": 9.0}
    packed = {"sequence_ids": np.repeat([[0, 1]], 7, axis=1), "num_sequences": 2}
    for arrays, where in (
        ((trainer, rollout, mask), {}),
        ([each.reshape(1, 14) for each in (trainer, rollout, mask)], packed),
    ):
        found, stats = importance_weights(*arrays, **options, **where)
        np.testing.assert_allclose(found[arrays[2]], expected, rtol=1e-14)
        assert not found[~arrays[2]].any()
        per_level = expected if level == "token" else [expected[0], expected[3]]
        assert stats["weight_mean"] == pytest.approx(np.mean(per_level))
        assert stats["nonfinite_count"] == 0
        kept, stats = rejection_mask(*arrays, statistic="geometric", threshold=(0.9, 1.1), **where)
        assert kept[arrays[2]].tolist() == [False, False, False, True, True]
        assert not kept[~arrays[2]].any()
        assert stats["rejected_token_fraction"] == pytest.approx(3 / 5)


def test_bounds_are_included():
    # log 2 and its halves are exact multiples, so these ratios meet the bounds exactly.
    for mode, threshold in (("mask", math.exp(1.0)), ("band", (math.exp(-1.0), math.exp(1.0)))):
        found, stats = importance_weights(
            np.array([[1.0, -1.0, 1.0 + 1e-9]]), np.zeros((1, 3)), np.ones((1, 3)), level="token", mode=mode,
            threshold=threshold,
        )  # fmt: skip
        np.testing.assert_array_equal(found, [[math.exp(1.0), math.exp(-1.0), 0.0]])
        assert stats["changed_fraction"] == pytest.approx(1 / 3)
    kept, _ = rejection_mask(
        np.array([[1.0, 1.0], [1.0, 1.1]]), np.zeros((2, 2)), np.ones((2, 2)), statistic="geometric",
        threshold=(0.5, math.exp(1.0)),
    )  # fmt: skip
    np.testing.assert_array_equal(kept, [[1, 1], [0, 0]])


def test_normalize_divides_by_the_mean_of_its_level():
    raw, stats = weights(level="token", mode="truncate", threshold=2.0)
    found, _ = weights(level="token", mode="truncate", threshold=2.0, normalize=True)
    np.testing.assert_allclose(found, raw / (raw.sum() / 5), rtol=1e-14)
    assert stats["weight_mean"] == pytest.approx(raw.sum() / 5)
    found, _ = weights(level="sequence", mode="truncate", threshold=9.0, normalize=True)
    np.testing.assert_allclose(found, [[2 / 1.5] * 3, [1 / 1.5] * 2 + [0], [0, 0, 0]], rtol=1e-14)
    found, stats = weights(level="token", mode="mask", threshold=0.1, normalize=True)
    assert not found.any()
    assert stats["weight_mean"] == stats["effective_sample_size"] == 0.0


def test_the_exponent_is_clipped_at_twenty():
    lr = np.array([[15.0, 15.0], [-300.0, 1.0]])
    found, _ = importance_weights(lr, np.zeros_like(lr), np.ones_like(lr), level="sequence", mode="mask", threshold=1e9)
    np.testing.assert_allclose(found, np.exp([[20.0, 20.0], [-20.0, -20.0]]), rtol=1e-14)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_device_equals_host_without_gradient_under_jit(level):
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.7, (6, 200)).astype(np.float32)
    trainer = (rollout + 0.05 * rng.standard_normal((6, 200))).astype(np.float32)
    mask = rng.random((6, 200)) < 0.8
    trainer[2, 3] = np.nan
    options = {"level": level, "mode": "band", "threshold": (0.9, 1.1), "normalize": True}
    expected, expected_stats = importance_weights(trainer, rollout, mask, **options)
    jitted = jax.jit(partial(importance_weights, **options))
    found, stats = jitted(*map(jnp.asarray, (trainer, rollout, mask)))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert expected[2, 3] == 0
    for name, value in expected_stats.items():
        assert float(stats[name]) == pytest.approx(value, rel=2e-6), name
    clean = jnp.nan_to_num(trainer)
    weighted = jax.grad(lambda x: jnp.sum(jitted(x, rollout, mask)[0] * x))(clean)
    np.testing.assert_array_equal(weighted, jitted(clean, rollout, mask)[0])
    assert not np.any(jax.grad(lambda x: jnp.sum(jitted(x, rollout, mask)[0]))(clean))


def k3(x):
    return math.exp(x) - 1 - x


def test_hand_worked_rejection():
    lr = np.array([[0.1, -0.1, 0.0], [0.3, 0.0, 0.0], [-3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]], np.int32)
    reject = partial(rejection_mask, lr, np.zeros_like(lr), mask)
    kept, stats = reject(statistic="k3", threshold=k3(0.3) / 2 + 1e-12)
    np.testing.assert_array_equal(kept, mask * [[1], [1], [0], [0]])
    assert kept.dtype == mask.dtype
    assert stats["rejected_sequence_fraction"] == pytest.approx(1 / 3)
    assert stats["rejected_token_fraction"] == pytest.approx(2 / 7)
    kept, _ = reject(statistic="k3", threshold=k3(0.3) / 2 - 1e-12)
    np.testing.assert_array_equal(kept, mask * [[1], [0], [0], [0]])
    kept, _ = reject(statistic="geometric", threshold=(0.9, math.exp(0.15) + 1e-12))
    np.testing.assert_array_equal(kept, mask * [[1], [1], [0], [0]])
    kept, _ = reject(statistic="veto", threshold=math.exp(-3) + 1e-9)
    np.testing.assert_array_equal(kept, mask * [[1], [1], [0], [0]])
    far = rejection_mask(lr - 100.0, np.zeros_like(lr), mask, statistic="veto", threshold=1e-10)[1]
    assert far["rejected_sequence_fraction"] == 1
    kept, stats = reject(statistic="veto", threshold=math.exp(-3) - 1e-9)
    np.testing.assert_array_equal(kept, mask)
    assert stats["rejected_sequence_fraction"] == 0


def test_importance_statistics_by_hand():
    found = importance(TRAINER, ROLLOUT, MASK, threshold=1.9)
    token = RATIO[MASK == 1]
    levels = {"token": token, "sequence": np.array([2.0, 1.0]), "geometric": np.array([CUBE_ROOT, 1.0])}
    for level, ratio in levels.items():
        assert found[f"{level}_ratio_mean"] == pytest.approx(ratio.mean())
        assert found[f"{level}_ratio_max"] == pytest.approx(ratio.max())
        assert found[f"{level}_ratio_min"] == pytest.approx(ratio.min())
        assert found[f"{level}_fraction_below"] == pytest.approx((ratio < 1 / 1.9).mean())
        assert found[f"{level}_effective_sample_size"] == pytest.approx(ratio.mean() ** 2 / (ratio**2).mean())
        assert found[f"{level}_fraction_above"] == pytest.approx((ratio > 1.9).mean())
    assert len(found) == 18


def test_importance_statistics_on_the_device_and_of_nothing():
    found = jax.jit(partial(importance, threshold=1.9))(*map(jnp.asarray, (TRAINER, ROLLOUT, MASK)))
    expected = importance(TRAINER.astype(np.float32), ROLLOUT.astype(np.float32), MASK, threshold=1.9)
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-6), name
    nothing = importance(TRAINER, ROLLOUT, np.zeros_like(MASK), threshold=2.0)
    assert nothing == dict.fromkeys(nothing, 0.0)


@pytest.mark.parametrize("xp", [np, jnp])
def test_tiny_ratios_have_a_mean_and_a_sample_size(xp):
    lr = np.array([[-17.0], [-19.0], [-19.0]])
    ratio, found = np.exp(lr), importance(xp.asarray(lr), xp.zeros((3, 1)), xp.ones((3, 1)), threshold=2.0)
    assert float(found["sequence_ratio_mean"]) == pytest.approx(ratio.mean(), rel=1e-5)
    size = ratio.mean() ** 2 / (ratio**2).mean()
    assert float(found["sequence_effective_sample_size"]) == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "row", "mode": "mask", "threshold": 2}, r"level must be one of .*'geometric'\), got 'row'"),
        ({"level": "token", "mode": "clip", "threshold": 2}, r"mode must be one of .*, got 'clip'"),
        ({"level": "token", "mode": "band", "threshold": 2}, r"a band needs threshold=\(lo, hi\) .*, got 2"),
        ({"level": "token", "mode": "band", "threshold": (2, 1)}, r"0 <= lo <= hi, got \(2, 1\)"),
        ({"level": "token", "mode": "mask", "threshold": (1, 2)}, r"one number above 0, got \(1, 2\)"),
        ({"level": "token", "mode": "truncate", "threshold": 0.0}, "one number above 0, got 0.0"),
        ({"level": "token", "mode": "truncate", "threshold": math.nan}, "one number above 0, got nan"),
    ],
)
def test_mistakes_in_weights_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        weights(**options)


def test_mistakes_in_rejections_say_what_was_expected():
    named = r"statistic must be one of \('k3', 'max_k3', 'abs_ratio', 'geometric', 'veto'\), got 'k2'"
    with pytest.raises(ValueError, match=named):
        rejection_mask(TRAINER, ROLLOUT, MASK, statistic="k2", threshold=1.0)
    with pytest.raises(ValueError, match="a band needs"):
        rejection_mask(TRAINER, ROLLOUT, MASK, statistic="geometric", threshold=1.0)
    with pytest.raises(ValueError, match=r"threshold must be at least 1, got 0\.5"):
        importance(TRAINER, ROLLOUT, MASK, threshold=0.5)


@pytest.mark.parametrize("xp", [np, jnp])
def test_in_packed_rows_nonfinite_tokens_follow_their_sequence(xp):
    """Sequences 0 and 2 are kept, though 2 lost its first and last token.

    1 is rejected (ratio e^2), and 3 has no finite token.
    """
    gap = np.array([[0.0, 0.0, np.nan, 2.0, 2.0, -np.inf, 0.0, np.nan, np.nan, -np.inf]])
    ids = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 3, 3]])
    mask, stats = rejection_mask(
        xp.asarray(gap - 1.0),
        xp.asarray(np.full(gap.shape, -1.0)),
        xp.asarray(np.ones(gap.shape, bool)),
        statistic="k3",
        threshold=0.5,
        sequence_ids=xp.asarray(ids),
        num_sequences=4,
    )
    assert np.asarray(mask).tolist() == [[True, True, False, False, False, True, True, True, False, False]]
    assert float(stats["rejected_sequence_fraction"]) == 0.5
    assert float(stats["nonfinite_count"]) == 5


# top_p = 0.8 keeps two of three tokens. The sample has their proportions: 0.5 / 0.8 and 0.3 / 0.8 of eight tokens.
POLICY = np.asarray([0.5, 0.3, 0.2])
KEPT = np.asarray([True, True, False])
MASS = 0.8
SAMPLED = np.asarray([[0] * 5 + [1] * 3])
RAW, PROCESSED = np.log(POLICY), np.log(np.where(KEPT, POLICY / MASS, 1.0))


@pytest.mark.parametrize(
    ("trainer", "rollout", "ratio", "seen"),
    [
        # Before the cut the ratio is 1 and hides it: the sampled mean of 1[token 0] is 5/8 of the cut policy, not 1/2.
        (RAW, RAW, 1.0, [5 / 8, 3 / 8, 0.0]),
        # After the cut the sample gives the sum of pi f over the kept tokens: token 2 with 0.2 of the mass is missed.
        (RAW, PROCESSED, MASS, [0.5, 0.3, 0.0]),
        (PROCESSED, PROCESSED, 1.0, [5 / 8, 3 / 8, 0.0]),  # a trainer with the same cut has no bias
    ],
)
def test_the_ratio_is_the_mass_that_a_cut_of_one_side_leaves(trainer, rollout, ratio, seen):
    sides = trainer[SAMPLED], rollout[SAMPLED], np.ones(SAMPLED.shape, bool)
    weights, _ = importance_weights(*sides, level="token", mode="truncate", threshold=2.0)
    found = mismatch_metrics(*sides)
    np.testing.assert_allclose(weights, ratio)
    assert found["kl"] == found["log_ppl_abs_diff"] == pytest.approx(-np.log(ratio))
    assert found["k3_kl"] == pytest.approx(ratio - 1 - np.log(ratio), abs=0 if ratio == 1.0 else 1e-12)
    assert [np.mean(weights * (token == SAMPLED)) for token in range(3)] == pytest.approx(seen)
