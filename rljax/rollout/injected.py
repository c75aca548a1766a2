"""An engine with mismatch on purpose: it samples with other weights than those that are published to it.

Each change is seeded and repeatable, and at size 0 there is none. With the exact engine inside, the change alone is
measured. With another engine it comes on top of that engine's own mismatch.
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
    """Adds Gaussian noise of standard deviation ``size`` times the tensor's root mean square to each tensor.

    Args:
      params: The weights. Each layer of a stack counts as a tensor of its own.
      logical: The logical axes of each leaf.
      size: The relative size of the noise, a float32 scalar.
      seed: The seed of the noise.
      version: The policy version. Each version has noise of its own.

    Returns:
      The changed weights, float32.
    """
    key = jax.random.fold_in(jax.random.key(seed), version)

    def noisy(index: int, weight: Array, axes: tuple[str, ...]) -> Array:
        own, weight = tuple(i for i, axis in enumerate(axes) if axis != "layers"), weight.astype(jnp.float32)
        spread = jnp.sqrt(jnp.mean(jnp.square(weight), axis=own, keepdims=True))
        return weight + size * spread * jax.random.normal(jax.random.fold_in(key, index), weight.shape)

    leaves, tree = jax.tree.flatten(params)
    return jax.tree.map(noisy, jax.tree.unflatten(tree, range(len(leaves))), params, logical)


class InjectedEngine:
    """RolloutEngine around another one, which gets changed weights. Responses name the version that is changed.

    With ``staleness`` k it samples with the weights published k versions ago, or with the oldest that it has while
    there are fewer. So a resumed run is as stale as before only after k steps. Each version is kept on the devices.
    """

    def __init__(self, engine: RolloutEngine, inject: InjectConfig, config: PolicyConfig, mesh: Mesh):
        """Wraps an engine, which is closed with this one.

        Args:
          engine: The engine inside.
          inject: The changes of the weights.
          config: The shape of the policy.
          mesh: The trainer's mesh.
        """
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
        """Does nothing: the weights are changed when they are published."""

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
        """Closes the engine inside."""
        self._kept.clear()
        self._engine.close()
