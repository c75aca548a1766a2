"""Policy losses: one term for each token. The step sums them over micro-batches and divides by one denominator.

The mean of the losses is written as sums that do not depend on micro-batches and packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.errors import check_at_least, check_choices
from rljax.mismatch import read_sequences
from rljax.mismatch.accurate import RATIO_BOUND, exp_minus_one_minus_x

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


def aggregation_weights(
    aggregation: Aggregation,
    mask: Bool[Array, "b t"],
    *,
    constant: int,
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
) -> tuple[Float[Array, "b t"], Float[Array, ""]]:
    """Computes the loss weight of each token of a micro-batch and the micro-batch's part of the denominator.

    The loss of the batch is the sum of weights * losses over all micro-batches, divided by the sum of their
    denominators. A batch without tokens has denominator 0; then 1 is used.

    Args:
      aggregation: The kind of mean. "token_mean": each token weighs 1, and the denominator is the number of tokens.
        "sequence_mean": each of the n_i tokens of a sequence weighs 1 / n_i, and the denominator is the number of
        sequences. "sequence_sum": each token weighs 1 / constant, with the same denominator. Sequences without a token
        in the mask do not count.
      mask: The tokens in the loss.
      constant: The divisor of "sequence_sum" (tokens), at least 1.
      sequence_ids, num_sequences: The index of each token's sequence, which lies whole in one row, and their number.

    Returns:
      The weights [b, t] and the denominator [], both float32.
    """
    mask = jnp.asarray(mask) != 0
    ones = mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return ones, jnp.sum(mask, dtype=np.int32).astype(jnp.float32)
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    number = jnp.sum(sequences.present, dtype=np.int32).astype(jnp.float32)
    if aggregation == "sequence_sum":
        return ones / constant, number
    return jnp.where(mask, 1.0 / jnp.maximum(sequences.length, 1).astype(jnp.float32), 0.0), number


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mean_over_sequence(
    values: Float[Array, "b t"], mask: Bool[Array, "b t"], sequence_ids: Int[Array, "b t"], num_sequences: int
) -> Float[Array, "b t"]:
    """Computes the mean of each sequence over its tokens in the mask, repeated over these tokens; 0 elsewhere.

    Only reverse-mode differentiation is supported.
    """
    mask = jnp.asarray(mask)
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    return jnp.where(mask, sequences.spread(sequences.means(jnp.where(mask, values, 0))), 0)


def _forward(values: Any, *saved: Any) -> tuple[Any, Any]:
    return mean_over_sequence(values, *saved), saved[:2]


def _backward(num_sequences: int, saved: Any, cotangent: Any) -> tuple[Any, None, None]:
    """Averages the cotangents. The transpose of the mean is the mean itself, because its matrix is symmetric."""
    return mean_over_sequence(cotangent, *saved, num_sequences), None, None


mean_over_sequence.defvjp(_forward, _backward)


LossKind = Literal["policy_gradient", "ppo_clip", "gspo", "cispo", "vespo"]
Estimate = Literal["k1", "k2", "k3"]

# The exponents (k, lambda) of VESPO's factor, for advantages of at least 0 and below 0.
_VESPO = (2.0, 3.0), (3.0, 2.0)
# Bound of a token's log-ratio (nats) in the mean of its sequence. An infinite log-ratio would make the mean NaN.
_LARGEST_LOG_RATIO = 1e8


@dataclass(frozen=True)
class LossConfig:
    """The policy loss. The defaults are the values in Table 1 of arXiv 2602.01826."""

    kind: LossKind = "ppo_clip"
    """policy_gradient: REINFORCE. ppo_clip: PPO. gspo: PPO with the geometric mean ratio of the sequence. cispo:
    REINFORCE weighted by the clipped ratio. vespo: REINFORCE weighted by a smooth factor of the sequence's ratio; give
    ``old_logprobs`` rollout with it."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low. The GSPO paper uses 3e-4; CISPO has no lower bound (1.0)."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high. The GSPO paper uses 4e-4."""
    stale_clip_low: float | None = None
    """``clip_low`` of tokens that an older policy version sampled. None: ``clip_low``. A narrower bound acts on
    ratios that contain the staleness, with ``old_logprobs`` rollout or several updates."""
    stale_clip_high: float | None = None
    """``clip_high`` of tokens that an older policy version sampled. None: ``clip_high``."""
    aggregation: Aggregation = "token_mean"
    """token_mean: mean over all tokens of the batch. sequence_mean: mean over sequences of the mean over tokens.
    sequence_sum: mean over sequences of the sum over tokens, divided by ``sequence_constant``."""
    sequence_constant: int = 0
    """Divisor of sequence_sum (tokens). 0: ``max_response_tokens``."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of KL(policy || reference) that is added to the loss. none: no KL penalty."""
    kl_coefficient: float = 0.0
    """Weight of the KL penalty. Above 0 if ``kl`` is set, otherwise 0."""
    router_balance: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts (``router_aux_loss_coef`` of transformers). 0: off."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio. trainer: log-probabilities of the trainer before the first update on the batch.
    rollout: log-probabilities of the rollout engine, so that the ratio contains the mismatch as well."""
    mini_batches: int = 1
    """Number of updates per epoch."""
    epochs: int = 1
    """Number of passes over each rollout batch."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "clip_high", "router_balance")
        check_at_least(self, 1, "mini_batches", "epochs")
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must be in [0, 1], got {self.clip_low}")
        for name in ("clip_low", "clip_high"):
            stale, fresh = getattr(self, f"stale_{name}"), getattr(self, name)
            if stale is not None and not 0.0 <= stale <= fresh:
                raise ValueError(f"stale_{name} must be in 0 .. {name} = {fresh}, got {stale}")
        if self.clips_stale and self.kind in ("policy_gradient", "vespo"):
            raise ValueError(f"stale_clip_low and stale_clip_high do nothing for kind {self.kind}, which does not clip")
        if self.sequence_constant < 0 or (self.sequence_constant and self.aggregation != "sequence_sum"):
            raise ValueError(
                "sequence_constant must not be negative, and 0 unless aggregation is sequence_sum, "
                f"got {self.sequence_constant} with {self.aggregation}"
            )
        if not self.kl_coefficient >= 0.0 or (self.kl_coefficient > 0.0) != (self.kl != "none"):
            raise ValueError(
                "kl_coefficient must be above 0 if kl is set, and 0 if kl is none, "
                f"got {self.kl_coefficient} with {self.kl}"
            )

    @property
    def clips_stale(self) -> bool:
        """Whether stale tokens have bounds of their own."""
        return self.stale_clip_low is not None or self.stale_clip_high is not None

    def bounds(self, staleness: Int[Array, "b t"] | None) -> tuple[Any, Any]:
        """Returns the lower and upper distance of the clipping bounds from 1: numbers, or arrays [b, t]."""
        if not self.clips_stale or staleness is None:
            return self.clip_low, self.clip_high
        stale = (self.stale_clip_low, self.stale_clip_high)
        pairs = zip(stale, (self.clip_low, self.clip_high), strict=True)
        low, high = (fresh if own is None else jnp.where(staleness > 0, own, fresh) for own, fresh in pairs)
        return low, high


