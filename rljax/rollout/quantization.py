"""Eight-bit weights and key-value caches, as quantized inference engines hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rljax.policy.model import Params

LARGEST = {"int8": 127.0, "fp8": float(jnp.finfo(jnp.float8_e4m3fn).max)}
STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
CACHES = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
"""The dtype of a cache with 8 bits an element, by ``rollout.kv_cache_dtype``."""


class Quantized(NamedTuple):
    """A weight as an engine stores it: values times scale.

    Attributes:
      values: The rounded values, int8 or float8_e4m3fn.
      scale: The scale of each output channel, float32, of size 1 along the axes that are summed over.
    """

    values: Array
    scale: Array


def summed_axes(logical: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the axes that a block's matrix sums over, its inputs; () for a tensor that is no block's matrix.

    The model width is the input where it comes first and the output where it comes last.
    """
    if logical[0] != "layers" or "router" in logical or not {"embed", "expert_embed"} & set(logical):
        return ()
    first = 2 if logical[1] == "experts" else 1
    inputs = (first,) if logical[first] in ("embed", "expert_embed") else range(first, len(logical) - 1)
    return tuple(inputs)


def quantize(params: Params, logical: Params, kind: str) -> Params:
    """Rounds the blocks' matrices to ``Quantized``, symmetric with a scale for each output channel.

    Embedding, LM head, norms and routers keep their values, as in vLLM's int8 and fp8, and become float32.

    Args:
      params: The weights, of any float dtype.
      logical: The logical axes of each leaf.
      kind: The kind of rounding: int8, or fp8 for float8_e4m3fn. The largest weight of a channel becomes 127, or 448.
    """

    def stored(weight: Array, axes: tuple[str, ...]) -> Any:
        inputs, weight = summed_axes(axes), weight.astype(jnp.float32)
        if not inputs:
            return weight
        largest = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True)
        scale = jnp.where(largest > 0, largest, 1.0) / LARGEST[kind]
        scaled = jnp.clip(weight / scale, -LARGEST[kind], LARGEST[kind])
        return Quantized((jnp.round(scaled) if kind == "int8" else scaled).astype(STORED[kind]), scale)

    return jax.tree.map(stored, params, logical)


def restore(params: Params, dtype: Any = jnp.float32) -> Params:
    """Returns weights in ``dtype`` from what ``quantize`` or a cast stored. Values times scale is float32."""

    def plain(weight: Any) -> Array:
        if isinstance(weight, Quantized):
            weight = weight.values.astype(jnp.float32) * weight.scale
        return weight.astype(dtype)

    return jax.tree.map(plain, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def to_cache(x: Array, dtype: Any) -> Array:
    """Returns keys or values as a cache of ``dtype`` stores them: rounded with scale 1, unless it is their own dtype.

    A number beyond the largest finite one of ``dtype`` becomes that one, as in vLLM (448 in float8_e4m3fn).
    """
    if x.dtype == dtype:
        return x
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)
