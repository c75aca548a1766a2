"""The parts that devices hold make up each tensor once, and give its checksum, wherever its shards and copies are."""

import jax
import numpy as np
import pytest
from hybrids import tiny_hybrid

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import hf_tensors
from rljax.policy.model import init_params, param_shardings
from rljax.policy.published import hf_checksums, hf_parts
from rljax.sharding import MeshConfig, make_mesh
from rljax.weights.format import TensorRegion

DENSE = PolicyConfig(32, 8, 16, 2, 4, 4, 4, tie_word_embeddings=False)
pytestmark = pytest.mark.mesh


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        *(pytest.param(MeshConfig(*sizes), DENSE, marks=pytest.mark.harness) for sizes in ((8, 1), (4, 2), (2, 4))),
        (MeshConfig(2, replica=4), DENSE),
        (MeshConfig(2, 4), tiny_hybrid()),
    ],
    ids=lambda each: getattr(each, "family", str(each)),
)
def test_parts_put_together_are_the_tensors(mesh, config):
    params, dtype = init_params(config, 0), "bfloat16"
    split = jax.device_put(params, param_shardings(config, make_mesh(mesh)))
    wanted = dict(hf_tensors(params, config, dtype))
    found = {name: np.full(array.shape, np.nan, array.dtype) for name, array in wanted.items()}
    seen = {name: np.zeros(array.shape, int) for name, array in wanted.items()}
    sharded = 0
    for part in hf_parts(split, config, dtype):
        assert type(part.tensor) is str, "version.json can be written of no other"
        assert part.shape == wanted[part.tensor].shape
        assert part.region.lies_in(part.shape)
        whole, region = TensorRegion.whole(part.shape), part.region
        place = np.s_[region.row : region.row + region.rows, region.column : region.column + region.width]
        found[part.tensor].reshape(whole.rows, whole.width)[place] = part.array.reshape(region.rows, region.width)
        seen[part.tensor].reshape(whole.rows, whole.width)[place] += 1
        sharded += region != whole
    assert sharded > 20
    assert hf_checksums(split, config, dtype) == hf_checksums(params, config, dtype)
    for name, array in wanted.items():
        assert (seen[name] == 1).all(), name
        assert found[name].tobytes() == array.tobytes(), name
