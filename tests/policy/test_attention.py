"""Long rows go through query chunks: same numbers, same gradients, no leak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy import attention
from rljax.policy.attention import attend, packed_attention, segment_mask


@pytest.fixture
def arrays(monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK", 16)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 64, 4, 8)).astype(np.float32)
    k, v = (rng.normal(size=(2, 64, 2, 8)).astype(np.float32) for _ in range(2))
    segments = np.repeat([[1, 2, 3, 0], [1, 1, 2, 2]], 16, axis=1).astype(np.int32)
    return q, k, v, segments


def test_chunks_give_the_plain_values_and_gradients(arrays):
    q, k, v, segments = (jnp.asarray(x) for x in arrays)
    weights = jnp.sin(jnp.arange(q.size).reshape(q.shape))

    def chunked(q, k, v):
        return jnp.sum(weights * packed_attention(q, k, v, segments))

    def plain(q, k, v):
        return jnp.sum(weights * attend(q, k, v, segment_mask(segments)))

    got, expected = jax.value_and_grad(chunked, (0, 1, 2))(q, k, v), jax.value_and_grad(plain, (0, 1, 2))(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_nothing_crosses_a_segment_in_chunks(arrays):
    q, k, v, segments = arrays
    before = np.asarray(packed_attention(q, k, v, segments))
    first = (segments == 1)[:, :, None, None]
    after = np.asarray(packed_attention(q, np.where(first, k + 1, k), np.where(first, v - 1, v), segments))
    others = segments > 1
    np.testing.assert_array_equal(after[others], before[others])
    assert not np.array_equal(after, before)


def test_a_chunked_row_needs_no_score_matrix(arrays):
    q, k, v, segments = arrays
    text = jax.jit(packed_attention).lower(q, k, v, segments).compile().as_text()
    assert "64,64" not in text.replace("s32[64,64]", "")


def test_one_query_sees_only_its_mask():
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
    v = jnp.arange(12.0).reshape(1, 3, 1, 4)
    mask = jnp.array([[[True, False, True]]])
    np.testing.assert_allclose(attend(q, k, v, mask)[0, 0, 0], (v[0, 0, 0] + v[0, 2, 0]) / 2)
