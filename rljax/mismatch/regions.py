"""Trust regions of single tokens: the distance of two distributions at a token, and the factor of the token's loss.

Every function takes log-probabilities (nats) and the array namespace ``xp``, so that one text serves numpy and jax.

Sources: the binary total variation and KL, their forms over the likeliest tokens and the one-sided rule come from DPPO
(arXiv 2602.04879). The rule without a side is prime-rl's. The larger of both binary KLs is KPop's. The smooth form is
DRPO's (arXiv 2606.09821). The second moment of the log-ratio is M2PO's (arXiv 2510.01161).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from rljax.mismatch.tokens import LARGEST_LOGPROB

RegionKind = Literal["tv", "kl", "kpop", "smooth", "moment"]

SMALLEST_PROBABILITY = 1e-8
"""The least distance of a probability from 0 and from 1 in the binary KL."""
KPOP_PROBABILITY = 1e-6
"""The least distance of a probability from 0 and from 1 in KPop's divergence."""
SMALLEST_REST = 1e-12
"""The least probability that all tokens that are not listed are taken to have together."""


@dataclass(frozen=True)
class Region:
    """A trust region around the rollout's distribution at each token."""

    kind: RegionKind  # the distance, or the smooth form
    # The largest distance inside the region; for "smooth", the distance at which the factor is 0; for "moment", the
    # largest mean distance of a batch, from which ``moment_bound`` finds the largest distance.
    threshold: float
    one_sided: bool = False  # whether a token outside is kept if its update moves it towards the rollout
    over_tops: bool = False  # whether the distance is over the likeliest tokens and all others together


def is_finite(xp: ModuleType, logprobs: Any) -> Any:
    """Returns whether each log-probability is finite, within ``LARGEST_LOGPROB``."""
    return xp.abs(logprobs) <= LARGEST_LOGPROB  # False for NaN


def probability_gap(xp: ModuleType, first: Any, second: Any) -> Any:
    """Computes exp(first) - exp(second) to full precision, also where both are nearly equal; 0 if both are 0."""
    high, low = xp.maximum(first, second), xp.minimum(first, second)
    difference = xp.where(high > -LARGEST_LOGPROB, low - xp.maximum(high, -LARGEST_LOGPROB), 0)
    size = xp.exp(high) * -xp.expm1(difference)
    return xp.where(first >= second, size, -size)


def binary_kl(xp: ModuleType, first: Any, second: Any, smallest: float = SMALLEST_PROBABILITY) -> Any:
    """Computes KL(first || second) of the two events "this token" and "any other token".

    Both probabilities are kept in ``smallest`` .. 1 - ``smallest``.
    """
    lowest, highest = xp.log(smallest), xp.log1p(-smallest)
    first, second = xp.clip(first, lowest, highest), xp.clip(second, lowest, highest)
    rest, other = -xp.expm1(first), -xp.expm1(second)
    return xp.exp(first) * (first - second) + rest * xp.log(rest / other)


def token_distance(xp: ModuleType, kind: RegionKind, trainer: Any, rollout: Any) -> Any:
    """Computes the distance of each token's probabilities p (trainer) and q (rollout).

    "tv" and "smooth" are abs(p - q), "kl" is the binary KL(rollout || trainer), and "kpop" is the larger binary KL.
    "moment" is the squared log-ratio.
    """
    if kind == "moment":
        return xp.square(trainer - rollout)
    if kind in ("tv", "smooth"):
        return xp.abs(probability_gap(xp, trainer, rollout))
    if kind == "kl":
        return binary_kl(xp, rollout, trainer)
    each = (binary_kl(xp, *pair, KPOP_PROBABILITY) for pair in ((trainer, rollout), (rollout, trainer)))
    return xp.maximum(*each)


