"""Tests of the sum over devices of a weight's gradient, in float32 and in the dtype of the products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.layers import linear
from rljax.sharding import MeshConfig, make_mesh, named_sharding, narrow_gradient_sums

pytestmark = pytest.mark.mesh

ROWS, TOKENS, WIDTH, INNER = 8, 4, 16, 32


def gradients():
    """Returns a weight's exact gradient and two sums by eight devices, wide and narrow."""
    mesh = make_mesh(MeshConfig(8))
    rng = np.random.default_rng(0)
    shapes = (ROWS, TOKENS, WIDTH), (WIDTH, INNER), (ROWS, TOKENS, INNER)
    axes = ("rows", "tokens", "act_embed"), ("embed", "mlp"), ("rows", "tokens", "act_mlp")
    values = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    of_axes = [named_sharding(mesh, names, shape) for names, shape in zip(axes, shapes, strict=True)]
    x, weight, cotangent = map(jax.device_put, values, of_axes)

    def gradient(narrow):
        def of_weight(x, weight, cotangent):
            with narrow_gradient_sums(narrow):
                return jax.vjp(lambda weight: linear(("btd,df->btf",), x, (weight,)), weight)[1]((cotangent,))[0]

        with jax.set_mesh(mesh):
            return np.asarray(jax.jit(of_weight, out_shardings=of_axes[1])(x, weight, cotangent), np.float64)

    exact = np.einsum("btd,btf->df", *(np.asarray(value, np.float64) for value in (x, cotangent)))
    return exact, gradient(False), gradient(True)


def test_a_wide_sum_is_rounded_once_and_a_narrow_one_by_device():
    """The narrow sum differs from the wide one. Its error stays below a unit in the last place of the largest sum."""
    exact, wide, narrow = gradients()
    np.testing.assert_array_equal(wide, np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64))
    assert (narrow != wide).any()
    assert np.abs(narrow - exact).max() <= 2.0**-7 * np.abs(exact).max()
