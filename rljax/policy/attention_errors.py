"""The errors of attention kernels, measured against float32, and a check of trees on the devices of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.attention import PackedAttention, attend, choose_attention, find_implementation, path_mask
from rljax.policy.config import AttentionName, PolicyConfig

RESULTS = ("output", "dq", "dk", "dv")
MOST_ERROR = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The largest relative error of a kernel that counts as right, by dtype: the dtype's machine epsilon."""
_ENDS = np.repeat([[291, 250, 251, 291, 321, 462, 382, 462, 0]], [100, 150, 1, 40, 30, 1, 60, 80, 50], axis=1)
"""The ends of a small row: a root of 100 tokens with three branches, a sequence, and a root of one token with two."""


def random_heads(ends: np.ndarray, dtype: str, policy: PolicyConfig) -> list[jax.Array]:
    """Returns random q, k and v, and a cotangent of the output, which is 0 on padding, as after a loss."""
    rng, h, g = np.random.default_rng(0), policy.num_heads, policy.num_kv_heads
    arrays = [rng.standard_normal((*ends.shape, n, policy.head_dim), np.float32) for n in (h, g, g, h)]
    arrays[3] *= (ends > 0)[:, :, None, None]
    return [jnp.asarray(x, dtype) for x in arrays]


@jax.jit
def relative_error(x: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the root mean square of the error, divided by the root mean square of the expected values."""
    x, expected = x.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((x - expected) ** 2) / jnp.mean(expected**2))


def gradients(attention: PackedAttention) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function (q, k, v, cotangent, ends) -> (output, dq, dk, dv); the output of padding is 0."""

    def run(q: Any, k: Any, v: Any, d_out: Any, ends: Any) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, ends), q, k, v)
        return jnp.where((ends > 0)[:, :, None, None], out, 0), *pull(d_out)

    return run


@jax.jit
def reference(q: Any, k: Any, v: Any, d_out: Any, ends: Any) -> tuple[jax.Array, ...]:
    """Computes the results of ``gradients`` in float32 at the highest precision, one key-value head at a time."""
    b, t, _, d = q.shape
    wide = (x.astype(jnp.float32).reshape(b, t, k.shape[2], -1, d) for x in (q, k, v, d_out))
    by_head = [jnp.moveaxis(x, 2, 0) for x in wide]
    run = gradients(lambda q, k, v, ends: attend(q, k, v, path_mask(ends)))
    with jax.default_matmul_precision("highest"):
        results = jax.lax.map(lambda arrays: run(*arrays, ends), by_head)
    return tuple(jnp.moveaxis(x, 0, 2).reshape(b, t, -1, d) for x in results)


def why_no_trees(name: AttentionName, device: Any, dtype: str, policy: PolicyConfig) -> str:
    """Returns how the kernel of ``policy.attention`` fails on a small row of trees; "" if its numbers are right.

    ``device`` is one of this process. The result is "" without a check if the kernel is XLA's, whose tests run on any
    machine. No test runs the calls of cuDNN and splash for trees on their devices.
    """
    kernel: Any = find_implementation(name, device, dtype, policy.head_dim)
    if kernel == "xla":
        return ""
    arrays = random_heads(_ENDS, dtype, policy)
    trees = choose_attention(kernel, device, dtype, policy.head_dim, trees=True)
    try:
        found = jax.jit(gradients(trees))(*arrays, _ENDS)
    except Exception as error:  # a kernel of another project may fail in any way
        return f"{kernel}'s attention of trees fails on {device.device_kind}: {error}".splitlines()[0][:300]
    errors = [float(relative_error(*pair)) for pair in zip(found, reference(*arrays, _ENDS), strict=True)]
    if all(error <= MOST_ERROR[dtype] for error in errors):
        return ""
    numbers = ", ".join(f"{what} {error:.1g}" for what, error in zip(RESULTS, errors, strict=True))
    return f"{kernel}'s attention of trees has relative errors on {device.device_kind}: {numbers}"
