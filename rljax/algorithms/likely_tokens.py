"""The corrections of single tokens: trust regions and score centering.

Both may read the sampler's likeliest tokens at each position. Their mathematics is in ``rljax.mismatch.regions`` and
``rljax.mismatch.centering``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch.centering import center
from rljax.mismatch.correction import ratio_weight
from rljax.mismatch.regions import Region, is_finite, region_factor, tops_distance


class LikelyTokens(NamedTuple):
    """The sampler's likeliest tokens at each position, with their log-probabilities in trainer and sampler (nats)."""

    trainer: Float[Array, "b t k"]  # under the policy in training, differentiable; 0 where ``listed`` is False
    rollout: Float[Array, "b t k"]  # under the sampler; 0 where ``listed`` is False
    listed: Bool[Array, "b t k"]  # whether the entry is a token with finite log-probabilities on both sides
    nonfinite: Bool[Array, "b t k"]  # whether the entry is a token whose log-probability is not finite on some side
    has_sampled: Bool[Array, "b t"]  # whether the sampled token is among the listed ones
    has_tail: bool  # whether the sampler could sample tokens besides the reported ones


class Sides(NamedTuple):
    """The two compared log-probabilities of each sampled token, without gradient; 0 where ``valid`` is False."""

    trainer: Float[Array, "b t"]  # under the policy in training, or under the policy that sampled the token
    rollout: Float[Array, "b t"]  # under the sampler, or under the policy that sampled the token
    valid: Bool[Array, "b t"]  # whether the token is in the loss and finite on both sides
    advantages: Float[Array, "b t"]  # the advantage of each token; 0 outside the mask


def read_sides(trainer: Any, rollout: Any, mask: Bool[Array, "b t"], advantages: Float[Array, "b t"]) -> Sides:
    """Returns the ``Sides`` of a micro-batch. A token of the mask is valid if both log-probabilities are finite."""
    trainer, rollout, advantages = jax.lax.stop_gradient((trainer, rollout, advantages))
    valid = mask & is_finite(jnp, trainer) & is_finite(jnp, rollout)
    trainer, rollout = jnp.where(valid, trainer, 0), jnp.where(valid, rollout, 0)
    return Sides(trainer, rollout, valid, jnp.where(mask, advantages, 0))


def read_likely_tokens(
    trainer: Float[Array, "b t k"],
    rollout: Float[Array, "b t k"],
    ids: Int[Array, "b t k"],
    tokens: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
    *,
    has_tail: bool,
) -> LikelyTokens:
    """Returns the ``LikelyTokens`` of a micro-batch. Only entries that are finite on both sides count as listed.

    The log-probabilities are in nats, and ids are -1 where fewer tokens are listed. ``mask`` marks the tokens in the
    loss. Elsewhere nothing is listed. ``has_tail``: Whether other tokens could be sampled than the listed ones.
    """
    present = (ids >= 0) & mask[..., None]
    listed = present & is_finite(jnp, jax.lax.stop_gradient(trainer)) & is_finite(jnp, rollout)
    trainer, rollout = jnp.where(listed, trainer, 0), jnp.where(listed, jax.lax.stop_gradient(rollout), 0)
    has_sampled = jnp.any(listed & (ids == tokens[..., None]), axis=-1)
    return LikelyTokens(trainer, rollout, listed, present & ~listed, has_sampled, has_tail)


def region_weights(
    region: Region, sides: Sides, likely: LikelyTokens | None
) -> tuple[Float[Array, "b t"], Any, dict[str, Any]]:
    """Computes the factor by which a trust region multiplies each token's loss, without gradient.

    A region over the likeliest tokens needs ``likely``. Returns the factors (0 at invalid tokens), the distances [b, t]
    of such a region or None, and the sums that ``token_row`` reads.
    """
    over_tops = None
    if region.over_tops and likely is not None:
        # The distance is over the likeliest tokens, the sampled token and all others together.
        lists = (likely.trainer, likely.rollout, likely.listed)
        sampled = (sides.trainer, sides.rollout, sides.valid & ~likely.has_sampled)
        both = (jnp.concatenate([many, one[..., None]], axis=-1) for many, one in zip(lists, sampled, strict=True))
        over_tops = tops_distance(jnp, region.kind, *jax.lax.stop_gradient(tuple(both)), has_tail=likely.has_tail)
    factor, distance = region_factor(jnp, region, sides.trainer, sides.rollout, sides.advantages, over_tops)
    outside = sides.valid & (factor <= 0)
    sums = {
        "region_tokens": jnp.sum(sides.valid, dtype=jnp.int32),
        "region_outside": jnp.sum(outside, dtype=jnp.int32),
        "region_distance": jnp.sum(jnp.where(sides.valid, distance, 0.0)),
    }
    return jnp.where(sides.valid, factor, 0.0), over_tops, sums


def centering_losses(
    config: CorrectionConfig, sides: Sides, likely: LikelyTokens, distance: Float[Array, "b t"] | None
) -> tuple[Float[Array, "b t"], dict[str, Any]]:
    """Computes the losses of score centering (arXiv 2609.20807), one for each token.

    The gradient of a loss is the advantage times the expected score under the sampler. The losses are differentiable
    in ``likely.trainer`` only, and 0 where a token is not valid. ``distance`` has the distances of ``region_weights``,
    or is None. Returns the losses, and the sums that ``token_row`` reads.
    """
    region, weighting = config.trust_region, config.weighting
    advantages = sides.advantages[..., None]
    over_tops = None if distance is None else distance[..., None]

    def weigh_ratio(log_ratio: Any) -> Any:
        return jnp.ones_like(log_ratio) if weighting is None else ratio_weight(jnp, log_ratio, *weighting[1:])[0]

    def weigh(trainer: Any, rollout: Any) -> Any:
        weights = weigh_ratio(trainer - rollout)
        if region is not None:
            weights = weights * region_factor(jnp, region, trainer, rollout, advantages, over_tops)[0]
        return weights

    lists = jax.lax.stop_gradient((likely.trainer, likely.rollout))
    # The tokens of the tail are improbable on both sides, so they lie inside every region.
    found = center(jnp, *lists, likely.listed, weigh, weigh_ratio, has_tail=likely.has_tail)
    expected = jnp.sum(found.coefficients * likely.trainer, axis=-1)
    sums = {
        "center_tokens": jnp.sum(sides.valid, dtype=jnp.int32),
        "center_nonfinite": jnp.sum(likely.nonfinite, dtype=jnp.int32),
        "center_head_mass_rollout": jnp.sum(jnp.where(sides.valid, found.rollout_mass, 0.0)),
        "center_head_mass_trainer": jnp.sum(jnp.where(sides.valid, found.trainer_mass, 0.0)),
        "center_drift": jnp.sum(jnp.where(sides.valid, found.drift, 0.0)),
    }
    return jnp.where(sides.valid, sides.advantages * expected, 0.0), sums


def token_row(config: CorrectionConfig, statistics: Any) -> dict[str, Any]:
    """Returns the metrics of the trust region and of score centering, as far as ``config`` uses them, for a row."""
    row = {}
    if config.trust_region is not None:
        row["correction/outside_fraction"] = statistics.mean("region_outside", "region_tokens")
        row["correction/distance_mean"] = statistics.mean("region_distance", "region_tokens")
    if config.score_centering:
        names = ("head_mass_rollout", "head_mass_trainer", "drift")
        row |= {f"center/{name}": statistics.mean(f"center_{name}", "center_tokens") for name in names}
        row["center/nonfinite_count"] = statistics["center_nonfinite"]
    return row
