"""Rows whose tokens are split over devices: attention has the numbers of whole rows, and weights are split, too."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from packed_rows import SMALL_BLOCKS, gradients, heads, row
from sharded_step import make_step

from rljax.policy.attention import attention_of_parts
from rljax.policy.context import fold, unfold
from rljax.sharding import MeshConfig, constrain, make_mesh

pytestmark = pytest.mark.mesh

SEGMENTS = np.stack([row(96, each) for each in ([96], [20, 30], [16] * 6, [], [1, 63], [7, 30, 50], [5, 6, 7], [95])])


def on_parts(parts):
    """Returns attention of whole rows whose parts lie on devices."""

    def of_rows(q, k, v, ends):
        out = attention_of_parts(SMALL_BLOCKS, parts, *(fold(x, parts) for x in (q, k, v)), ends)
        return constrain(unfold(out, parts), None, None, None, None)

    return of_rows


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(1, context=8),  # one query head each, of two key-value heads
        MeshConfig(1, 4, context=2),  # two key-value heads on 4 devices are not split
        MeshConfig(1, 2, context=3),  # 4 query heads: 2 each, and zeros on the third device
        *(
            pytest.param(mesh, marks=pytest.mark.harness)
            for mesh in [MeshConfig(2, context=4), MeshConfig(2, 2, context=2)]
        ),
    ],
    ids=str,
)
def test_attention_of_parts_is_that_of_whole_rows(mesh):
    arrays = heads(SEGMENTS, num_heads=8)
    expected = gradients(SMALL_BLOCKS, arrays, SEGMENTS)
    mesh = make_mesh(mesh)
    parts = mesh.shape["context"]
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("fsdp")))
        got = gradients(on_parts(parts), placed, SEGMENTS)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=0)


def test_weights_are_split_over_the_devices_of_a_row():
    _, state = make_step(MeshConfig(2, context=4))
    query = state.params["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.shape == (2, 4, 4, 8)
