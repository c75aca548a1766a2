"""Checksums of arrays on their devices, and of JSON."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.sharding import fetch, on_devices
from rljax.weights.sums import mixed


def array_checksums(tree: Any) -> dict[str, str]:
    """Computes a checksum of each array of a pytree, the same for any sharding.

    The 64 bits are two sums over all elements, each mixed with its position; one changed element always changes them.
    Arrays are summed on their devices, one after the other in the order of the tree, so that no two devices wait for
    each other in different sums. An array in the host's memory is copied to the devices for it.

    Returns:
      The dtype, shape and checksum of each array by tree path, such as ``float32[2, 3] 0123456789abcdef``.
    """
    leaves = jax.tree.leaves_with_path(tree)
    sums = {path: fetch(_sums(on_devices(leaf))) for path, leaf in leaves}
    return {tree_path(path): f"{array_form(leaf)} {sums[path][0]:08x}{sums[path][1]:08x}" for path, leaf in leaves}


def array_forms(tree: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf by tree path, the beginning of an ``array_checksums`` text.

    Args:
      tree: A pytree of arrays or ``jax.ShapeDtypeStruct``.
    """
    return {tree_path(path): array_form(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def tree_path(path: tuple[Any, ...]) -> str:
    """Returns a tree path as text, such as ``params/layers/mlp/gate``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def array_form(leaf: Any) -> str:
    """Returns dtype and shape as text, such as ``float32[2, 3]``."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def json_checksum(value: Any) -> str:
    """Computes the SHA-256 of a JSON value in its canonical form: sorted keys, no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Computes the two sums of an array of any shape, with elements of 1, 2 or 4 bytes: uint32 [2]."""
    unsigned = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    word = jax.lax.bitcast_convert_type(unsigned, f"uint{8 * unsigned.dtype.itemsize}").astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    placed = jax.lax.bitcast_convert_type(word ^ position * np.uint32(0x9E3779B1), jnp.int32)
    return jnp.stack(
        [jnp.sum(jax.lax.bitcast_convert_type(each, jnp.uint32), dtype=jnp.uint32) for each in mixed(placed)]
    )
