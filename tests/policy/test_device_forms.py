"""Forms for one kind of device compute what others compute: hints to XLA, rotations by a product, unrolled blocks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.kernels import Kernels
from rljax.policy.layers import features_last, opaque
from rljax.policy.model import abstract_params, hidden_states, init_params
from rljax.policy.rotary import rotary_tables, rotate, rotate_by_product
from rljax.policy.score import segment_ends

X, Y = jnp.array([[0.5, -2.0], [3.0, 0.25]]), jnp.array([[1.0, 2.0], [-1.0, 4.0]])
CONFIG = PolicyConfig(16, 8, 16, 3, 2, 1, 4, tie_word_embeddings=True)


def gated(hint):
    def run(x, y):
        x, y = hint(x, y)
        return (jax.nn.silu(x) * y).sum()

    return jax.value_and_grad(run, (0, 1))


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_each_hint_is_for_one_platform(platform):
    """A barrier has the values and one their cotangents. Both arrays and both gradients keep their last axis."""
    barriers, layouts = (
        jax.jit(gated(hint)).trace(X, Y).lower(lowering_platforms=(platform,)).as_text()
        for hint in (opaque, features_last)
    )
    assert barriers.count("optimization_barrier") == (2 if platform == "cuda" else 0)
    found = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", layouts)
    assert found == ["1, 0"] * (4 if platform == "tpu" else 0)


@pytest.mark.parametrize("hint", [opaque, features_last])
def test_a_hint_changes_no_value_and_no_gradient(hint):
    jax.tree.map(np.testing.assert_array_equal, gated(hint)(X, Y), gated(lambda *each: each)(X, Y))


@pytest.mark.parametrize("head_dim", [pytest.param(2, marks=pytest.mark.harness), 128])
def test_rotations_by_a_product_give_the_same_bits(head_dim):
    """Values and gradients of bfloat16 heads are the same, because each product has a single term."""
    rng = np.random.default_rng(head_dim)
    x, weights = (jnp.asarray(rng.normal(size=(2, 17, 3, head_dim)), jnp.bfloat16) for _ in range(2))
    tables = rotary_tables(jnp.asarray(rng.integers(0, 9216, (2, 17))), head_dim, 1e6)
    found, expected = (jax.vjp(lambda heads, form=form: form(heads, tables), x) for form in (rotate_by_product, rotate))
    for ours, wanted in ((found[0], expected[0]), (*found[1](weights), *expected[1](weights))):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours.astype(jnp.float32), wanted.astype(jnp.float32))


def gradient(unrolled, remat="none"):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)), jnp.int32)
    rows = (tokens, segment_ends(jnp.ones_like(tokens)), jnp.broadcast_to(jnp.arange(6), tokens.shape))

    def loss(params):
        return jnp.sum(hidden_states(params, CONFIG, *rows, remat=remat, kernels=Kernels(unrolled=unrolled))[0] ** 2)

    return jax.jit(jax.grad(loss))


def test_blocks_one_by_one_compute_the_gradient_of_a_loop():
    params = init_params(CONFIG, 0)
    for ours, expected in zip(*(jax.tree.leaves(gradient(n)(params)) for n in (3, 0)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("unrolled", "remat", "loops"), [(3, "none", 0), (2, "none", 2), (0, "none", 2), (3, "blocks", 2)]
)
def test_only_few_blocks_are_compiled_one_by_one(unrolled, remat, loops):
    """With more blocks, or with recomputed values, the forward and the backward pass are a loop each."""
    assert gradient(unrolled, remat).lower(abstract_params(CONFIG)).as_text().count("stablehlo.while") == loops
