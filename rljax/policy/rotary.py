"""Rotary position embeddings of queries and keys, in the half-split form of transformers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.rope import RopeScaling, frequencies

Tables = tuple[Float[Array, "b t k"], Float[Array, "b t k"]]
"""The cosines and the sines of a row's angles, float32. Both halves of the last axis are equal."""
Rotate = Callable[[Float[Array, "b t h k"], Tables], Float[Array, "b t h k"]]


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Tables:
    """Computes the cosines and sines of ``positions``. ``theta`` is the base of the frequencies."""
    turns = jnp.asarray(frequencies(head_dim, theta, scaling))
    angles = positions[..., None].astype(jnp.float32) * turns[None, None]
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "b t h k"], tables: Tables) -> Float[Array, "b t h k"]:
    """Rotates heads in float32. The result has the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    return _sum(wide, jnp.concatenate([-second, first], axis=-1), *tables).astype(x.dtype)


def rotation(config: PolicyConfig, positions: Int[Array, "b t"], how: Rotate = rotate) -> Callable[[Array], Array]:
    """Returns the function that rotates heads [b, t, h, k] of a policy to the ``positions`` of their tokens."""
    turning = config.rotary_dim
    tables = rotary_tables(positions, turning, config.rope_theta, config.rope_scaling)
    if turning == config.head_dim:
        return lambda heads: how(heads, tables)
    return lambda heads: jnp.concatenate([how(heads[..., :turning], tables), heads[..., turning:]], axis=-1)


@jax.custom_vjp
def rotate_by_product(x: Float[Array, "b t h k"], tables: Tables) -> Float[Array, "b t h k"]:
    """Rotates bfloat16 heads with the same bits as :func:`rotate`. A product with a matrix exchanges their halves.

    XLA's TPU compiler copies float32 heads three times to exchange halves without a product. The matrix has the values
    0, 1 and -1, so its product is exact. The tables get no gradient.
    """
    return _rotated_by_product(x, *tables)


def _rotated_by_product(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    zero, one = np.zeros((half, half)), np.eye(half)
    turn = jnp.asarray(np.block([[zero, one], [-one, zero]]), x.dtype)
    turned = jnp.einsum("bthk,kl->bthl", x, turn, preferred_element_type=jnp.float32)
    return _sum(x.astype(jnp.float32), turned, cos, sin).astype(x.dtype)


def _sum(x: Array, turned: Array, cos: Array, sin: Array) -> Array:
    return x * cos[:, :, None, :] + turned * sin[:, :, None, :]


def _rotate_fwd(x: Array, tables: Tables) -> tuple[Array, Tables]:
    return rotate_by_product(x, tables), tables


def _rotate_bwd(tables: Tables, cotangent: Array) -> tuple[Array, None]:
    cos, sin = tables
    return _rotated_by_product(cotangent, cos, -sin), None  # the transpose of a rotation turns back


rotate_by_product.defvjp(_rotate_fwd, _rotate_bwd)
