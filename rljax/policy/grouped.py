"""Products of sorted rows with the matrices of their groups: what the experts of a mixture compute.

``jax.lax.ragged_dot`` is that product; XLA has a kernel of its own for it on TPUs only, and elsewhere multiplies every
row with every matrix. So there are three implementations behind one contract, chosen as ``policy.experts`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.policy.grouped_mosaic import TILE, mosaic_outer, mosaic_product
from rljax.policy.options import ExpertsName

_LEAST_ROWS, _MOST_ROWS = 8, 256


class Grouped(NamedTuple):
    """An implementation.

    Attributes:
      product: (rows [m, d], matrices [e, d, f], sizes [e]) -> [m, f] in the dtype of the rows, accumulated in float32.
        The first ``sizes[0]`` rows are multiplied with the first matrix, and so on; with ``transposed=True`` with
        matrices [e, f, d]. Rows after all groups give 0.
      outer: (rows [m, d], others [m, f], sizes [e]) -> [e, d, f]: of each group the sum over its rows of their outer
        products, accumulated in float32, and in float32 unless a kernel rounds it to the dtype of the rows.
    """

    product: Callable[..., Float[Array, "m f"]]
    outer: Callable[..., Float[Array, "e d f"]]


class _Blocks(NamedTuple):
    """Blocks of rows, none of which has rows of two groups; the last of a group may reach beyond it."""

    rows: int
    number: Int[Array, ""]
    ends: Int[Array, " e"]  # number of the block after a group's last one
    starts: Int[Array, " e"]  # first row of each group
    sizes: Int[Array, " e"]

    def at(self, number: Array) -> tuple[Array, Array, Array]:
        """(group, first row, bool [rows, 1]: which rows are the group's) of a block."""
        group = jnp.searchsorted(self.ends, number, side="right")
        before = jnp.where(group > 0, self.ends[group - 1], 0)
        done = (number - before) * self.rows
        mine = jnp.arange(self.rows)[:, None] < self.sizes[group] - done
        return group, self.starts[group] + done, mine


def _cut(sizes: Array, m: int) -> _Blocks:
    per_group = m // len(sizes)
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, 1 << max(0, per_group - 1).bit_length()))
    ends = jnp.cumsum(-(-sizes // rows))
    return _Blocks(rows, ends[-1], ends, jnp.cumsum(sizes) - sizes, sizes)


def blocks_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """``Grouped.product`` on any backend: a loop over blocks of rows of one group, as many as there are."""
    blocks = _cut(sizes, len(rows))
    padded = jnp.pad(rows, ((0, blocks.rows), (0, 0)))
    spec = "mf,df->md" if transposed else "md,df->mf"

    def one(number: Array, out: Array) -> Array:
        group, first, mine = blocks.at(number)
        block = jax.lax.dynamic_slice_in_dim(padded, first, blocks.rows)
        matrix = jax.lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        found = jnp.einsum(spec, block, matrix, preferred_element_type=jnp.float32).astype(rows.dtype)
        # What a block leaves beyond its group, the next block overwrites.
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, found, 0), first, 0)

    width = matrices.shape[1 if transposed else 2]
    out = jnp.zeros((len(padded), width), rows.dtype)
    return jax.lax.fori_loop(0, blocks.number, one, out)[: len(rows)]


def blocks_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """``Grouped.outer`` on any backend, in float32."""
    blocks = _cut(sizes, len(rows))
    padded, beside = (jnp.pad(each, ((0, blocks.rows), (0, 0))) for each in (rows, others))

    def one(number: Array, out: Array) -> Array:
        group, first, mine = blocks.at(number)
        block, other = (jax.lax.dynamic_slice_in_dim(each, first, blocks.rows) for each in (padded, beside))
        block, other = (jnp.where(mine, each, 0) for each in (block, other))
        found = jnp.einsum("md,mf->df", block, other, preferred_element_type=jnp.float32)
        so_far = jax.lax.dynamic_index_in_dim(out, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(out, so_far + found, group, 0)

    out = jnp.zeros((len(sizes), rows.shape[1], others.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.number, one, out)


def _before_end(found: Array, sizes: Array) -> Array:
    return jnp.where(jnp.arange(len(found))[:, None] < jnp.sum(sizes), found, 0)


def ragged_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """``Grouped.product`` by ``jax.lax.ragged_dot``, for TPUs."""
    matrices = jnp.swapaxes(matrices, 1, 2) if transposed else matrices
    found = jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)
    return _before_end(found.astype(rows.dtype), sizes)


def ragged_outer(rows: Array, others: Array, sizes: Array) -> Array:
    """``Grouped.outer`` by ``jax.lax.ragged_dot_general``, for TPUs; in float32."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(rows, others, sizes, numbers, preferred_element_type=jnp.float32)


def _mosaic_product(rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False) -> Array:
    return _before_end(mosaic_product(rows, matrices, sizes, transposed=transposed), sizes)


IN_BLOCKS = Grouped(blocks_product, blocks_outer)
IMPLEMENTATIONS: dict[str, Grouped] = {
    "xla": IN_BLOCKS,
    "ragged": Grouped(ragged_product, ragged_outer),
    "mosaic": Grouped(_mosaic_product, mosaic_outer),
}


def choose_experts(name: ExpertsName, device: Any, dtype: Any, widths: tuple[int, int]) -> Grouped:
    """The implementation of ``policy.experts``.

    Args:
      name: what is asked for.
      device: any of the mesh, which may be one that is only compiled for.
      dtype: of the rows and matrices.
      widths: d and f.

    Raises:
      ValueError: the device or the sizes are not for what was asked for; opens with the key.
    """
    refusals = {"mosaic": _why_not_mosaic(device, dtype, widths), "ragged": _why_not_ragged(device)}
    if name == "auto":
        return IMPLEMENTATIONS[next((one for one, refusal in refusals.items() if not refusal), "xla")]
    if refusal := refusals.get(name):
        raise ValueError(f"policy.experts = {name} {refusal}; auto takes what fits")
    return IMPLEMENTATIONS[name]


def _why_not_mosaic(device: Any, dtype: Any, widths: tuple[int, int]) -> str | None:
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not str(capability).startswith("9."):
        return f"needs an NVIDIA Hopper GPU, got {device.device_kind}"
    if jnp.dtype(dtype).itemsize != 2:
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype)}"
    if any(width % TILE for width in widths):
        return f"needs widths of a multiple of {TILE} on each device, got {widths}"
    return None


def _why_not_ragged(device: Any) -> str | None:
    return None if device.platform == "tpu" else f"needs a TPU, got {device.device_kind}"