def tops_distance(xp: ModuleType, kind: RegionKind, trainer: Any, rollout: Any, present: Any, *, has_tail: bool) -> Any:
    """Computes the distance of two distributions over k listed tokens and, as one event, all others.

    Args:
      kind: The distance: "tv" for the total variation, "kl" for KL(rollout || trainer).
      trainer, rollout: The log-probabilities of the listed tokens, [..., k] float.
      present: Whether each entry of the list is a token, [..., k] bool.
      has_tail: Whether there are tokens besides the listed ones.
    """
    trainer, rollout = xp.where(present, trainer, 0), xp.where(present, rollout, 0)
    p, q = (xp.where(present, xp.exp(side), 0) for side in (trainer, rollout))
    p_rest, q_rest = (xp.maximum(1 - xp.sum(side, axis=-1), SMALLEST_REST) for side in (p, q))
    if kind == "tv":
        rest = xp.abs(p_rest - q_rest) if has_tail else 0
        return (xp.sum(xp.where(present, xp.abs(probability_gap(xp, trainer, rollout)), 0), axis=-1) + rest) / 2
    rest = q_rest * xp.log(q_rest / p_rest) if has_tail else 0
    return xp.sum(q * (rollout - trainer), axis=-1) + rest


def moment_bound(xp: ModuleType, region: Region, trainer: Any, rollout: Any, counted: Any, advantages: Any) -> Any:
    """Computes the largest distance inside a region of the kind "moment", for the tokens of a whole batch.

    The largest distances leave the region until the mean of the others is at most ``region.threshold``. Equal distances
    stay or leave together. With ``one_sided``, only tokens count whose update moves them further away.

    Args:
      trainer, rollout, advantages: The arguments of ``region_factor``, arrays of one shape. They are finite.
      counted: Whether a token counts, bool in the same shape.

    Returns:
      The bound, a scalar; 0 if every distance above 0 leaves.
    """
    distance = token_distance(xp, region.kind, trainer, rollout)
    if region.one_sided:
        counted = counted & (moves_away(xp, region.kind, trainer, rollout, advantages) > 0)
    ordered = xp.sort(xp.where(counted, distance, xp.inf).reshape(-1))
    means = xp.cumsum(xp.where(ordered < xp.inf, ordered, 0)) / xp.arange(1, ordered.size + 1, dtype=ordered.dtype)
    first_outside = xp.min(xp.where(means > region.threshold, ordered, xp.inf))
    return xp.max(xp.where(ordered < first_outside, ordered, 0))


def moves_away(xp: ModuleType, kind: RegionKind, trainer: Any, rollout: Any, advantages: Any) -> Any:
    """Returns numbers above 0 where the update moves a token further from the rollout.

    That is so for p > q with a positive advantage, and for p < q with any other advantage; with "moment" not for an
    advantage of 0.
    """
    if kind == "moment":
        return xp.sign(advantages) * (trainer - rollout)
    gap = probability_gap(xp, trainer, rollout)
    return xp.where(advantages > 0, gap, -gap)


def region_factor(
    xp: ModuleType, region: Region, trainer: Any, rollout: Any, advantages: Any, distance: Any = None
) -> tuple[Any, Any]:
    """Computes the factor of each token's loss.

    Every kind but "smooth" gives 1 inside the region and 0 outside. With ``one_sided``, a token outside keeps 1 unless
    its update moves it further away (``moves_away``). The kind "smooth" gives 1 - (p - q) / threshold for a positive
    advantage, and 1 + (p - q) / threshold for any other. It is the factor that DRPO's quadratic penalty gives to the
    importance-weighted gradient.

    Args:
      trainer, rollout: The log-probabilities of the tokens under p and q, float.
      advantages: The advantages, in a shape that broadcasts.
      distance: The distance of the distributions at the tokens, in a shape that broadcasts. None: ``token_distance``.

    Returns:
      The factors and the distances.
    """
    away = moves_away(xp, region.kind, trainer, rollout, advantages)
    if distance is None:
        distance = token_distance(xp, region.kind, trainer, rollout)
    if region.kind == "smooth":
        return 1 - away / region.threshold, distance
    outside = distance > region.threshold
    if region.one_sided:
        outside = outside & (away > 0)
    return xp.where(outside, 0.0, xp.ones_like(away)), distance
