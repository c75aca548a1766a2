"""A hint to XLA about which operations share a kernel on a GPU."""

from __future__ import annotations

import jax
from jax import Array


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
