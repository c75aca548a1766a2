"""Weights of tokens in the loss are compared with numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import aggregation_weights, mean_over_sequence

# The first row has sequences 4 (three tokens and a hole) and 0 (one token). The second row has sequences 2 (two tokens)
# and 1 (no token in the mask).
IDS = np.array([[4, 4, 4, 4, 0, 0], [2, 2, 1, 1, 0, 0]], np.int32)
MASK = np.array([[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], bool)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token_mean", [[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], 6),
        ("sequence_mean", [[1 / 3, 0, 1 / 3, 1 / 3, 1, 0], [1 / 2, 1 / 2, 0, 0, 0, 0]], 3),
        ("sequence_sum", [[1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 0], [1 / 8, 1 / 8, 0, 0, 0, 0]], 3),
    ],
)
def test_weights_by_hand(aggregation, weights, denominator):
    def run(mask, ids):
        return aggregation_weights(aggregation, mask, constant=8, sequence_ids=ids, num_sequences=5)

    found, total = jax.jit(run)(MASK, IDS)
    np.testing.assert_allclose(found, weights, rtol=1e-7)
    assert float(total) == denominator
    assert found.dtype == total.dtype == jnp.float32
    nothing, zero = jax.jit(run)(np.zeros_like(MASK), IDS)
    assert not nothing.any()
    assert float(zero) == 0.0


def test_mean_over_sequence_by_hand_with_its_gradient():
    values = np.array([[1.0, np.nan, 4.0, 7.0, 5.0, np.nan], [2.0, 4.0, np.inf, 0, 0, 0]], np.float32)

    def run(values):
        return mean_over_sequence(values, MASK, IDS, 5)

    means, pull = jax.vjp(jax.jit(run), values)
    np.testing.assert_array_equal(means, [[4, 0, 4, 4, 5, 0], [3, 3, 0, 0, 0, 0]])
    cotangent = np.array([[3.0, 9.0, 0.0, 6.0, 2.0, np.nan], [1.0, 0.0, 9.0, 9.0, 9.0, 9.0]], np.float32)
    np.testing.assert_array_equal(pull(cotangent)[0], [[3, 0, 3, 3, 2, 0], [0.5, 0.5, 0, 0, 0, 0]])
