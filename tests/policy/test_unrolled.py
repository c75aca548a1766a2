"""Blocks that are compiled one by one, as on a CPU, are compared with a loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.kernels import Kernels
from rljax.policy.model import hidden_states, init_params
from rljax.policy.score import segment_ends

CONFIG = PolicyConfig(16, 8, 16, 3, 2, 1, 4, tie_word_embeddings=True)


def gradient(unrolled, remat="none"):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)), jnp.int32)
    rows = (tokens, segment_ends(jnp.ones_like(tokens)), jnp.broadcast_to(jnp.arange(6), tokens.shape))

    def loss(params):
        return jnp.sum(hidden_states(params, CONFIG, *rows, remat=remat, kernels=Kernels(unrolled=unrolled))[0] ** 2)

    return jax.jit(jax.grad(loss))


def test_both_compute_the_same_gradient():
    params = init_params(CONFIG, 0)
    for ours, expected in zip(*(jax.tree.leaves(gradient(n)(params)) for n in (3, 0)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("unrolled", "remat", "loops"), [(3, "none", 0), (2, "none", 2), (0, "none", 2), (3, "blocks", 2)]
)
def test_only_few_blocks_are_compiled_one_by_one(unrolled, remat, loops):
    """With more blocks, or with recomputed values, the forward and the backward pass are a loop each."""
    assert gradient(unrolled, remat).lower(init_params(CONFIG, 0)).as_text().count("stablehlo.while") == loops
