"""Products with weights have the forward of a plain einsum, and a backward whose operands also have 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.layers import linear
from rljax.sharding import narrow_gradient_sums

SPECS = ("btd,dhk->bthk", "btd,dgk->btgk")
B, T, D, H, G, K = 2, 24, 32, 4, 2, 8


def plain(specs, x, weights):
    pairs = zip(specs, weights, strict=True)
    return tuple(jnp.einsum(spec, x, w, preferred_element_type=jnp.float32).astype(x.dtype) for spec, w in pairs)


def operands(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (B, T, D), "q": (D, H, K), "k": (D, G, K), "dq": (B, T, H, K), "dk": (B, T, G, K)}
    x, q, k, dq, dk = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes.values())
    return x, (q, k), (dq, dk)


def gradients(product, dtype):
    x, weights, cotangents = operands(dtype)
    return jax.tree.leaves(jax.vjp(lambda x, weights: product(SPECS, x, weights), x, weights)[1](cotangents))


def exact_gradients(dtype):
    x, weights, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float64), operands(dtype))
    pairs = list(zip(SPECS, weights, cotangents, strict=True))
    d_x = sum(np.einsum("bthk,dhk->btd", c, w) for _, w, c in pairs)
    return [d_x, *(np.einsum("btd,bthk->dhk", x, c) for _, _, c in pairs)]


def error(found, exact):
    return max(np.abs(np.asarray(f, np.float64) - e).max() / np.abs(e).max() for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_forward_is_that_of_the_plain_product_bit_for_bit(dtype):
    x, weights, _ = operands(dtype)
    for found, expected in zip(linear(SPECS, x, weights), plain(SPECS, x, weights), strict=True):
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-21)])
def test_gradients_are_rounded_once(dtype, bound):
    """A gradient is off by half a unit in the last place of its largest value. The plain product is no better."""
    found, exact = error(gradients(linear, dtype), exact_gradients(dtype)), exact_gradients(dtype)
    assert found <= bound
    assert found <= error(gradients(plain, dtype), exact) * 1.0001


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("dtype", "short", "bound"), [("bfloat16", "bf16", 2.0**-8), ("float16", "f16", 2.0**-11)])
def test_products_take_16_bits_and_only_narrow_sums_give_them(dtype, short, bound, narrow):
    """No product has a float32 operand. Narrow sums round the gradients of weights, and on one device nothing else."""
    x, weights, cotangents = operands(dtype)

    def pulled_back(x, weights, cotangents):
        with narrow_gradient_sums(narrow):
            return jax.vjp(lambda x, weights: linear(SPECS, x, weights), x, weights)[1](cotangents)

    lowered = jax.jit(pulled_back).lower(x, weights, cotangents)
    products = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert all(line.rsplit(" : ", 1)[1].split(" -> ")[0].count(f"x{short}>") == 2 for line in products)
    results = sorted(line.rsplit("x", 1)[1].rstrip(">") for line in products)
    assert results == sorted(([short] if narrow else ["f32"]) * 2 + ["f32"] * 2)
    assert error(jax.tree.leaves(lowered.compile()(x, weights, cotangents)), exact_gradients(dtype)) <= bound
