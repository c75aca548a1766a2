"""A hint to XLA about which operations share a kernel on a GPU."""

from __future__ import annotations

import jax
from jax import Array


def opaque(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays. On an NVIDIA GPU it hides from XLA what computes them, in forward and backward.

    XLA makes one kernel of several operations that read the same arrays, which are then read once. It does not if a
    matrix product computes these arrays. It does make one product of several small ones that share an operand. The
    result is wide, and more kernels cut and round it. Both cost memory traffic (docs/compile.md, "Fusion on a GPU").
    On a TPU XLA rounds inside of a product's kernel, which this would prevent. On other backends it does nothing.
    """
    return jax.lax.platform_dependent(
        *arrays, cuda=lambda *each: jax.lax.optimization_barrier(each), default=lambda *each: each
    )
