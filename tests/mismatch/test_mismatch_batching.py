"""The statistics are the same however a batch is cut into micro-batches, packed into rows or merged."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljax.mismatch import merge, mismatch_statistics, read_tokens
from rljax.mismatch.correction import finalize_importance, importance_statistics
from rljax.mismatch.metrics import finalize_mismatch

T = 24
ROWS, ROW_LENGTH = 4, 48
MAX_SEQUENCES = 8


@st.composite
def batches(draw):
    """Draws up to 8 sequences of up to 24 tokens.

    Log-ratios have one scale, and there are holes, empty ones and broken tokens.
    """
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
    trainer, rollout, mask, _ = data.draw(batches())

    def of(part):
        return importance_statistics(read_tokens(trainer[part], rollout[part], mask[part]))

    merged = functools.reduce(merge, map(of, cut(data.draw, len(mask))))
    whole = finalize_importance(of(slice(None)))
    assert finalize_importance(merged) == pytest.approx(whole, rel=1e-11)
