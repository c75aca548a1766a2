"""Products of activations and weights. The operands of forward and backward products have the same dtype.

The transpose of ``jnp.einsum(..., preferred_element_type=float32).astype(x.dtype)`` has float32 operands: the cotangent
is widened before the product, and so is the gathered weight. Here the cotangent keeps the dtype of the activations, and
every product accumulates in float32.

If the mesh splits heads or the width of the MLP (``tp``), the product of a device is a part of a sum over devices. Such
a part is first rounded to the dtype of the activations, so that sums inside a layer travel in that dtype. The product
itself still accumulates in float32.
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
    """Computes the einsum, accumulated in float32. A part of a sum over devices is rounded to the dtype of ``a``."""
    dtype = jnp.float32 if axis_size("heads") == 1 else a.dtype
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array]) -> tuple[Array, ...]:
    products = [_product(spec, x, weight) for spec, weight in zip(specs, weights, strict=True)]
    if biases:
        products = [each.astype(jnp.float32) + _to_tokens(bias) for each, bias in zip(products, biases, strict=True)]
    return tuple(product.astype(x.dtype) for product in products)


def _to_tokens(bias: Array) -> Array:
    """Adds the axis t to a bias of each row [b, ...], in float32."""
    return bias.astype(jnp.float32)[:, None]


def linear(specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array] = ()) -> tuple[Array, ...]:
    """Computes ``einsum(spec, x, weight)`` for each spec and weight, and adds the biases if there are any.

    Compute all products of one ``x`` in one call: its cotangent is then summed over the mesh only once.

    Args:
      specs: The einsum specifications, such as ``"btd,df->btf"``. Every index of a weight is an index of ``x`` or of
        the result.
      weights: The weights, in the dtype of ``x``.
      biases: The bias of each product [b, t, ...], or nothing. A bias is [...], or [b, ...] with one for each row. It
        is added before the product is rounded.

    Returns:
      The products, in the dtype of ``x``. Their name for ``jax.checkpoint`` is ``PRODUCT``.
    """
    biases = tuple(_of_rows(bias, spec, x.shape[0]) for bias, spec in zip(biases, specs, strict=bool(biases)))
    return tuple(checkpoint_name(product, PRODUCT) for product in _linear(specs, x, weights, biases))


def _of_rows(bias: Array, spec: str, rows: int) -> Array:
    """Broadcasts a bias to the rows. The transpose of the broadcast adds up the gradients of the rows."""
    shared = bias.ndim == len(spec.partition("->")[2]) - 2
    return jnp.broadcast_to(bias, (rows, *bias.shape)) if shared else bias


def _forward(
    specs: Sequence[str], x: Array, weights: Sequence[Array], biases: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[Array, Sequence[Array], Sequence[Array]]]:
    # The backward pass needs only the dtype of a bias.
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
        # This is a sum over the batch, so across devices it travels in float32.
        d_weight = jnp.einsum(f"{of_x},{out}->{of_weight}", x, cotangent, preferred_element_type=jnp.float32)
        d_weights.append(d_weight.astype(weight.dtype))
    d_biases = [
        jnp.sum(c, 1, jnp.float32).astype(bias.dtype) for c, bias in zip(cotangents, biases, strict=bool(biases))
    ]
    return functools.reduce(jnp.add, d_x).astype(x.dtype), tuple(d_weights), tuple(d_biases)


_linear.defvjp(_forward, _backward)
