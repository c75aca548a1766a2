"""The optimizer: clip by global norm, then AdamW, with the learning rate injected as a float32 hyperparameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optax

from rljax.schedule import inject_learning_rate


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the defaults are Table 1 of arXiv 2602.01826 and, where it is silent, verl's."""

    learning_rate: float = 1e-6
    """Initial learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay. As in AdamW it is multiplied by the learning rate."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.999
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: float = 1.0
    """The global norm of the gradient is clipped to this value. 0: no clipping."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        for name in ("weight_decay", "eps", "clip_norm"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Builds it. Moments take the dtype of the parameters, which are the float32 masters."""

    def build(learning_rate: Any) -> optax.GradientTransformation:
        adamw = optax.adamw(learning_rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw

    return inject_learning_rate(build, config.learning_rate)
