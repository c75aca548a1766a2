"""The parameters that are trained: all weights of a policy, or adapters on some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.lora import LoraConfig, abstract_adapters, adapter_axes, adapter_gradients, targets_of, with_targets
from rljax.policy.model import Params, abstract_params, logical_axes
from rljax.sharding import constrain_tree, tree_shardings


@dataclass(frozen=True)
class TrainedParams:
    """The parameters that the optimizer holds, and their relation to the weights that the forward pass reads.

    If ``lora`` has a rank they are the adapters, and ``MergedPolicy`` computes the weights. Otherwise they are all
    weights. The targets are the leaves of the policy's pytree that need a gradient.
    """

    config: PolicyConfig
    lora: LoraConfig

    def abstract(self) -> Params:
        """Returns the pytree of trained parameters with a float32 ``jax.ShapeDtypeStruct`` at each leaf."""
        return abstract_adapters(self.config, self.lora) if self.lora.rank else abstract_params(self.config)

    def axes(self) -> Params:
        """Returns the pytree of trained parameters with a tuple of logical axis names at each leaf."""
        return adapter_axes(self.config, self.lora) if self.lora.rank else logical_axes(self.config)

    def shardings(self, mesh: Mesh) -> Params:
        """Returns the pytree of trained parameters with a NamedSharding at each leaf."""
        return tree_shardings(mesh, self.axes(), self.abstract())

    def targets(self, weights: Params) -> Params:
        """Returns the targets of a policy's pytree, whose leaves may be arrays or anything else."""
        return targets_of(weights, self.config, self.lora) if self.lora.rank else weights

    def with_targets(self, weights: Params, targets: Params) -> Params:
        """Returns a policy's pytree with its targets replaced."""
        return with_targets(weights, targets) if self.lora.rank else targets

    def residuals(self, params: Params) -> Any:
        """Returns the values that ``gradients`` needs from the trained parameters."""
        return params if self.lora.rank else ()

    def gradients(self, residuals: Any, target_gradients: Params) -> Params:
        """Computes the gradients of the trained parameters from the gradients of the targets."""
        if not self.lora.rank:
            return target_gradients
        # The gradients are summed over the rows on the devices of the weights and in their dtype, as for all weights.
        placed = constrain_tree(target_gradients, self.targets(logical_axes(self.config)))
        return adapter_gradients(residuals, placed, self.config, self.lora)
