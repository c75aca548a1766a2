"""The head on a table that is split over devices has the same numbers. Only a chunk of it is gathered at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rljax.policy.head import token_logprobs
from rljax.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.mesh

V, D, N, CHUNK = 96, 16, 20, 8


def value(hidden, table, targets, ids):
    scores = token_logprobs(hidden, table, targets, ids, max_chunk=CHUNK, collision=ids is not None)
    value = jnp.sum(scores.logprobs * jnp.cos(targets)) + 0.3 * jnp.sum(scores.entropy)
    if ids is not None:
        value += jnp.sum(jnp.where(ids >= 0, scores.tops, 0.0) * jnp.sin(ids))
    return value, scores[2:]


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.harness), 4])
@pytest.mark.parametrize("with_ids", [False, True])
def test_a_split_vocabulary_gives_the_same_and_stays_split(tp, with_ids):
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=(n, D)).astype(np.float32) for n in (N, V))
    ids = np.argsort(rng.random((N, V)), axis=-1)[:, :24].astype(np.int32)
    ids[1:, -1], ids[2] = -1, -1
    arrays = (hidden, table, rng.integers(0, V, N).astype(np.int32), ids if with_ids else None)
    of_all = jax.value_and_grad(value, (0, 1), has_aux=True)
    expected = of_all(*jax.tree.map(jnp.asarray, arrays))
    mesh = make_mesh(MeshConfig(2, tp))
    by_token, by_word = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ("tp", "fsdp")))
    placed = [None if x is None else jax.device_put(x, by_word if x is table else by_token) for x in arrays]
    with jax.set_mesh(mesh):
        compiled = jax.jit(of_all).lower(*placed).compile()
        found = compiled(*placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6, rtol=1e-5)
    # Forward and backward each take the width of a shard's chunk together, with or without ids.
    text = compiled.as_text()
    assert re.findall(r"= \w+\[([\d,]+)\][^=]* all-gather", text) == [f"1,{CHUNK},{D}"] * 2
    assert not re.findall(r"all-to-all|collective-permute", text)
