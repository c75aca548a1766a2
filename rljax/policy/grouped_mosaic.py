"""Grouped products on an NVIDIA Hopper GPU, by the Pallas kernels that JAX carries for them.

Their sums are accumulated in float32 and rounded once to the dtype of the operands.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

TILE = 128
_TILES: dict[str, Any] = {"block_m": TILE, "block_n": TILE, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}


def mosaic_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """``grouped.Grouped.product``, but that rows after all groups give anything."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # imports what only a GPU build has

    return ragged_dot(rows, matrices, group_sizes=sizes, transpose_rhs=transposed, **_TILES)


def mosaic_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """``grouped.Grouped.outer``, in the dtype of the rows."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    return transposed_ragged_dot(rows, others, group_sizes=sizes, **_TILES)
