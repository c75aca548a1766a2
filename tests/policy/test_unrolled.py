"""Blocks that are compiled one by one, as on a CPU, are compared with a loop over them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.config import DEFAULTS, PolicyConfig
from rljax.policy.kernels import MAX_UNROLLED, Kernels, choose_kernels
from rljax.policy.model import hidden_states, init_params
from rljax.policy.rotary import rotate, rotate_by_product
from rljax.policy.trees import segment_ends
from rljax.sharding import MESH_AXES

CONFIG = PolicyConfig(16, 8, 16, 3, 2, 1, 4, tie_word_embeddings=True)
CPU = jax.devices("cpu")[0]
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
V5P = SimpleNamespace(platform="tpu", device_kind="TPU v5")


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


@pytest.mark.parametrize(
    ("devices", "unrolled", "stored"),
    [([CPU], MAX_UNROLLED, True), ([CPU] * 2, 0, False), ([H100], 0, False), ([V5P], 0, False)],
    ids=["CPU", "two of them", "H100", "v5p"],
)
def test_only_a_cpu_gets_forms_for_cpus(devices, unrolled, stored):
    """The devices of the mesh decide. A program for a GPU or a TPU may be compiled on a machine with only a CPU."""
    shape = dict.fromkeys(MESH_AXES, 1)
    kernels = choose_kernels(DEFAULTS, CONFIG, "float32", SimpleNamespace(devices=np.array(devices), shape=shape))
    assert (kernels.unrolled, kernels.stored_logits) == (unrolled, stored)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (V5P, "bfloat16", rotate_by_product),
        (V5P, "float16", rotate),
        (H100, "bfloat16", rotate),
        (CPU, "bfloat16", rotate),
    ],
    ids=["TPU", "TPU float16", "H100", "CPU"],
)
def test_only_a_tpu_rotates_by_a_product(device, dtype, expected):
    shape = dict.fromkeys(MESH_AXES, 1)
    mesh = SimpleNamespace(devices=np.array([device]), shape=shape)
    assert choose_kernels(DEFAULTS, CONFIG, dtype, mesh).rotate is expected
