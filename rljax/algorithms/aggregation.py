"""The mean of per-token losses, as sums that do not depend on micro-batches and packed rows."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import check_choice
from rljax.mismatch import read_sequences

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


def aggregation_weights(
    aggregation: Aggregation,
    mask: Bool[Array, "b t"],
    *,
    constant: int,
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
) -> tuple[Float[Array, "b t"], Float[Array, ""]]:
    """Computes the loss weight of each token of a micro-batch and the micro-batch's part of the denominator.

    The loss of the batch is the sum of weights * losses over all micro-batches, divided by the sum of their
    denominators. A batch without tokens has denominator 0; then 1 is used.

    Args:
      aggregation: The kind of mean. "token_mean": each token weighs 1, and the denominator is the number of tokens.
        "sequence_mean": each of the n_i tokens of a sequence weighs 1 / n_i, and the denominator is the number of
        sequences. "sequence_sum": each token weighs 1 / constant, with the same denominator. Sequences without a token
        in the mask do not count.
      mask: The tokens in the loss.
      constant: The divisor of "sequence_sum" (tokens), at least 1.
      sequence_ids, num_sequences: The index of each token's sequence, which lies whole in one row, and their number.

    Returns:
      The weights [b, t] and the denominator [], both float32.

    Raises:
      ValueError: The aggregation is unknown, or the constant is below 1.
    """
    check_choice("aggregation", aggregation, Aggregation)
    if constant < 1:
        raise ValueError(f"constant must be at least 1, got {constant}")
    mask = jnp.asarray(mask) != 0
    ones = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return ones, jnp.sum(mask, dtype=np.int32).astype(jnp.float32)
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    number = jnp.sum(sequences.present, dtype=np.int32).astype(jnp.float32)
    if aggregation == "sequence_sum":
        return ones / constant, number
    return jnp.where(mask, 1.0 / jnp.maximum(sequences.length, 1).astype(jnp.float32), 0.0), number


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mean_over_sequence(
    values: Float[Array, "b t"], mask: Bool[Array, "b t"], sequence_ids: Int[Array, "b t"], num_sequences: int
) -> Float[Array, "b t"]:
    """Computes the mean of each sequence over its tokens in the mask, repeated over these tokens; 0 elsewhere.

    Only reverse-mode differentiation is supported.
    """
    mask = jnp.asarray(mask)
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    return jnp.where(mask, sequences.spread(sequences.means(jnp.where(mask, values, 0))), 0)


def _forward(values: Any, *saved: Any) -> tuple[Any, Any]:
    return mean_over_sequence(values, *saved), saved[:2]


def _backward(num_sequences: int, saved: Any, cotangent: Any) -> tuple[Any, None, None]:
    """Averages the cotangents. The transpose of the mean is the mean itself, because its matrix is symmetric."""
    return mean_over_sequence(cotangent, *saved, num_sequences), None, None


mean_over_sequence.defvjp(_forward, _backward)
