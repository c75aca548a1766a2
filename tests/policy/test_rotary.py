import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.rotary import rotary_tables, rotate, rotate_by_product


def test_a_head_of_two_turns_by_its_position():
    """With two elements the angle is the position itself: (1, 0) at 2 radians is (cos 2, sin 2)."""
    tables = rotary_tables(jnp.asarray([[0, 2]]), 2, 10_000.0)
    found = rotate(jnp.asarray([1.0, 0.0]).reshape(1, 1, 1, 2).repeat(2, axis=1), tables)
    np.testing.assert_allclose(found[0, :, 0], [[1.0, 0.0], [np.cos(2.0), np.sin(2.0)]], atol=6e-8)


@pytest.mark.parametrize("head_dim", [2, 64, 128])
def test_the_product_gives_the_same_bits(head_dim):
    """Values and gradients of bfloat16 heads are the same, because each product has a single term."""
    rng = np.random.default_rng(head_dim)
    x, weights = (jnp.asarray(rng.normal(size=(2, 17, 3, head_dim)), jnp.bfloat16) for _ in range(2))
    tables = rotary_tables(jnp.asarray(rng.integers(0, 9216, (2, 17))), head_dim, 1e6)

    def both(function):
        value, pullback = jax.vjp(lambda heads: function(heads, tables), x)
        return value, *pullback(weights)

    for ours, expected in zip(both(rotate_by_product), both(rotate), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours.astype(jnp.float32), expected.astype(jnp.float32))
