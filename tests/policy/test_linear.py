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


def pulled_back(product, x, weights, cotangents):
    return jax.vjp(lambda x, weights: product(SPECS, x, weights), x, weights)[1](cotangents)


def exact_gradients(dtype):
    x, weights, cotangents = jax.tree.map(lambda a: np.asarray(a, np.float64), operands(dtype))
    pairs = list(zip(SPECS, weights, cotangents, strict=True))
    d_x = sum(np.einsum("bthk,dhk->btd", c, w) for _, w, c in pairs)
    return [d_x, *(np.einsum("btd,bthk->dhk", x, c) for _, _, c in pairs)]


def error(found, exact):
    pairs = zip(jax.tree.leaves(found), exact, strict=True)
    return max(np.abs(np.asarray(f, np.float64) - e).max() / np.abs(e).max() for f, e in pairs)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("dtype", "short", "bound"),
    [("bfloat16", "bf16", 2.0**-8), ("float16", "f16", 2.0**-11), ("float32", "f32", 2.0**-21)],
)
def test_products_take_16_bits_and_only_narrow_sums_give_them(dtype, short, bound, narrow):
    """No product has a wider operand. Gradients are rounded once, those of weights where their sums are narrow."""
    given, exact = operands(dtype), exact_gradients(dtype)
    found, expected = (product(SPECS, *given[:2]) for product in (linear, plain))
    assert [x.dtype for x in found] == [jnp.dtype(dtype)] * 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with narrow_gradient_sums(narrow):
        lowered = jax.jit(lambda *given: pulled_back(linear, *given)).lower(*given)
    products = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert all(line.rsplit(" : ", 1)[1].split(" -> ")[0].count(f"x{short}>") == 2 for line in products)
    results = sorted(line.rsplit("x", 1)[1].rstrip(">") for line in products)
    assert results == sorted(([short] if narrow else ["f32"]) * 2 + ["f32"] * 2)
    found = error(lowered.compile()(*given), exact)
    assert found <= bound
    assert narrow or found <= error(pulled_back(plain, *given), exact) * 1.0001
