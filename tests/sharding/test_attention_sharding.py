"""In attention on a mesh, each device computes its own rows and heads alone."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from packed_rows import INTERPRETED, SMALL_BLOCKS, gradients, heads, row

from rljax.policy.score import segment_ends
from rljax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.mesh

SEGMENTS = np.stack([row(64, each) for each in ([64], [20, 30], [16] * 4, [], [1, 63], [30, 30], [5, 6, 7], [60])])
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def on_mesh(mesh, arrays, rows, split_heads):
    axes = PartitionSpec("fsdp" if rows % mesh.shape["fsdp"] == 0 else None, None, "tp" if split_heads else None)
    return jax.device_put(arrays, NamedSharding(mesh, axes))


def check_on_mesh(kernel, arrays, segments, mesh, atol):
    expected = gradients(kernel, arrays, segments)
    with jax.set_mesh(mesh):
        got = gradients(kernel, on_mesh(mesh, arrays, len(segments), mesh.shape["tp"] == 2), segments)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=0)


# Two key-value heads or 5 rows are not split over 4 devices.
@pytest.mark.parametrize(
    ("fsdp", "tp", "rows"),
    [*(pytest.param(*mesh, 8, marks=pytest.mark.harness) for mesh in [(8, 1), (4, 2)]), (2, 4, 8), (4, 2, 5)],
)
def test_a_mesh_gives_the_numbers_of_one_device(fsdp, tp, rows):
    segments = SEGMENTS[:rows]
    check_on_mesh(SMALL_BLOCKS, heads(segments, num_heads=8), segments, make_mesh(MeshConfig(fsdp, tp)), 2e-6)


def test_devices_do_not_talk_and_may_recompute():
    mesh = make_mesh(MeshConfig(4, 2))
    arrays = on_mesh(mesh, heads(SEGMENTS, num_heads=8), 8, True)

    @jax.jit
    def run(q, k, v, d_out, segments):
        layer = jax.checkpoint(lambda q, k, v: SMALL_BLOCKS(q, k, v, segment_ends(segments)))
        return jax.vjp(layer, q, k, v)[1](d_out)

    with jax.set_mesh(mesh):
        segments = jax.device_put(SEGMENTS, NamedSharding(mesh, PartitionSpec("fsdp")))
        compiled = run.lower(*arrays, segments).compile()
        wanted = gradients(SMALL_BLOCKS, arrays, SEGMENTS)[1:]
        for x, expected in zip(compiled(*arrays, segments), wanted, strict=True):
            np.testing.assert_array_equal(x, expected)
    assert not re.findall(COLLECTIVES, compiled.as_text())


@pytest.mark.parametrize(("fsdp", "tp"), [pytest.param(8, 1, marks=pytest.mark.harness), (4, 2)])
def test_the_kernel_of_a_tpu_gives_the_numbers_of_one_device(fsdp, tp):
    segments = np.stack([row(256, lengths) for lengths in ([100, 130], [256], [], [1, 60, 60])] * 2)
    check_on_mesh(INTERPRETED, heads(segments, head_dim=16), segments, make_mesh(MeshConfig(fsdp, tp)), 0)
