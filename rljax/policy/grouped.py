"""Grouped products, which the experts of a mixture compute: sorted rows times the matrices of their groups.

``jax.lax.ragged_dot`` is this product, but XLA has a kernel for it on TPUs only. Other backends multiply every row with
every matrix. So there are three implementations of one contract, and ``policy.experts`` chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.policy.config import ExpertsName, choose_kernel

_LEAST_ROWS, _MOST_ROWS = 8, 256  # the fewest and the most rows of a block
_MOSAIC_TILE = 128
_MOSAIC_TILES: dict[str, Any] = {
    "block_m": _MOSAIC_TILE,
    "block_n": _MOSAIC_TILE,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 4,
}


class Grouped(NamedTuple):
    """An implementation of the two grouped products. Both products accumulate in float32."""

    # A function (rows [m, d], matrices [e, d, f], sizes [e]) -> [m, f], in the dtype of the rows. The first sizes[0]
    # rows are multiplied with the first matrix, and so on. With transposed=True the matrices are [e, f, d]. Rows after
    # all groups give 0.
    product: Callable[..., Float[Array, "m f"]]
    # A function (rows [m, d], others [m, f], sizes [e]) -> [e, d, f]: the sum of the outer products of each group's
    # rows. The result is float32, except from kernels that round it to the dtype of the rows.
    outer: Callable[..., Float[Array, "e d f"]]


class _Blocks(NamedTuple):
    """Blocks of rows. Each block serves one group; the last block of a group may extend into the next group's rows."""

    rows: int  # the number of rows of a block
    number: Int[Array, ""]  # the number of blocks
    ends: Int[Array, " e"]  # the index of the block after the last one of each group
    starts: Int[Array, " e"]  # the index of the first row of each group
    sizes: Int[Array, " e"]  # the number of rows of each group

    def at(self, number: Array) -> tuple[Array, Array, Array]:
        """Returns the group of a block, its first row, and which of its rows belong to the group, bool [rows, 1]."""
        group = jnp.searchsorted(self.ends, number, side="right")
        before = jnp.where(group > 0, self.ends[group - 1], 0)
        done = (number - before) * self.rows
        mine = jnp.arange(self.rows)[:, None] < self.sizes[group] - done
        return group, self.starts[group] + done, mine


def _divide(sizes: Array, m: int) -> _Blocks:
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, 1 << max(0, m // len(sizes) - 1).bit_length()))
    ends = jnp.cumsum(-(-sizes // rows))
    return _Blocks(rows, ends[-1], ends, jnp.cumsum(sizes) - sizes, sizes)


def blocks_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Computes ``Grouped.product`` on any backend, with a loop over blocks of rows of one group."""
    blocks = _divide(sizes, len(rows))
    padded = jnp.pad(rows, ((0, blocks.rows), (0, 0)))
    spec = "mf,df->md" if transposed else "md,df->mf"

    def add_block(number: Array, out: Array) -> Array:
        group, first, mine = blocks.at(number)
        block = jax.lax.dynamic_slice_in_dim(padded, first, blocks.rows)
        matrix = jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        product = jnp.einsum(spec, block, matrix, preferred_element_type=jnp.float32).astype(rows.dtype)
        # The next block overwrites the rows after the group's end.
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, product, 0), first, 0)

    width = matrices.shape[1 if transposed else 2]
    out = jnp.zeros((len(padded), width), rows.dtype)
    return jax.lax.fori_loop(0, blocks.number, add_block, out)[: len(rows)]


def blocks_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """Computes ``Grouped.outer`` on any backend, in float32."""
    blocks = _divide(sizes, len(rows))
    padded, beside = (jnp.pad(each, ((0, blocks.rows), (0, 0))) for each in (rows, others))

    def add_block(number: Array, out: Array) -> Array:
        group, first, mine = blocks.at(number)
        block, other = (jax.lax.dynamic_slice_in_dim(each, first, blocks.rows) for each in (padded, beside))
        block, other = (jnp.where(mine, each, 0) for each in (block, other))
        product = jnp.einsum("md,mf->df", block, other, preferred_element_type=jnp.float32)
        so_far = jax.lax.dynamic_index_in_dim(out, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, so_far + product, group, 0)

    out = jnp.zeros((len(sizes), rows.shape[1], others.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.number, add_block, out)


def _zero_after_groups(products: Array, sizes: Array) -> Array:
    return jnp.where(jnp.arange(len(products))[:, None] < jnp.sum(sizes), products, 0)


def ragged_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Computes ``Grouped.product`` with ``jax.lax.ragged_dot``, for TPUs."""
    matrices = jnp.swapaxes(matrices, 1, 2) if transposed else matrices
    products = jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)
    return _zero_after_groups(products.astype(rows.dtype), sizes)


def ragged_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """Computes ``Grouped.outer`` with ``jax.lax.ragged_dot_general`` in float32, for TPUs."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(rows, others, sizes, numbers, preferred_element_type=jnp.float32)


def mosaic_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Computes ``Grouped.product`` with JAX's Pallas kernel for Hopper GPUs."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # It imports parts of a GPU build.

    products = ragged_dot(rows, matrices, group_sizes=sizes, transpose_rhs=transposed, **_MOSAIC_TILES)
    return _zero_after_groups(products, sizes)


def mosaic_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """Computes ``Grouped.outer`` with JAX's Pallas kernel for Hopper GPUs, rounded to the dtype of the rows."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    return transposed_ragged_dot(rows, others, group_sizes=sizes, **_MOSAIC_TILES)


IN_BLOCKS = Grouped(blocks_product, blocks_outer)
IMPLEMENTATIONS: dict[str, Grouped] = {
    "xla": IN_BLOCKS,
    "ragged": Grouped(ragged_product, ragged_outer),
    "mosaic": Grouped(mosaic_product, mosaic_outer),
}


def choose_experts(name: ExpertsName, device: Any, dtype: Any, widths: tuple[int, int]) -> Grouped:
    """Returns the implementation that ``name``, a value of ``policy.experts``, means on a device.

    ``device`` is any device of the mesh, which may exist only for compilation ahead of time. ``dtype`` is the dtype of
    the rows and matrices, and ``widths`` are the widths d and f on each device.

    Raises:
      ValueError: The implementation does not support the device or the sizes. The message begins with the key.
    """
    not_ragged = None if device.platform == "tpu" else f"needs a TPU, got {device.device_kind}"
    refusals = {"mosaic": _why_not_mosaic(device, dtype, widths), "ragged": not_ragged}
    return IMPLEMENTATIONS[choose_kernel("policy.experts", name, refusals)]


def _why_not_mosaic(device: Any, dtype: Any, widths: tuple[int, int]) -> str | None:
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not str(capability).startswith("9."):
        return f"needs an NVIDIA Hopper GPU, got {device.device_kind}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype)}"
    if any(width % _MOSAIC_TILE for width in widths):
        return f"needs widths that are multiples of {_MOSAIC_TILE} on each device, got {widths}"
    return None
