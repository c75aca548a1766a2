"""Products of activations with weights whose backward products have operands of the same dtype as the forward's.

``jnp.einsum(..., preferred_element_type=float32).astype(x.dtype)`` is transposed into products of float32 operands: the
cotangent is widened before it is multiplied, and with it the other operand, a weight that was gathered. Here the
cotangent keeps the dtype of the activations, and every product accumulates in float32.

Where the mesh splits heads or the MLP's width (``tp``) a device's product is a part of a sum over devices. Such a part
is rounded to the activations' dtype first, so that what travels inside a layer has that dtype; the product itself still
accumulates in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from rljax.sharding import axis_size

PRODUCT = "product"


def _product(spec: str, a: Array, b: Array) -> Array:
    """The einsum, accumulated in float32; in float32 where it is a whole sum, else in the dtype of ``a``."""
    dtype = jnp.float32 if axis_size("heads") == 1 else a.dtype
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(specs: Sequence[str], x: Array, weights: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(_product(spec, x, weight).astype(x.dtype) for spec, weight in zip(specs, weights, strict=True))


def linear(specs: Sequence[str], x: Array, weights: Sequence[Array]) -> tuple[Array, ...]:
    """``einsum(spec, x, weight)`` for each spec with its weight.

    Products of one ``x`` belong together: its cotangent is then summed over the mesh once.

    Args:
      specs: einsum specifications such as ``"btd,df->btf"``; every index of a weight is one of ``x`` or of the result.
      x: activations.
      weights: of the dtype of ``x``.

    Returns:
      The products, in the dtype of ``x``, under the name ``PRODUCT`` for ``jax.checkpoint``.
    """
    return tuple(checkpoint_name(product, PRODUCT) for product in _linear(specs, x, weights))


def _forward(
    specs: Sequence[str], x: Array, weights: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[Array, Sequence[Array]]]:
    return _linear(specs, x, weights), (x, weights)


def _backward(
    specs: Sequence[str], saved: tuple[Array, Sequence[Array]], cotangents: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    x, weights = saved
    d_x, d_weights = [], []
    for spec, weight, cotangent in zip(specs, weights, cotangents, strict=True):
        inputs, out = spec.split("->")
        of_x, of_weight = inputs.split(",")
        d_x.append(_product(f"{out},{of_weight}->{of_x}", cotangent, weight))
        # A sum over the batch: across devices it travels in float32.
        d_weight = jnp.einsum(f"{of_x},{out}->{of_weight}", x, cotangent, preferred_element_type=jnp.float32)
        d_weights.append(d_weight.astype(weight.dtype))
    return functools.reduce(jnp.add, d_x).astype(x.dtype), tuple(d_weights)


_linear.defvjp(_forward, _backward)
