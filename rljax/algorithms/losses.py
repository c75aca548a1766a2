"""Policy losses: per-token terms that the step sums over micro-batches and divides by a global denominator."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True)
class LossConfig:
    """The policy loss (Table 1 of arXiv 2602.01826).

    Attributes:
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: and above at 1 + clip_high.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must be in [0, 1], got {self.clip_low}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high must not be negative, got {self.clip_high}")


def ppo_clip(
    ratio: Float[Array, "b t"], advantages: Float[Array, "b t"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO's "clip-higher").

    Args:
      ratio: exp(trainer_logprobs - old_logprobs).
      advantages: one a token.
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: and above at 1 + clip_high.

    Returns:
      The loss of each token (lower is better) and 1.0 where the clipped branch is the one taken, with no gradient.
    """
    plain = ratio * advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return -jnp.minimum(plain, clipped), (clipped < plain).astype(jnp.float32)
