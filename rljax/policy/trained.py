"""The parameters that are trained: all weights of a policy, or adapters on some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.lora import (
    LoraConfig,
    abstract_adapters,
    adapter_axes,
    adapter_gradients,
    adapter_shardings,
    targets_of,
    with_targets,
)
from rljax.policy.model import Params, abstract_params, logical_axes, param_shardings
from rljax.sharding import constrain


class TrainedParams(Protocol):
    """The parameters that the optimizer holds, and their relation to the weights that the forward pass reads.

    The targets are the leaves of the policy's pytree that need a gradient.
    """

    def abstract(self) -> Params:
        """Returns the pytree of trained parameters with a float32 ``jax.ShapeDtypeStruct`` at each leaf."""
        ...

    def axes(self) -> Params:
        """Returns the pytree of trained parameters with a tuple of logical axis names at each leaf."""
        ...

    def shardings(self, mesh: Mesh) -> Params:
        """Returns the pytree of trained parameters with a NamedSharding at each leaf."""
        ...

    def targets(self, weights: Params) -> Params:
        """Returns the targets of a policy's pytree, whose leaves may be arrays or anything else."""
        ...

    def with_targets(self, weights: Params, targets: Params) -> Params:
        """Returns a policy's pytree with its targets replaced."""
        ...

    def residuals(self, params: Params) -> Any:
        """Returns the values that ``gradients`` needs from the trained parameters."""
        ...

    def gradients(self, residuals: Any, target_gradients: Params) -> Params:
        """Computes the gradients of the trained parameters from the gradients of the targets."""
        ...


@dataclass(frozen=True)
class AllWeights:
    """All weights of a policy as its trained parameters."""

    config: PolicyConfig

    def abstract(self) -> Params:
        """Returns the abstract weights."""
        return abstract_params(self.config)

    def axes(self) -> Params:
        """Returns the logical axes of the weights."""
        return logical_axes(self.config)

    def shardings(self, mesh: Mesh) -> Params:
        """Returns the shardings of the weights."""
        return param_shardings(self.config, mesh)

    def targets(self, weights: Params) -> Params:
        """Returns the whole pytree."""
        return weights

    def with_targets(self, weights: Params, targets: Params) -> Params:
        """Returns ``targets``, because they are the whole pytree."""
        del weights
        return targets

    def residuals(self, params: Params) -> Any:
        """Returns an empty tuple, because ``gradients`` needs nothing."""
        del params
        return ()

    def gradients(self, residuals: Any, target_gradients: Params) -> Params:
        """Returns the gradients of the targets."""
        del residuals
        return target_gradients


@dataclass(frozen=True)
class Adapters:
    """Adapters as the trained parameters of a policy. ``MergedPolicy`` computes its weights."""

    config: PolicyConfig
    lora: LoraConfig

    def abstract(self) -> Params:
        """Returns the abstract adapters."""
        return abstract_adapters(self.config, self.lora)

    def axes(self) -> Params:
        """Returns the logical axes of the adapters."""
        return adapter_axes(self.config, self.lora)

    def shardings(self, mesh: Mesh) -> Params:
        """Returns the shardings of the adapters."""
        return adapter_shardings(self.config, self.lora, mesh)

    def targets(self, weights: Params) -> Params:
        """Returns the weights that have an adapter."""
        return targets_of(weights, self.config, self.lora)

    def with_targets(self, weights: Params, targets: Params) -> Params:
        """Replaces the weights that have an adapter."""
        return with_targets(weights, targets)

    def residuals(self, params: Params) -> Any:
        """Returns the adapters."""
        return params

    def gradients(self, residuals: Any, target_gradients: Params) -> Params:
        """Computes the gradients of the adapters from the gradients of the weights that have one."""
        # The gradients are summed over the rows on the devices of the weights and in their dtype, as for all weights.
        axes = self.targets(logical_axes(self.config))
        placed = jax.tree.map(lambda leaf, names: constrain(leaf, *names), target_gradients, axes)
        return adapter_gradients(residuals, placed, self.config, self.lora)


def find_trained(config: PolicyConfig, lora: LoraConfig) -> TrainedParams:
    """Returns the trained parameters of a policy: its adapters if ``lora`` has a rank, else all weights."""
    return Adapters(config, lora) if lora.rank else AllWeights(config)
