"""Rows of prefix trees, which hold each shared token at the beginning of several sequences only once.

The nodes of a tree are tokens, and the children of a token are the tokens that follow it in some sequence. A row holds
its trees in preorder: a token comes first, and then the subtree of each child. So the subtree of the token at ``j`` has
the indices from ``j`` up to but not including ``ends[j]``. The token at ``i`` sees the token at ``j <= i`` if ``i <
ends[j]``. Sequences that share nothing are trees without branches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class PrefixTrees(NamedTuple):
    """Rows of trees that the policy computes, and the indices of the states to score. A pytree of numpy or jax arrays.

    The last token of a sequence is not in its tree, because no token is predicted from it.
    """

    tokens: Any  # int32 [*m, b, t], the token ids
    ends: Any  # int32 [*m, b, t], the place after the last token of the token's subtree; 0 on padding
    positions: Any  # int32 [*m, b, t], the position of the token in its sequences, from 0
    sources: Any  # int32 [*m, b, s], the place of the token before each token of the flat rows; 0 on padding


def segment_ends(segment_ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Returns the ``ends`` of rows of sequences that share nothing; 0 on padding.

    ``segment_ids`` are 0 for padding, else equal for the contiguous tokens of one sequence.
    """
    t = segment_ids.shape[1]
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    last = jnp.where(segment_ids != after, jnp.arange(1, t + 1), t)
    return jnp.where(segment_ids > 0, jax.lax.cummin(last, axis=1, reverse=True), 0)


def states_at(hidden: Float[Array, "b t d"], places: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Takes the states at the indices ``places`` of each row. The gradients of a state are summed in float32."""
    return jnp.take_along_axis(hidden.astype(jnp.float32), places[..., None], axis=1).astype(hidden.dtype)
