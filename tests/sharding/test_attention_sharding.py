"""Attention on a mesh: each device computes its rows, heads or parts of rows alone, with one device's numbers."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from packed_rows import INTERPRETED, SMALL_BLOCKS, gradients, heads, row

from rljax.policy.attention import attention_of_parts
from rljax.policy.context import fold, unfold
from rljax.policy.score import segment_ends
from rljax.sharding import MeshConfig, constrain, make_mesh

pytestmark = pytest.mark.mesh

SEGMENTS = np.stack([row(96, each) for each in ([96], [20, 30], [16] * 6, [], [1, 63], [7, 30, 50], [5, 6, 7], [95])])
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def on_mesh(mesh, arrays, rows):
    split_rows, split_heads = rows % mesh.shape["fsdp"] == 0, mesh.shape["tp"] == 2
    axes = PartitionSpec("fsdp" if split_rows else None, None, "tp" if split_heads else None)
    return jax.device_put(arrays, NamedSharding(mesh, axes))


def on_parts(parts):
    """Returns attention of whole rows whose parts lie on devices."""

    def of_rows(q, k, v, ends):
        out = attention_of_parts(SMALL_BLOCKS, parts, *(fold(x, parts) for x in (q, k, v)), ends)
        return constrain(unfold(out, parts), None, None, None, None)

    return of_rows


# Two key-value heads or 5 rows are not split over 4 devices. Of 4 query heads on 3 devices, the last one has zeros.
@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        (MeshConfig(2, 4), 8),
        (MeshConfig(4, 2), 5),
        (MeshConfig(1, 2, context=3), 8),
        *(
            pytest.param(MeshConfig(fsdp, tp, context=context), 8, marks=pytest.mark.harness)
            for fsdp, tp, context in ((1, 1, 8), (1, 4, 2), (8, 1, 1), (2, 2, 2))
        ),
    ],
    ids=str,
)
def test_a_mesh_gives_the_numbers_of_one_device(mesh, rows):
    segments, parts = SEGMENTS[:rows], mesh.context
    arrays, mesh = heads(segments, num_heads=8), make_mesh(mesh)
    expected = gradients(SMALL_BLOCKS, arrays, segments)
    with jax.set_mesh(mesh):
        got = gradients(SMALL_BLOCKS if parts == 1 else on_parts(parts), on_mesh(mesh, arrays, rows), segments)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=0)


def test_devices_do_not_talk_and_may_recompute():
    mesh = make_mesh(MeshConfig(4, 2))
    arrays = on_mesh(mesh, heads(SEGMENTS, num_heads=8), 8)

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


@pytest.mark.harness
def test_the_kernel_of_a_tpu_gives_the_bits_of_one_device():
    segments = np.stack([row(256, lengths) for lengths in ([100, 130], [256], [], [1, 60, 60])] * 2)
    arrays, mesh = heads(segments, head_dim=16), make_mesh(MeshConfig(4, 2))
    expected = gradients(INTERPRETED, arrays, segments)
    with jax.set_mesh(mesh):
        got = gradients(INTERPRETED, on_mesh(mesh, arrays, 8), segments)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)
