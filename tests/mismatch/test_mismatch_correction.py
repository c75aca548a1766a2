"""Importance weights and rejection on both sides. tests/gold has equations 4-6, and tests/algorithms the presets."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.mismatch import importance_weights, read_tokens, rejection_mask
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
    ("level", "expected"),
    [
        ("token", [4.0, 0.5, 1.0, 3.0, 1 / 3]),
        ("sequence", [2.0, 2.0, 2.0, 1.0, 1.0]),
        ("geometric", [CUBE_ROOT, CUBE_ROOT, CUBE_ROOT, 1.0, 1.0]),
    ],
)
def test_tokens_of_an_environment_have_no_part_in_a_ratio(level, expected):
    """The tokens above have holes between and behind them. They come as rows, and packed into one row."""
    mask = np.array([[0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0]], np.int32)
    trainer, rollout = np.where(np.arange(7) % 2, -40.0, np.nan) + 0 * mask, np.zeros(mask.shape)
    trainer[mask == 1], rollout[mask == 1] = TRAINER[MASK == 1], ROLLOUT[MASK == 1]
    packed = {"sequence_ids": np.repeat([[0, 1]], 7, axis=1), "num_sequences": 2}
    for shape, where in ((mask.shape, {}), ((1, 14), packed)):
        arrays, sampled = [each.reshape(shape) for each in (trainer, rollout, mask)], mask.reshape(shape) == 1
        found, stats = importance_weights(*arrays, level=level, mode="truncate", threshold=9.0, **where)
        np.testing.assert_allclose(found[sampled], expected, rtol=1e-14)
        assert not found[~sampled].any()
        per_level = expected if level == "token" else [expected[0], expected[3]]
        assert stats["weight_mean"] == pytest.approx(np.mean(per_level))
        assert stats["nonfinite_count"] == 0
        kept, stats = rejection_mask(*arrays, statistic="geometric", threshold=(0.9, 1.1), **where)
        assert kept[sampled].tolist() == [0, 0, 0, 1, 1]
        assert not kept[~sampled].any()
        assert kept.dtype == mask.dtype
        assert stats["rejected_token_fraction"] == pytest.approx(3 / 5)


def test_bounds_are_included_and_exponents_clipped_at_twenty():
    """The exponentials of 1 and -1 meet the bounds exactly."""
    for mode, threshold in (("mask", math.exp(1.0)), ("band", (math.exp(-1.0), math.exp(1.0)))):
        lr = np.array([[1.0, -1.0, 1.0 + 1e-9]])
        given = lr, np.zeros((1, 3)), np.ones((1, 3))
        found, stats = importance_weights(*given, level="token", mode=mode, threshold=threshold)
        np.testing.assert_array_equal(found, [[math.exp(1.0), math.exp(-1.0), 0.0]])
        assert stats["changed_fraction"] == pytest.approx(1 / 3)
    given = np.array([[1.0, 1.0], [1.0, 1.1]]), np.zeros((2, 2)), np.ones((2, 2))
    kept, _ = rejection_mask(*given, statistic="geometric", threshold=(0.5, math.exp(1.0)))
    np.testing.assert_array_equal(kept, [[1, 1], [0, 0]])
    given = np.array([[15.0, 15.0], [-300.0, 1.0]]), np.zeros((2, 2)), np.ones((2, 2))
    found, _ = importance_weights(*given, level="sequence", mode="mask", threshold=1e9)
    np.testing.assert_allclose(found, np.exp([[20.0, 20.0], [-20.0, -20.0]]), rtol=1e-14)
    # A veto far below exp(-20) is no clipped one.
    assert rejection_mask(*given, statistic="veto", threshold=1e-10)[1]["rejected_sequence_fraction"] == 0.5


def test_normalize_divides_by_the_mean_of_its_level():
    raw, _ = weights(level="token", mode="truncate", threshold=2.0)
    found, stats = weights(level="token", mode="truncate", threshold=2.0, normalize=True)
    np.testing.assert_allclose(found, raw / (raw.sum() / 5), rtol=1e-14)
    assert stats["weight_mean"] == pytest.approx(raw.sum() / 5)
    found, _ = weights(level="sequence", mode="truncate", threshold=9.0, normalize=True)
    np.testing.assert_allclose(found, [[2 / 1.5] * 3, [1 / 1.5] * 2 + [0], [0, 0, 0]], rtol=1e-14)
    found, stats = weights(level="token", mode="mask", threshold=0.1, normalize=True)
    assert not found.any()
    assert stats["weight_mean"] == stats["effective_sample_size"] == 0.0


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


@pytest.mark.parametrize("xp", [np, jnp])
def test_importance_statistics_by_hand(xp):
    found = importance(*map(xp.asarray, (TRAINER, ROLLOUT, MASK)), threshold=1.9)
    levels = {"token": RATIO[MASK == 1], "sequence": np.array([2.0, 1.0]), "geometric": np.array([CUBE_ROOT, 1.0])}
    expected = {}
    for level, ratio in levels.items():
        expected |= {f"{level}_ratio_mean": ratio.mean(), f"{level}_ratio_max": ratio.max()}
        expected |= {f"{level}_ratio_min": ratio.min(), f"{level}_fraction_below": (ratio < 1 / 1.9).mean()}
        expected |= {f"{level}_effective_sample_size": ratio.mean() ** 2 / (ratio**2).mean()}
        expected |= {f"{level}_fraction_above": (ratio > 1.9).mean()}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)
    nothing = importance(*map(xp.asarray, (TRAINER, ROLLOUT, np.zeros_like(MASK))), threshold=2.0)
    assert nothing == dict.fromkeys(nothing, 0.0)
    # Tiny ratios have a mean and a sample size.
    lr = np.array([[-17.0], [-19.0], [-19.0]])
    ratio, found = np.exp(lr), importance(xp.asarray(lr), xp.zeros((3, 1)), xp.ones((3, 1)), threshold=2.0)
    assert float(found["sequence_ratio_mean"]) == pytest.approx(ratio.mean(), rel=1e-5)
    size = ratio.mean() ** 2 / (ratio**2).mean()
    assert float(found["sequence_effective_sample_size"]) == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "row", "mode": "mask", "threshold": 2}, r"level must be one of .*'geometric'\), got 'row'"),
        ({"level": "token", "mode": "band", "threshold": 2}, r"a band needs threshold=\(lo, hi\) .*, got 2"),
        ({"level": "token", "mode": "band", "threshold": (2, 1)}, r"0 <= lo <= hi, got \(2, 1\)"),
        ({"level": "token", "mode": "mask", "threshold": (1, 2)}, r"one number above 0, got \(1, 2\)"),
        ({"level": "token", "mode": "truncate", "threshold": math.nan}, "one number above 0, got nan"),
        ({"statistic": "k2", "threshold": 1.0}, r"statistic must be one of \('k3', .*'veto'\), got 'k2'"),
        ({"threshold": 0.5}, r"threshold must be at least 1, got 0\.5"),
    ],
)
def test_mistakes_say_what_was_expected(options, message):
    call = importance_weights if "level" in options else rejection_mask if "statistic" in options else importance
    with pytest.raises(ValueError, match=message):
        call(TRAINER, ROLLOUT, MASK, **options)
