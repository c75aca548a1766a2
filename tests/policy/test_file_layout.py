"""Tensors come out in the layout of the files, whatever the number of layers that are transposed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import hf_tensors, host_tensors, policy_leaves
from rljax.policy.model import init_params

CONFIG = PolicyConfig(32, 8, 16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, tie_word_embeddings=False)
MIXTURE = PolicyConfig(
    32, 8, 16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, tie_word_embeddings=True,
    family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=6,
)  # fmt: skip


def test_projections_are_transposed():
    params = init_params(CONFIG, 0)
    tensors = dict(hf_tensors(params, CONFIG, jnp.float32))
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}."
        query, output = np.asarray(attention["query"][layer]), np.asarray(attention["output"][layer])
        assert query.shape == (8, 4, 4)
        assert output.shape == (4, 4, 8)
        np.testing.assert_array_equal(tensors[prefix + "self_attn.q_proj.weight"], query.reshape(8, 16).T)
        np.testing.assert_array_equal(tensors[prefix + "self_attn.o_proj.weight"], output.reshape(16, 8).T)
        np.testing.assert_array_equal(tensors[prefix + "mlp.down_proj.weight"], np.asarray(mlp["down"][layer]).T)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed"])
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["lm_head"])


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_of_any_size_are_the_same_bits(config, dtype):
    """NaN, infinities, signed zeros and subnormal numbers keep their bits in float32."""
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e-45], np.float32)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(np.resize(odd, leaf.size).reshape(leaf.shape)), init_params(config, 0)
    )
    whole = dict(hf_tensors(params, config, dtype))
    for chunk_bytes in (1, 2000):  # one layer at a time, and two
        parts = dict(host_tensors(params, policy_leaves(config), dtype, chunk_bytes))
        assert list(parts) == list(whole)
        assert all(type(name) is str for name in parts)
        assert all(parts[name].tobytes() == array.tobytes() for name, array in whole.items())
        assert all(parts[name].dtype == jnp.dtype(dtype) for name in whole)
    if dtype == "float32":
        np.testing.assert_array_equal(
            whole["model.embed_tokens.weight"].view(np.int32), np.resize(odd, (32, 8)).view(np.int32)
        )
