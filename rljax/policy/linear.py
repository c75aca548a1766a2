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
def _linear(specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array]) -> tuple[Array, ...]:
    products = [_product(spec, x, weight) for spec, weight in zip(specs, weights, strict=True)]
    if biases:
        products = [each.astype(jnp.float32) + _to_tokens(bias) for each, bias in zip(products, biases, strict=True)]
    return tuple(product.astype(x.dtype) for product in products)


def _to_tokens(bias: Array) -> Array:
    """A bias of each row [b, ...], in float32, beside the products [b, t, ...]."""
    return bias.astype(jnp.float32)[:, None]


def linear(specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array] = ()) -> tuple[Array, ...]:
    """``einsum(spec, x, weight)`` for each spec with its weight, plus its bias where there are biases.

    Products of one ``x`` belong together: its cotangent is then summed over the mesh once.

    Args:
      specs: einsum specifications such as ``"btd,df->btf"``; every index of a weight is one of ``x`` or of the result.
      x: activations.
      weights: of the dtype of ``x``.
      biases: none, or one for each product [b, t, ...]: [...], or [b, ...] with one for each row. They are added before
        the product is rounded.

    Returns:
      The products, in the dtype of ``x``, under the name ``PRODUCT`` for ``jax.checkpoint``.
    """
    biases = tuple(_of_rows(bias, spec, x.shape[0]) for bias, spec in zip(biases, specs, strict=bool(biases)))
    return tuple(checkpoint_name(product, PRODUCT) for product in _linear(specs, x, weights, biases))


def _of_rows(bias: Array, spec: str, rows: int) -> Array:
    """A bias for each of the rows, whose gradients are then added up where the bias was made."""
    shared = bias.ndim == len(spec.partition("->")[2]) - 2
    return jnp.broadcast_to(bias, (rows, *bias.shape)) if shared else bias


def _forward(
    specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[Array, Sequence[Array], Sequence[Array]]]:
    # Of a bias the backward pass needs the dtype alone.
    return _linear(specs, x, weights, biases), (x, weights, [bias[:0] for bias in biases])


def _backward(
    specs: Sequence[str], saved: tuple[Array, Sequence[Array], Sequence[Array]], cotangents: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    x, weights, biases = saved
    d_x, d_weights = [], []
    for spec, weight, cotangent in zip(specs, weights, cotangents, strict=True):
        inputs, out = spec.split("->")
        of_x, of_weight = inputs.split(",")
        d_x.append(_product(f"{out},{of_weight}->{of_x}", cotangent, weight))
        # A sum over the batch: across devices it travels in float32.
        d_weight = jnp.einsum(f"{of_x},{out}->{of_weight}", x, cotangent, preferred_element_type=jnp.float32)
        d_weights.append(d_weight.astype(weight.dtype))
    d_biases = [
        jnp.sum(c, 1, jnp.float32).astype(bias.dtype) for c, bias in zip(cotangents, biases, strict=bool(biases))
    ]
    return functools.reduce(jnp.add, d_x).astype(x.dtype), tuple(d_weights), tuple(d_biases)


_linear.defvjp(_forward, _backward)
