"""Changes of the weights that sample, and an engine that samples with changed weights on purpose.

8-bit weights and key-value caches have the same numbers as in quantized inference engines. Noise is seeded and
repeatable. Around the exact engine, the change is the only cause of a run's mismatch. With another engine the change
comes on top of that engine's own mismatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params, logical_axes, param_shardings
from rljax.rollout.engine import RolloutEngine, Samples, TurnRequest
from rljax.rollout.types import NOISE_SEED, InjectConfig, SamplingParams

LARGEST = {"int8": 127.0, "fp8": float(jnp.finfo(jnp.float8_e4m3fn).max)}
STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
CACHES = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
"""The dtype of a cache with 8 bits an element, by ``rollout.kv_cache_dtype``."""


class Quantized(NamedTuple):
    """A weight as an engine stores it: values times scale."""

    values: Array  # the rounded values, int8 or float8_e4m3fn
    scale: Array  # the scale of each output channel, float32; its size is 1 along the axes that are summed over


def summed_axes(logical: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the input axes of a block's matrix, over which a product sums; () for any other tensor.

    ``logical`` has the logical axes of the tensor. The model width is the input if it is the first axis of the matrix,
    and the output if it is the last.
    """
    is_matrix = logical[0] == "layers" and len(logical) > 2  # a bias has one axis
    if not is_matrix or "router" in logical or not {"embed", "expert_embed"} & set(logical):
        return ()
    first = 2 if logical[1] == "experts" else 1
    inputs = (first,) if logical[first] in ("embed", "expert_embed") else range(first, len(logical) - 1)
    return tuple(inputs)


def quantize(params: Params, logical: Params, kind: str) -> Params:
    """Rounds the blocks' matrices to ``Quantized``, symmetric with a scale for each output channel.

    The largest absolute weight of a channel becomes 127 for ``kind`` int8, or 448 for fp8 (float8_e4m3fn). Embedding,
    LM head, norms and routers become float32 without rounding, because vLLM's int8 and fp8 leave them out. ``logical``
    has the logical axes of each leaf.
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


def restore(params: Params) -> Params:
    """Returns the weights in float32 from the result of ``quantize`` or of a cast."""

    def plain(weight: Any) -> Array:
        if isinstance(weight, Quantized):
            return weight.values.astype(jnp.float32) * weight.scale
        return weight.astype(jnp.float32)

    return jax.tree.map(plain, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def to_cache(x: Array, dtype: Any) -> Array:
    """Returns keys or values as a cache of ``dtype`` stores them, rounded with scale 1.

    A number beyond the largest finite one of ``dtype`` becomes the largest, as in vLLM (448 in float8_e4m3fn). Keys or
    values that have ``dtype`` already are returned unchanged.
    """
    if x.dtype == dtype:
        return x
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)


def add_noise(params: Params, logical: Params, size: Array, seed: Array, version: Array) -> Params:
    """Adds Gaussian noise to each tensor, with a standard deviation of ``size`` times the tensor's root mean square.

    Each layer of a stack counts as a tensor of its own, and each version gets other noise. The weights become float32.
    ``logical`` has the logical axes of each leaf.
    """
    key = jax.random.fold_in(jax.random.key(seed), version)

    def noisy(index: int, weight: Array, axes: tuple[str, ...]) -> Array:
        own, weight = tuple(i for i, axis in enumerate(axes) if axis != "layers"), weight.astype(jnp.float32)
        spread = jnp.sqrt(jnp.mean(jnp.square(weight), axis=own, keepdims=True))
        return weight + size * spread * jax.random.normal(jax.random.fold_in(key, index), weight.shape)

    leaves, tree = jax.tree.flatten(params)
    return jax.tree.map(noisy, jax.tree.unflatten(tree, range(len(leaves))), params, logical)


class InjectedEngine(RolloutEngine):
    """RolloutEngine around another engine, to which it publishes changed weights. Rounded weights save no memory.

    A response names the version whose weights were changed. With ``staleness`` k that is the version published k
    versions ago, or the oldest one if there are fewer. So a resumed run reaches the full staleness only after k steps.
    The k + 1 newest versions are kept on the devices.
    """

    def __init__(self, engine: RolloutEngine, inject: InjectConfig, config: PolicyConfig, mesh: Mesh):
        """Wraps ``engine``, which is closed together with this one. ``config`` is the shape of the policy."""
        self._engine, self._inject, self._mesh = engine, inject, mesh
        logical, shardings = logical_axes(config), param_shardings(config, mesh)
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings)
        self._noise = jax.jit(lambda params, *rest: add_noise(params, logical, *rest), out_shardings=shardings)
        # Storing and restoring are two executables: inside one XLA may drop a pair of casts.
        self._quantize = jax.jit(lambda params: quantize(params, logical, inject.quantize))
        self._cast = jax.jit(lambda params: jax.tree.map(lambda p: p.astype(inject.dtype), params))
        self._restore = jax.jit(restore, out_shardings=shardings)
        self._kept: deque[tuple[int, Params]] = deque(maxlen=inject.staleness + 1)

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Changes the weights as the ``InjectConfig`` says, and publishes them to the wrapped engine."""
        inject = self._inject
        with jax.set_mesh(self._mesh):
            if inject.staleness:
                # A copy: the trainer's next step takes its own buffers over.
                self._kept.append((policy_version, self._copy(params)))
                policy_version, params = self._kept[0]
            if inject.weight_noise:
                seeds = np.uint32(NOISE_SEED), np.uint32(policy_version)
                params = self._noise(params, np.float32(inject.weight_noise), *seeds)
            if inject.dtype != "same":
                params = self._restore(self._cast(params))
            if inject.quantize != "none":
                params = self._restore(self._quantize(params))
        return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples with the wrapped engine."""
        return self._engine.generate(prompts, n, sampling, seed=seed)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples with the wrapped engine."""
        return self._engine.answer_round(requests, sampling, seed=seed)

    def close(self) -> None:
        """Closes the wrapped engine."""
        self._kept.clear()
        self._engine.close()
