"""Each hint to XLA is for one platform, in forward and backward, and changes no value."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.layers import features_last, opaque

X, Y = jnp.array([[0.5, -2.0], [3.0, 0.25]]), jnp.array([[1.0, 2.0], [-1.0, 4.0]])


def gated(hint):
    def run(x, y):
        x, y = hint(x, y)
        return (jax.nn.silu(x) * y).sum()

    return run


def lowered(run, platform):
    return jax.jit(run).trace(X, Y).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "barriers"), [("cuda", 1), ("cpu", 0), ("tpu", 0)])
def test_only_cuda_has_the_barrier(platform, barriers):
    assert lowered(opaque, platform).count("optimization_barrier") == barriers


def test_the_gradients_of_both_read_behind_one_barrier():
    text = lowered(jax.grad(gated(opaque), (0, 1)), "cuda")
    assert text.count("optimization_barrier") == 2  # one of the values, and one of their cotangents


@pytest.mark.parametrize(("platform", "layouts"), [("tpu", 4), ("cpu", 0), ("cuda", 0)])
def test_only_a_tpu_keeps_the_features_of_a_token_together(platform, layouts):
    """Both arrays and both gradients have the layout in which the last axis varies fastest."""
    text = lowered(jax.grad(gated(features_last), (0, 1)), platform)
    assert re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", text) == ["1, 0"] * layouts


@pytest.mark.parametrize("hint", [opaque, features_last])
def test_values_and_gradients_are_those_without_it(hint):
    plain, hinted = (jax.value_and_grad(gated(one), (0, 1))(X, Y) for one in (lambda *each: each, hint))
    jax.tree.map(np.testing.assert_array_equal, hinted, plain)