def policy_loss(
    config: LossConfig,
    logprobs: Float[Array, "b t"],
    old_logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
    staleness: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes the loss of each token (lower is better), differentiable in ``logprobs`` only.

    Exponents are clipped at +-20. Values outside the mask do not matter, even if they are NaN. A NaN inside the mask
    reaches the loss, so that the step can count it.

    Args:
      config: The loss. Only ``kind`` and the bounds are read.
      logprobs: The log-probabilities of the policy in training (nats).
      old_logprobs: The log-probabilities of the policy before the first update on the batch (nats). "policy_gradient"
        does not use them.
      advantages: The advantage of each token.
      mask: The tokens in the loss. "gspo" averages over the same tokens.
      sequence_ids, num_sequences: The index of each token's sequence, which lies whole in one row, and their number.
      staleness: The number of policy versions between the sampling of each token and this step, for the bounds of
        stale tokens. None: no token is stale.

    Returns:
      The losses, 0 outside the mask; and 1.0 where a bound replaced the ratio, else 0.0, without gradient.
    """
    mask = jnp.asarray(mask) != 0
    logprobs, old_logprobs, advantages = (jnp.where(mask, x, 0) for x in (logprobs, old_logprobs, advantages))
    old_logprobs, advantages = jax.lax.stop_gradient((old_logprobs, advantages))
    if config.kind == "policy_gradient":
        return -advantages * logprobs, jnp.zeros(mask.shape, jnp.float32)
    log_ratio = logprobs - old_logprobs
    if config.kind == "vespo":
        factor = vespo_factor(log_ratio, advantages, mask, sequence_ids, num_sequences)
        return -factor * advantages * logprobs, jnp.zeros(mask.shape, jnp.float32)
    if config.kind == "gspo":
        log_ratio = jnp.clip(log_ratio, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        log_ratio = mean_over_sequence(log_ratio, mask, sequence_ids, num_sequences)
    ratio = jnp.exp(jnp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND))
    bounds = config.bounds(staleness)
    if config.kind == "cispo":
        losses, clipped = cispo(ratio, logprobs, advantages, *bounds)
    else:
        losses, clipped = ppo_clip(ratio, advantages, *bounds)
    return losses, jnp.where(mask, clipped, 0.0)


def ppo_clip(
    ratio: Float[Array, "b t"], advantages: Float[Array, "b t"], clip_low: Any, clip_high: Any
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes PPO's clipped surrogate (arXiv 1707.06347, equation 7) with bounds 1 - clip_low and 1 + clip_high.

    Separate bounds are DAPO's "clip-higher". With the sequence ratio at each token, this is GSPO (arXiv 2507.18071,
    equation 5).

    Returns:
      The loss of each token (lower is better); and 1.0 where the clipped branch is the minimum, without gradient.
    """
    plain = ratio * advantages
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return -jnp.minimum(plain, clipped), (clipped < plain).astype(jnp.float32)


def cispo(
    ratio: Float[Array, "b t"],
    logprobs: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    clip_low: Any,
    clip_high: Any,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Computes CISPO (MiniMax-M1, arXiv 2506.13585, equations 4-5): -clip(ratio) A log pi, no gradient by the ratio.

    Returns the loss of each token; and 1.0 where the ratio was clipped, without gradient.
    """
    ratio = jax.lax.stop_gradient(ratio)
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, (weight != ratio).astype(jnp.float32)


def vespo_factor(
    log_ratio: Float[Array, "b t"],
    advantages: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    sequence_ids: Int[Array, "b t"],
    num_sequences: int,
) -> Float[Array, "b t"]:
    """Computes the factor phi of VESPO (arXiv 2602.10693), without gradient.

    With w = exp(sum of ``log_ratio`` over the tokens of a sequence in the mask), log phi = l + k log w - l w. So phi is
    1 at w = 1. (k, l) is (2, 3) where the advantage is at least 0, and (3, 2) elsewhere. A log-ratio and the sum are
    clipped at +-20.

    Returns phi, repeated over the tokens of a sequence.
    """
    sequences = read_sequences(mask, sequence_ids, num_sequences)
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, jnp.clip(log_ratio, -RATIO_BOUND, RATIO_BOUND), 0))
    log_weight = sequences.spread(jnp.clip(sequences.sums(log_ratio), -RATIO_BOUND, RATIO_BOUND))
    power, scale = (jnp.where(advantages >= 0, *pair) for pair in zip(*_VESPO, strict=True))
    return jnp.exp(scale + power * log_weight - scale * jnp.exp(log_weight))


def kl_penalty(
    kind: Estimate,
    logprobs: Float[Array, "b t"],
    reference_logprobs: Float[Array, "b t"],
    mask: Bool[Array, "b t"] | None = None,
) -> Float[Array, "b t"]:
    """Estimates KL(policy || reference) (nats) at each token that the policy sampled (J. Schulman, 2020).

    With r = log policy - log reference: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r. k3 is never negative, and its
    exponent is at most 20. As a loss, only k2 has the gradient of the KL in expectation. The expected gradient of k1 is
    0, and that of k3 belongs to KL(reference || policy).

    The log-probabilities are in nats. The result is differentiable in ``logprobs`` only. With ``mask`` it is 0 outside
    of the mask, even if the arrays hold NaN.
    """
    if mask is not None:
        inside = jnp.asarray(mask) != 0
        logprobs, reference_logprobs = jnp.where(inside, logprobs, 0), jnp.where(inside, reference_logprobs, 0)
    log_ratio = logprobs - jax.lax.stop_gradient(reference_logprobs)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * jnp.square(log_ratio)
    return exp_minus_one_minus_x(jnp, jnp.minimum(-log_ratio, RATIO_BOUND))
