"""Every kind of number in a statistic merges by its own rule, and zeros change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.mismatch import Statistics, merge, mismatch_statistics, read_tokens, zeros
from rljax.mismatch.accurate import Total, total_over
from rljax.mismatch.metrics import finalize_mismatch
from rljax.mismatch.statistics import moments_of


def of(values):
    """Returns statistics of numbers [n], with one of each kind."""
    xp = jnp if isinstance(values, jax.Array) else np
    pairs = xp.stack([values, values**2])[:, None]
    return Statistics(
        sums={"count": xp.asarray(values.size), "sum": values.sum()},
        maxima={"max": values.max()},
        minima={"min": values.min()},
        totals={"total": total_over(xp, values[None], (0, 1))},
        moments={"moments": moments_of(xp, pairs, xp.ones(pairs.shape[1:], bool))},
    )


@pytest.mark.parametrize("xp", [np, jnp])
def test_every_kind_merges(xp):
    merged = merge({"a": of(xp.asarray([1.0, -2.0]))}, {"a": of(xp.asarray([4.0, 0.5, 6.0]))})["a"]
    assert (merged["count"], merged["sum"], merged["max"], merged["min"], merged["total"]) == (5, 9.5, 6.0, -2.0, 9.5)
    x = np.array([1.0, -2.0, 4.0, 0.5, 6.0])
    moments = merged["moments"]
    assert int(moments.count) == 5
    np.testing.assert_allclose(moments.mean, [x.mean(), (x**2).mean()], rtol=1e-6)
    np.testing.assert_allclose(moments.spread, 5 * np.cov(x, x**2, bias=True), rtol=1e-6)
    assert float(merged.mean("sum", "count")) == pytest.approx(1.9)


def test_zeros_change_nothing():
    found = of(jnp.asarray([1.0, -2.0]))
    nothing = zeros(jax.eval_shape(of, jnp.zeros(2)))
    for merged in (merge(nothing, found), merge(found, nothing)):
        jax.tree.map(np.testing.assert_array_equal, merged, found)
    assert float(nothing.mean("sum", "count")) == float(nothing.extreme("max", "count")) == 0.0


def test_numbers_on_the_host_are_finished_in_float64():
    third = np.float32(1) / np.float32(3)
    statistics = Statistics({"count": np.int32(3), "sum": third}, totals={"total": Total(np.float32(1), third * 1e-9)})
    assert statistics.mean("sum", "count") == np.float64(third) / 3
    assert statistics["total"] == 1 + np.float64(np.float32(third * 1e-9))


def test_other_names_do_not_merge():
    with pytest.raises(ValueError, match=r"must hold the same names, got \['a'\] and \['b'\]"):
        merge(Statistics({"a": 1}), Statistics({"b": 1}))


def test_two_million_tokens_in_256_micro_batches():
    """Plain sums of one sign keep six digits. Two floats keep six digits of a sum that cancels 500 times and more."""
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.5, (256, 4, 2048)).astype(np.float32)
    trainer = (rollout + 1e-2 * rng.standard_normal(rollout.shape)).astype(np.float32)

    def measured(pair):
        return mismatch_statistics(read_tokens(*pair, jnp.ones(pair[0].shape, bool)))

    @jax.jit
    def scanned(pairs):
        start = zeros(jax.eval_shape(measured, jax.tree.map(lambda array: array[0], pairs)))
        return jax.lax.scan(lambda total, pair: (merge(total, measured(pair)), None), start, pairs)[0]

    found = finalize_mismatch(jax.device_get(scanned((jnp.asarray(trainer), jnp.asarray(rollout)))))
    lr = (trainer - rollout).astype(np.float64)
    expected = {"kl": -lr.mean(), "logprob_abs_diff_mean": abs(lr).mean(), "k3_kl": (np.expm1(lr) - lr).mean()}
    assert abs(lr).mean() > 500 * abs(expected["kl"])
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-11)
    assert found["logprob_abs_diff_mean"] == pytest.approx(expected["logprob_abs_diff_mean"], rel=5e-7)
    assert found["k3_kl"] == pytest.approx(expected["k3_kl"], rel=5e-7)
