"""Mismatch put in on purpose: an engine that samples with other weights than those published to it.

Each change is seeded and repeatable, and none at size 0. With the exact engine inside, what is measured is the change
alone; with another engine it comes on top of that engine's own mismatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params, logical_axes, param_shardings
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.quantization import quantize, restore
from rljax.rollout.types import InjectConfig, SamplingParams


def add_noise(params: Params, logical: Params, size: Array, seed: Array, version: Array) -> Params:
    """Each tensor plus Gaussian noise of standard deviation ``size`` times its root mean square.

    Args:
      params: weights. Layers of a stack are tensors of their own.
      logical: logical axes at each leaf.
      size: float32 scalar.
      seed: of the noise.
      version: policy version; each has noise of its own.
    """
    key = jax.random.fold_in(jax.random.key(seed), version)

    def noisy(index: int, weight: Array, axes: tuple[str, ...]) -> Array:
        own, weight = tuple(i for i, axis in enumerate(axes) if axis != "layers"), weight.astype(jnp.float32)
        spread = jnp.sqrt(jnp.mean(jnp.square(weight), axis=own, keepdims=True))
        return weight + size * spread * jax.random.normal(jax.random.fold_in(key, index), weight.shape)

    leaves, tree = jax.tree.flatten(params)
    return jax.tree.map(noisy, jax.tree.unflatten(tree, range(len(leaves))), params, logical)


class InjectedEngine:
    """RolloutEngine around another, which gets changed weights; responses name the version that these were made from.

    With ``staleness`` k it samples with the weights published k versions ago, or with the oldest that it was given
    while there are fewer: a resumed run is as stale as before only after k steps. Each of them is kept on the devices.
    """

    def __init__(self, engine: RolloutEngine, inject: InjectConfig, config: PolicyConfig, mesh: Mesh):
        """``engine`` is closed with this one; ``config`` and ``mesh`` are the trainer's."""
        self._engine, self._inject, self._mesh = engine, inject, mesh
        logical, shardings = logical_axes(config), param_shardings(config, mesh)
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings)
        self._noise = jax.jit(lambda params, *rest: add_noise(params, logical, *rest), out_shardings=shardings)
        # Storing and restoring are two executables: inside one XLA may drop a pair of casts.
        self._quantize = jax.jit(lambda params: quantize(params, logical, inject.quantize))
        self._cast = jax.jit(lambda params: jax.tree.map(lambda p: p.astype(inject.dtype), params))
        self._restore = jax.jit(restore, out_shardings=shardings)
        self._kept: deque[tuple[int, Params]] = deque(maxlen=inject.staleness + 1)

    def prepare(self, params: Params, policy_version: int) -> None:
        """See RolloutEngine: nothing."""

    def publish(self, params: Params, policy_version: int) -> dict[str, float]:
        """Changes the weights as the configuration says, and publishes them to the engine inside."""
        inject = self._inject
        with jax.set_mesh(self._mesh):
            if inject.staleness:
                # A copy: the trainer's next step takes its own buffers over.
                self._kept.append((policy_version, self._copy(params)))
                policy_version, params = self._kept[0]
            if inject.weight_noise:
                seeds = np.uint32(inject.seed), np.uint32(policy_version)
                params = self._noise(params, np.float32(inject.weight_noise), *seeds)
            if inject.dtype != "same":
                params = self._restore(self._cast(params))
            if inject.quantize != "none":
                params = self._restore(self._quantize(params))
        return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples with the engine inside."""
        return self._engine.generate(prompts, n, sampling, seed=seed)

    def close(self) -> None:
        """See RolloutEngine."""
        self._kept.clear()
        self._engine.close()
