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


def value(hidden, table, targets):
    logprobs, entropy, *_ = token_logprobs(hidden, table, targets, max_chunk=CHUNK)
    return jnp.sum(logprobs * jnp.cos(targets)) + 0.3 * jnp.sum(entropy)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.harness), 4])
def test_split_vocabulary_gives_the_same_and_stays_split(tp):
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=(n, D)).astype(np.float32) for n in (N, V))
    targets = rng.integers(0, V, N).astype(np.int32)
    expected, expected_grads = jax.value_and_grad(value, (0, 1))(*(jnp.asarray(x) for x in (hidden, table)), targets)
    mesh = make_mesh(MeshConfig(2, tp))
    by_token = NamedSharding(mesh, PartitionSpec("fsdp"))
    by_word = NamedSharding(mesh, PartitionSpec("tp", "fsdp"))
    arguments = jax.device_put((hidden, table, targets), (by_token, by_word, by_token))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(value, (0, 1))).lower(*arguments).compile()
        got, grads = compiled(*arguments)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for g, e in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(g, e, atol=5e-6, rtol=1e-5)
    # Forward and backward each take the width of a shard's chunk together.
    assert re.findall(r"= f32\[([\d,]+)\][^=]* all-gather", compiled.as_text()) == [f"1,{CHUNK},{D}"] * 2


def value_of_tops(hidden, table, targets, ids):
    scores = token_logprobs(hidden, table, targets, ids, max_chunk=CHUNK, collision=True)
    tops = jnp.where(ids >= 0, scores.tops, 0.0)
    value = jnp.sum(tops * jnp.sin(ids)) + jnp.sum(scores.logprobs * jnp.cos(targets)) + 0.3 * jnp.sum(scores.entropy)
    return value, (scores.tops, scores.collision)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.harness), 4])
def test_ids_are_found_in_every_shard_without_gathering_logits(tp):
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=(n, D)).astype(np.float32) for n in (N, V))
    targets = rng.integers(0, V, N).astype(np.int32)
    ids = np.argsort(rng.random((N, V)), axis=-1)[:, :24].astype(np.int32)
    ids[1:, -1], ids[2] = -1, -1
    arrays = (hidden, table, targets, ids)
    of_all = jax.value_and_grad(value_of_tops, (0, 1), has_aux=True)
    (expected, scores), expected_grads = of_all(*map(jnp.asarray, arrays))
    mesh = make_mesh(MeshConfig(2, tp))
    by_token = NamedSharding(mesh, PartitionSpec("fsdp"))
    by_word = NamedSharding(mesh, PartitionSpec("tp", "fsdp"))
    placed = jax.device_put(arrays, (by_token, by_word, by_token, by_token))
    with jax.set_mesh(mesh):
        compiled = jax.jit(of_all).lower(*placed).compile()
        (got, found), grads = compiled(*placed)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for x, y in zip((*found, *grads), (*scores, *expected_grads), strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6, rtol=1e-5)
    # The gathered part has the width of a chunk of the table, the same as without ids.
    text = compiled.as_text()
    assert re.findall(r"= \w+\[([\d,]+)\][^=]* all-gather", text) == [f"1,{CHUNK},{D}"] * 2
    assert not re.findall(r"all-to-all|collective-permute", text)
