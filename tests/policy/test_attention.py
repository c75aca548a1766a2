"""Attention of packed rows is compared with a float64 reference: values, gradients, no leaks, and no large arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import packed_rows
import pytest
from packed_rows import INTERPRETED, SMALL_BLOCKS, check_trees, ends_of, equations, gradients, heads, row

from rljax.policy.attention import attend, packed_attention, path_mask
from rljax.policy.flash import block_attention, block_pairs, block_size, seen_blocks
from rljax.policy.score import segment_ends
from rljax.policy.splash import calls_of_trees

ROWS = [([96], [95]), ([7, 40, 1, 33], [16, 16, 32, 20]), ([], [50])]  # the last one has a row of padding alone


def batch(*lengths, t=96):
    return np.stack([row(t, each) for each in lengths])


SPLASH = pytest.param(INTERPRETED, 128, marks=pytest.mark.harness)
OF_SPLASH = pytest.param(INTERPRETED, ([100, 130, 1, 20], [300]), 300, 1e-5, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kernel", "lengths", "t", "atol"),
    [*((SMALL_BLOCKS, lengths, t, 2e-6) for lengths in ROWS for t in (96, 101)), OF_SPLASH],
)
def test_values_and_gradients_are_those_of_float64(kernel, lengths, t, atol):
    segments = batch(*lengths, t=t)
    arrays = heads(segments, head_dim=8 if kernel is SMALL_BLOCKS else 16)
    for x, expected in zip(gradients(kernel, arrays, segments), packed_rows.reference(*arrays, segments), strict=True):
        np.testing.assert_allclose(x, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "scale", "error"),
    [
        ("bfloat16", 1.0, 0.75 * 2.0**-8),
        pytest.param("float16", 1.0, 0.75 * 2.0**-11, marks=pytest.mark.harness),
        ("float16", 2.0**-11, 1.5 * 2.0**-11),  # most gradients of scores are then below 6e-5
    ],
)
def test_16_bit_products_are_summed_in_float32(dtype, scale, error):
    segments = batch(*([512], [100, 200, 150])[: 1 if scale < 1 else 2], t=512)
    *arrays, d_out = heads(segments, dtype)
    arrays.append((d_out * d_out.dtype.type(scale)).astype(d_out.dtype))
    found = zip(gradients(block_attention, arrays, segments), packed_rows.reference(*arrays, segments), strict=True)
    for x, expected in list(found)[: 3 if scale < 1 else 4]:
        assert np.sqrt(np.mean((x.astype(np.float64) - expected) ** 2) / np.mean(expected**2)) < error


@pytest.mark.parametrize(("kernel", "block"), [(SMALL_BLOCKS, 16), SPLASH])
def test_nothing_of_a_segment_reaches_another(kernel, block):
    segments = batch([7, 40, 1, 33], [16, 16, 32, 20], t=max(96, 2 * block))
    arrays = heads(segments, "bfloat16", head_dim=16)
    changed = (segments == 2)[:, :, None, None]
    others = [np.where(changed, x * 3 + 1, x).astype(x.dtype) for x in arrays]
    before, after = (gradients(kernel, x, segments) for x in (arrays, others))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[segments != 2], y[segments != 2])
        assert not np.array_equal(x, y)


def test_what_follows_a_token_changes_no_bit_of_it():
    # The exact engine samples like this: the same row is longer with each token.
    (q, k, v, _), attention = heads(batch([90]), "bfloat16"), jax.jit(SMALL_BLOCKS)
    whole, part = (attention(q, k, v, segment_ends(batch(each))) for each in ([90], [45]))
    np.testing.assert_array_equal(whole[:, :45], part[:, :45])


@pytest.mark.parametrize(("kernel", "block"), [(SMALL_BLOCKS, 16), SPLASH])
def test_blocks_that_share_no_segment_are_not_multiplied(kernel, block):
    # A product with not-a-number would not be a number, whatever its mask.
    segments = batch([2 * block, 3 * block], [2 * block, 2 * block, 10], t=6 * block)
    q, k, v, d_out = heads(segments, head_dim=16)
    first = (segments == 1)[:, :, None, None]
    clean = gradients(kernel, (q, k, v, d_out), segments)
    spoiled = [np.where(first, np.float32(np.nan), x) for x in (q, k, v)]
    for x, y in zip(gradients(kernel, (*spoiled, d_out), segments), clean, strict=True):
        assert np.isnan(x[segments == 1]).any()
        np.testing.assert_array_equal(x[segments > 1], y[segments > 1])


def test_large_float16_scores_stay_finite():
    segments = batch([60], [30, 30], t=64)
    q, k, v, d_out = heads(segments, "float16")
    for x in gradients(SMALL_BLOCKS, (q * 200, k * 200, v, d_out), segments):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("t", [1408, 9216, 32768])
def test_a_long_row_computes_at_most_55_percent_of_its_pairs(t):
    q, kv = (jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16) for n in (4, 2))
    segments = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def loss(q, k, v, segments):
        return jnp.sum(packed_attention(q, k, v, segment_ends(segments)).astype(jnp.float32))

    every = list(equations(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, kv, kv, segments).jaxpr))
    largest = max(variable.aval.size for equation in every for variable in equation.outvars)
    assert largest == t * 4 * 128 < t * t
    n = t // block_size(t)
    pairs = len(block_pairs(n))
    assert pairs <= 0.55 * n**2
    scans = [equation.params["length"] for equation in every if equation.primitive.name == "scan"]
    assert scans.count(pairs) == 2  # one in the forward and one in the backward pass
    operands = [v.aval.dtype for equation in every if equation.primitive.name == "dot_general" for v in equation.invars]
    assert len(operands) == 2 * (2 + 5)
    assert set(operands) == {jnp.dtype("bfloat16")}


def test_a_short_row_is_computed_in_one_piece():
    segments = batch([60, 36], [96])
    q, k, v, _ = heads(segments)
    expected = jax.jit(attend)(q, k, v, path_mask(segment_ends(segments)))
    np.testing.assert_array_equal(jax.jit(packed_attention)(q, k, v, segment_ends(segments)), expected)


def test_a_remat_policy_can_keep_the_forward_pass():
    segments = batch([96])
    q, k, v, _ = heads(segments)
    keep = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def products(policy):
        layer = jax.checkpoint(lambda q, k, v: jnp.sum(jnp.sin(SMALL_BLOCKS(q, k, v, segments))), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(layer, (0, 1, 2)))(q, k, v)
        return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr.jaxpr))

    assert products(None) == 2 + 2 + 5
    assert products(keep) == 2 + 5


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
SPLASH_OF_TREES = functools.partial(INTERPRETED, trees=True)


def rows_of(trees, t):
    return np.stack([ends_of(t, each) for each in trees])


def test_the_mask_by_hand():
    """Sequences that share nothing are trees, too."""
    ends = jax.jit(segment_ends)(np.repeat([[1, 2, 3, 0]], [5, 1, 7, 3], axis=1))
    assert (ends.dtype, ends.tolist()) == (jnp.int32, [[5] * 5 + [6] + [13] * 7 + [0] * 3])
    # A root of one token has a branch of two and a branch of one; another tree of one token follows, and padding.
    mask = path_mask(jnp.asarray(ends_of(6, [(1, [(2, LEAF), (1, LEAF)]), (1, LEAF)]))[None])[0]
    seen = ["".join(str(int(x)) for x in query) for query in mask]
    assert seen == ["100000", "110000", "111000", "100100", "000010", "000000"]


@pytest.mark.parametrize(
    ("attention", "trees", "head_dim"),
    [
        *((attention, trees, 8) for attention in (packed_attention, SMALL_BLOCKS) for trees in (TWO_LEVELS, DEEPER)),
        pytest.param(SPLASH_OF_TREES, TWO_LEVELS, 16, marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_values_and_gradients_of_float64(attention, trees, head_dim):
    check_trees(attention, rows_of(trees, 300), head_dim=head_dim)


@pytest.mark.parametrize(
    "attention", [SMALL_BLOCKS, pytest.param(SPLASH_OF_TREES, marks=pytest.mark.harness)], ids=["blocks", "splash"]
)
def test_nothing_of_a_branch_reaches_another(attention):
    ends = rows_of([[(20, [(60, LEAF), (50, LEAF)]), (40, LEAF)]], 256)
    arrays, changed = heads(ends, "bfloat16", head_dim=16), (np.arange(256) >= 20) & (np.arange(256) < 80)
    others = [np.where(changed[None, :, None, None], x * 3 + 1, x).astype(x.dtype) for x in arrays]
    before, after = (packed_rows.tree_gradients(attention, x, ends)[0] for x in (arrays, others))
    np.testing.assert_array_equal(before[:, ~changed], after[:, ~changed])
    assert not np.array_equal(before, after)


def test_blocks_that_no_query_sees_are_skipped():
    ends = jnp.asarray(ends_of(64, [(16, [(16, LEAF), (16, LEAF)]), (16, LEAF)]))
    below = np.tril(seen_blocks(ends.reshape(-1, 16))).astype(int)
    assert below.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    nodes, roots = calls_of_trees(ends, 16)
    assert jnp.tril(nodes.seen).tolist() == np.eye(4, dtype=bool).tolist()
    assert jnp.argwhere(roots.seen).tolist() == [[1, 0], [2, 0]]
