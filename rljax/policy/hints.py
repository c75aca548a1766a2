"""Hints to XLA about matrix products that several operations read: which of them share a kernel, and their layout."""

from __future__ import annotations

import jax
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint


def opaque(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays unchanged. On an NVIDIA GPU, XLA does not see through this call what computed them.

    There are two uses. The result of a matrix product may have several readers. With this call between them, XLA puts
    the readers into one kernel, which reads the result once. And several small products may share an operand. XLA joins
    them into one product with a float32 result, and needs more kernels to cut and round it. It does not join products
    whose operands come from this call. docs/compile.md counts the memory traffic that both uses save.

    Other backends ignore this call. On a TPU XLA rounds a product inside of its kernel, which a barrier would prevent.
    Gradients pass through. The arrays have any shape and dtype, and one may be given more than once.
    """
    return jax.lax.platform_dependent(
        *arrays, cuda=lambda *each: jax.lax.optimization_barrier(each), default=lambda *each: each
    )


def features_last(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays unchanged. On a TPU, the values of one token then lie beside each other in memory.

    XLA may otherwise place the tokens of one feature beside each other. The products that give the gradients of
    weights take the first layout if XLA computes them in parts, and XLA would copy each operand for them. The gradients
    of the arrays get the same layout. docs/compile.md counts the memory traffic that this saves.

    Other backends ignore this call. The arrays have any dtype, and their last axis is that of the features.
    """
    return jax.lax.platform_dependent(*arrays, tpu=_features_last, default=lambda *each: each)


def _features_last(*arrays: Array) -> tuple[Array, ...]:
    return tuple(with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays)
