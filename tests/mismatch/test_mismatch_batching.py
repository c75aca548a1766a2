"""Statistics merge by their own rules, and are the same however a batch is cut, packed into rows or merged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljax.mismatch import Statistics, merge, mismatch_statistics, read_tokens, zeros
from rljax.mismatch.accurate import Total, total_over
from rljax.mismatch.correction import finalize_importance, importance_statistics
from rljax.mismatch.metrics import finalize_mismatch
from rljax.mismatch.statistics import moments_of

T = 24
ROWS, ROW_LENGTH = 4, 48
MAX_SEQUENCES = 8


@st.composite
def batches(draw):
    """Draws up to 8 sequences of up to 24 tokens, with holes and broken tokens. Log-ratios have one scale."""
    seed = draw(st.integers(0, 2**32 - 1))
    scale = draw(st.sampled_from([1e-4, 1e-2, 1.0]))
    lengths = draw(st.lists(st.integers(0, T), min_size=1, max_size=MAX_SEQUENCES))
    rng = np.random.default_rng(seed)
    shape = (len(lengths), T)
    rollout = -rng.exponential(0.7, shape).astype(np.float32)
    trainer = (rollout + scale * rng.standard_normal(shape)).astype(np.float32)
    mask = (np.arange(T) < np.array(lengths)[:, None]) & (rng.random(shape) < 0.9)
    if draw(st.booleans()):
        trainer[rng.random(shape) < 0.03] = draw(st.sampled_from([np.nan, -np.inf, np.inf]))
    entropy = rng.exponential(0.5, shape).astype(np.float32)
    return trainer, rollout, mask, entropy


def pack(draw, arrays, mask):
    """Puts whole sequences into rows of 48 tokens, at drawn rows and gaps. Ids outside the mask have no meaning."""
    order = draw(st.permutations(range(len(mask))))
    rows = [np.zeros((ROWS, ROW_LENGTH), array.dtype) for array in arrays]
    packed_mask = np.zeros((ROWS, ROW_LENGTH), bool)
    ids = np.full((ROWS, ROW_LENGTH), draw(st.integers(-3, MAX_SEQUENCES + 3)), np.int32)
    filled = [0] * ROWS
    for sequence in order:
        length = int(np.max(np.flatnonzero(mask[sequence]), initial=-1)) + 1
        fitting = [row for row in range(ROWS) if filled[row] + length <= ROW_LENGTH]
        assume(fitting)  # eight of the longest fill all rows, if there are no gaps
        row = draw(st.sampled_from(fitting))
        start = filled[row] + draw(st.integers(0, min(3, ROW_LENGTH - filled[row] - length)))
        place = slice(start, start + length)
        for target, array in zip(rows, arrays, strict=True):
            target[row, place] = array[sequence, :length]
        packed_mask[row, place] = mask[sequence, :length]
        ids[row, place] = np.where(mask[sequence, :length], sequence, ids[row, place])
        filled[row] = start + length
    return rows, packed_mask, ids


def assert_same(found, expected, tolerance, quantile_tolerance):
    """Checks that values agree within ``tolerance`` of the value, or of the numbers that cancelled in it."""
    scale = max(float(expected["logprob_abs_diff_mean"]), 1e-30)
    cancelling = {"kl", "log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "log_ppl_abs_diff", "training_log_ppl"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = max(abs(float(value)), scale) if name in cancelling else abs(float(value))
        if name in ("log_ppl_abs_diff_sum", "chi2_seq", "chi2_token"):
            size = max(size, scale * (1 + float(expected["token_count"])))
        if name == "slope_per_1k":
            size = max(size, 1000 * scale)
        bound = quantile_tolerance if "_p99" in name else tolerance
        assert abs(float(found[name]) - float(value)) <= bound * size + 1e-12, (name, float(found[name]), float(value))


def cut(draw, rows):
    """Cuts rows into parts and shuffles the parts."""
    edges = sorted(draw(st.sets(st.integers(1, max(rows - 1, 1)), max_size=rows)))
    parts = [part for part in np.split(np.arange(rows), edges) if part.size]
    return draw(st.permutations(parts))


def packed_statistics(trainer, rollout, mask, entropy, ids):
    tokens = read_tokens(trainer, rollout, mask, sequence_ids=ids, num_sequences=MAX_SEQUENCES)
    return mismatch_statistics(tokens, entropy)


packed_on_device = jax.jit(packed_statistics)
merge_on_device = jax.jit(merge)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_packed_and_merged_parts_equal_the_whole(on_device, data):
    """The batch is packed in parts, which are merged in any order. It is compared with plain rows on the host."""
    trainer, rollout, mask, entropy = data.draw(batches())
    whole = mismatch_statistics(read_tokens(trainer, rollout, mask), entropy)
    measure, combine = (packed_on_device, merge_on_device) if on_device else (packed_statistics, merge)
    halves = np.split(np.arange(len(mask)), [len(mask) // 2])
    parts = []
    for part in data.draw(st.permutations(halves)) if on_device else cut(data.draw, len(mask)):
        rows, packed_mask, ids = pack(data.draw, (trainer[part], rollout[part], entropy[part]), mask[part])
        parts.append(measure(rows[0], rows[1], packed_mask, rows[2], ids))
    merged = functools.reduce(combine, parts)
    merged = jax.device_get(merged) if on_device else merged
    found, expected = finalize_mismatch(merged), finalize_mismatch(whole)
    assert all(type(value) is float for value in found.values())
    if on_device:
        # A correlation of nearly constant probabilities is as uncertain as float32 makes the probabilities.
        assert found.pop("pearson_corr") == pytest.approx(expected.pop("pearson_corr"), abs=1e-6)
        assert_same(found, expected, 2e-6, 0.0101)
    else:
        np.testing.assert_array_equal(merged["histogram"], whole["histogram"])
        assert_same(found, expected, 1e-11, 1e-11)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_importance_statistics_merge_in_any_order(data):
    arrays = data.draw(batches())[:3]
    parts = [slice(None), *cut(data.draw, len(arrays[0]))]
    whole, *each = (importance_statistics(read_tokens(*(array[part] for array in arrays))) for part in parts)
    merged = finalize_importance(functools.reduce(merge, each))
    assert merged == pytest.approx(finalize_importance(whole), rel=1e-11)


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


def test_zeros_change_nothing_and_other_names_do_not_merge():
    found = of(jnp.asarray([1.0, -2.0]))
    nothing = zeros(jax.eval_shape(of, jnp.zeros(2)))
    for merged in (merge(nothing, found), merge(found, nothing)):
        jax.tree.map(np.testing.assert_array_equal, merged, found)
    assert float(nothing.mean("sum", "count")) == float(nothing.extreme("max", "count")) == 0.0
    with pytest.raises(ValueError, match=r"must hold the same names, got \['a'\] and \['b'\]"):
        merge(Statistics({"a": 1}), Statistics({"b": 1}))


def test_numbers_on_the_host_are_finished_in_float64():
    third = np.float32(1) / np.float32(3)
    statistics = Statistics({"count": np.int32(3), "sum": third}, totals={"total": Total(np.float32(1), third * 1e-9)})
    assert statistics.mean("sum", "count") == np.float64(third) / 3
    assert statistics["total"] == 1 + np.float64(np.float32(third * 1e-9))


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
