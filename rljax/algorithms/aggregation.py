"""From per-token losses to one number, in a form that micro-batches and packed rows cannot change."""

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
    """Weights of a micro-batch's tokens and its part of the denominator, both float32.

    The batch's loss is the sum over micro-batches of sum(weights * losses) over the sum of their denominators (taken
    as 1 when that is 0, which only a batch without tokens gives).

    Args:
      aggregation: "token_mean": 1 a token, over the number of tokens; "sequence_mean": 1 / n_i a token of a sequence
        with n_i of them, over the number of sequences; "sequence_sum": 1 / constant, over the number of sequences.
        Sequences without a token in the mask do not count.
      mask: tokens in the loss.
      constant: divisor of "sequence_sum" (tokens), at least 1.
      sequence_ids: index of each token's sequence in the batch; all of a sequence lies in one row.
      num_sequences: sequences of the batch (static).

    Raises:
      ValueError: an unknown aggregation, or a constant below 1.
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
    """Each sequence's mean over its tokens in the mask, repeated over them; 0 elsewhere. Differentiable in reverse."""
    mask = jnp.asarray(mask)
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    return jnp.where(mask, sequences.spread(sequences.means(jnp.where(mask, values, 0))), 0)


def _forward(values: Any, mask: Any, sequence_ids: Any, num_sequences: int) -> tuple[Any, Any]:
    return mean_over_sequence(values, mask, sequence_ids, num_sequences), (mask, sequence_ids)


def _backward(num_sequences: int, saved: Any, cotangent: Any) -> tuple[Any, None, None]:
    """Averaging within blocks is a symmetric matrix: it is its own transpose, so nothing need be scattered."""
    return mean_over_sequence(cotangent, *saved, num_sequences), None, None


mean_over_sequence.defvjp(_forward, _backward)
