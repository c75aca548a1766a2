"""What of a policy is trained: all of its weights, or adapters on some of them."""

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


class Trained(Protocol):
    """The parameters that the optimizer holds, and how they depend on the weights that the forward pass reads."""

    def abstract(self) -> Params:
        """The pytree of what is trained, with a float32 ``jax.ShapeDtypeStruct`` at each leaf."""
        ...

    def axes(self) -> Params:
        """The same with a tuple of logical axis names at each leaf."""
        ...

    def shardings(self, mesh: Mesh) -> Params:
        """The same with a NamedSharding at each leaf."""
        ...

    def part(self, weights: Params) -> Params:
        """Of a policy's pytree, of arrays or anything else, the leaves that need a gradient."""
        ...

    def joined(self, weights: Params, part: Params) -> Params:
        """A policy's pytree with other leaves in the place of ``part(weights)``."""
        ...

    def needed(self, params: Params) -> Any:
        """What ``gradients`` reads of the parameters."""
        ...

    def gradients(self, needed: Any, of_part: Params) -> Params:
        """The gradient of what is trained, from that of ``part(weights)``."""
        ...


@dataclass(frozen=True)
class AllWeights:
    """``Trained`` of a policy that is trained whole."""

    config: PolicyConfig

    def abstract(self) -> Params:
        """See ``Trained``."""
        return abstract_params(self.config)

    def axes(self) -> Params:
        """See ``Trained``."""
        return logical_axes(self.config)

    def shardings(self, mesh: Mesh) -> Params:
        """See ``Trained``."""
        return param_shardings(self.config, mesh)

    def part(self, weights: Params) -> Params:
        """See ``Trained``."""
        return weights

    def joined(self, weights: Params, part: Params) -> Params:
        """See ``Trained``."""
        del weights
        return part

    def needed(self, params: Params) -> Any:
        """See ``Trained``."""
        del params
        return ()

    def gradients(self, needed: Any, of_part: Params) -> Params:
        """See ``Trained``."""
        del needed
        return of_part


@dataclass(frozen=True)
class Adapters:
    """``Trained`` of adapters; the weights are those of ``MergedPolicy``."""

    config: PolicyConfig
    lora: LoraConfig

    def abstract(self) -> Params:
        """See ``Trained``."""
        return abstract_adapters(self.config, self.lora)

    def axes(self) -> Params:
        """See ``Trained``."""
        return adapter_axes(self.config, self.lora)

    def shardings(self, mesh: Mesh) -> Params:
        """See ``Trained``."""
        return adapter_shardings(self.config, self.lora, mesh)

    def part(self, weights: Params) -> Params:
        """See ``Trained``."""
        return targets_of(weights, self.config, self.lora)

    def joined(self, weights: Params, part: Params) -> Params:
        """See ``Trained``."""
        return with_targets(weights, part)

    def needed(self, params: Params) -> Any:
        """See ``Trained``."""
        return params

    def gradients(self, needed: Any, of_part: Params) -> Params:
        """See ``Trained``."""
        # Summed over the rows where the weights lie, as gradients of weights are, in their dtype.
        axes = self.part(logical_axes(self.config))
        placed = jax.tree.map(lambda leaf, names: constrain(leaf, *names), of_part, axes)
        return adapter_gradients(needed, placed, self.config, self.lora)


def find_trained(config: PolicyConfig, lora: LoraConfig) -> Trained:
    """What ``lora`` says is trained of a policy."""
    return Adapters(config, lora) if lora.rank else AllWeights(config)
