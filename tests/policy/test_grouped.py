"""Grouped products are compared with a loop over the groups in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.grouped import IMPLEMENTATIONS

D, F = 24, 40
# Further rows follow the third ones. The last groups have several blocks.
SIZES = [[5, 0, 17, 2], [0, 0, 0, 30], [1, 1, 1, 1], [0, 0, 0, 0], [300, 7, 0, 513]]
MANY, FEW = 826, 10  # rows, with those after all groups; the sizes share a program
DTYPES = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def operands(sizes, dtype):
    rng = np.random.default_rng(0)
    m = FEW if sum(sizes) < FEW - 5 else MANY
    shapes = ((m, D), (len(sizes), D, F), (m, F))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_hand(rows, matrices, others, sizes):
    rows, matrices, others = (np.asarray(each, np.float64) for each in (rows, matrices, others))
    product, back, outer = np.zeros((len(rows), F)), np.zeros((len(rows), D)), np.zeros(matrices.shape)
    start = 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        product[mine], back[mine] = rows[mine] @ matrices[group], others[mine] @ matrices[group].T
        outer[group] = rows[mine].T @ others[mine]
        start += size
    return product, back, outer


@functools.cache
def compiled(name):
    grouped = IMPLEMENTATIONS[name]

    def run(rows, matrices, others, sizes):
        back = grouped.product(others, matrices, sizes, transposed=True)
        return grouped.product(rows, matrices, sizes), back, grouped.outer(rows, others, sizes)

    return jax.jit(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["xla", "ragged"])
def test_products_are_those_of_a_loop_over_the_groups(name, sizes, dtype):
    rows, matrices, others = operands(sizes, dtype)
    with jax.default_matmul_precision("highest"):
        found = compiled(name)(rows, matrices, others, jnp.asarray(sizes, jnp.int32))
    assert [each.dtype for each in found] == [jnp.dtype(dtype), jnp.dtype(dtype), jnp.float32]
    for ours, expected in zip(found, by_hand(rows, matrices, others, sizes), strict=True):
        largest = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(np.asarray(ours, np.float64), expected, atol=DTYPES[dtype] * largest, rtol=0)


def test_a_value_that_is_not_finite_stays_in_its_own_group():
    rows, matrices, others = operands([5, 9], "float32")
    product, _, outer = compiled("xla")(rows.at[2].set(jnp.nan), matrices, others, jnp.asarray([5, 9], jnp.int32))
    for found, spoiled in ((product, 2), (outer, 0)):
        assert not np.isfinite(found[spoiled]).any()
        assert np.isfinite(np.delete(found, spoiled, 0)).all()
