"""Checksums of parameters that are split over devices are those of the whole tensors."""

import jax
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params, param_shardings
from rljax.policy.published import hf_checksums
from rljax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.mesh


def test_split_parameters_have_the_checksums_of_the_whole():
    config = PolicyConfig(32, 8, 16, 2, 4, 2, 4, tie_word_embeddings=False)
    params = init_params(config, 0)
    split = jax.device_put(params, param_shardings(config, make_mesh(MeshConfig(4, 2))))
    assert any(leaf.addressable_shards[0].data.size * 8 == leaf.size for leaf in jax.tree.leaves(split))
    assert hf_checksums(split, config, "bfloat16") == hf_checksums(params, config, "bfloat16")
