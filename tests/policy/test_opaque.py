"""The barrier between products and their readers is on CUDA alone, in forward and backward, and changes no value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.fusion import opaque

X, Y = jnp.array([[0.5, -2.0], [3.0, 0.25]]), jnp.array([[1.0, 2.0], [-1.0, 4.0]])


def gated(x, y):
    x, y = opaque(x, y)
    return (jax.nn.silu(x) * y).sum()


@pytest.mark.parametrize(("platform", "barriers"), [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_only_cuda_has_the_barrier(platform, barriers):
    text = jax.jit(opaque).trace(X, Y).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("optimization_barrier") == barriers


def test_the_gradients_of_both_read_behind_one_barrier():
    text = jax.jit(jax.grad(gated, (0, 1))).trace(X, Y).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("optimization_barrier") == 2  # one of the values, and one of their cotangents


def test_values_and_gradients_are_those_without_it():
    plain = jax.value_and_grad(lambda x, y: (jax.nn.silu(x) * y).sum(), (0, 1))(X, Y)
    jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(gated, (0, 1))(X, Y), plain)
