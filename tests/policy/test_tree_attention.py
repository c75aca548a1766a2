"""Attention of rows of trees has float64's values and gradients, and a token sees its path alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import INTERPRETED, SMALL_BLOCKS, check_trees, ends_of, heads, tree_gradients

from rljax.policy.attention import packed_attention, path_mask
from rljax.policy.flash import seen_blocks
from rljax.policy.score import segment_ends
from rljax.policy.splash import calls_of_trees

LEAF = ()
TWO_LEVELS = [
    [(60, [(30, LEAF), (1, LEAF), (100, LEAF)]), (50, LEAF)],
    [(1, [(2, LEAF), (140, LEAF)]), (5, [(80, LEAF), (70, LEAF)])],
    [],
]
DEEPER = [
    [(10, [(20, [(5, LEAF), (7, [(3, LEAF), (9, LEAF)])]), (6, LEAF)]), (12, LEAF)],
    [(1, [(1, [(1, [(1, [(30, LEAF), (40, LEAF)]), (2, LEAF)])])]), (3, LEAF)],
]
SPLASH = functools.partial(INTERPRETED, trees=True)


def rows_of(trees, t):
    return np.stack([ends_of(t, each) for each in trees])


def test_the_mask_by_hand():
    # A root of one token has a branch of two and a branch of one; another tree of one token follows, and padding.
    mask = path_mask(jnp.asarray(ends_of(6, [(1, [(2, LEAF), (1, LEAF)]), (1, LEAF)]))[None])[0]
    seen = ["".join(str(int(x)) for x in query) for query in mask]
    assert seen == ["100000", "110000", "111000", "100100", "000010", "000000"]


@pytest.mark.parametrize("attention", [packed_attention, SMALL_BLOCKS], ids=["in one piece", "in blocks"])
@pytest.mark.parametrize("trees", [TWO_LEVELS, DEEPER], ids=["two levels", "deeper"])
def test_values_and_gradients_are_those_of_float64(attention, trees):
    check_trees(attention, rows_of(trees, 300))


@pytest.mark.slow
def test_the_kernel_of_a_tpu_joins_two_calls():
    check_trees(SPLASH, rows_of(TWO_LEVELS, 300), head_dim=16)


@pytest.mark.parametrize(
    "attention", [SMALL_BLOCKS, pytest.param(SPLASH, marks=pytest.mark.slow)], ids=["blocks", "splash"]
)
def test_nothing_of_a_branch_reaches_another(attention):
    ends = rows_of([[(20, [(60, LEAF), (50, LEAF)]), (40, LEAF)]], 256)
    arrays = heads(ends, "bfloat16", head_dim=16)
    changed = np.zeros(256, bool)
    changed[20:80] = True  # the first branch
    others = [np.where(changed[None, :, None, None], x * 3 + 1, x).astype(x.dtype) for x in arrays]
    before, after = (tree_gradients(attention, x, ends)[0] for x in (arrays, others))
    np.testing.assert_array_equal(before[:, ~changed], after[:, ~changed])
    assert not np.array_equal(before, after)


def test_blocks_that_no_query_sees_are_skipped():
    ends = jnp.asarray(ends_of(64, [(16, [(16, LEAF), (16, LEAF)]), (16, LEAF)]))
    below = np.tril(seen_blocks(ends.reshape(-1, 16))).astype(int)
    assert below.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    nodes, roots = calls_of_trees(ends, 16)
    assert jnp.tril(nodes.seen).tolist() == np.eye(4, dtype=bool).tolist()
    assert jnp.argwhere(roots.seen).tolist() == [[1, 0], [2, 0]]


def test_sequences_that_share_nothing_are_trees():
    segments = np.repeat([[1, 2, 3, 0]], [5, 1, 7, 3], axis=1)
    ends = segment_ends(segments)
    assert ends.tolist() == [[5] * 5 + [6] + [13] * 7 + [0] * 3]
    same = (segments[:, :, None] == segments[:, None, :]) & np.tri(16, dtype=bool) & (segments > 0)[:, :, None]
    np.testing.assert_array_equal(path_mask(ends), same)
    assert jax.jit(segment_ends)(segments).dtype == jnp.int32
