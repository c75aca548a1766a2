"""Score centering (arXiv 2609.20807): the expected score under the sampler, which is subtracted from each gradient.

The sampler draws tokens from q, and f(p/q) weighs them under the trainer's p. A constant reward then has the gradient
E_q[f(p/q) grad log p]. It is 0 for f(r) = r only, and this drift adds up over the steps. The sampler's likeliest tokens
carry most of the expectation. For the other tokens, the tail, the trainer's tail is taken at the sampler's mass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

SMALLEST_TAIL = 1e-6
"""The least probability that the tail is taken to have."""


class Center(NamedTuple):
    """The expected score at one position, as coefficients of the listed tokens' log-probabilities."""

    coefficients: Any  # [..., k]: sum_v coefficients_v grad log p_v is the expected score; 0 where no token is listed
    rollout_mass: Any  # [...]: the sampler's probability of the listed tokens
    trainer_mass: Any  # [...]: the trainer's probability of the listed tokens
    drift: Any  # [...]: the sum over the listed tokens of abs(expected score with respect to the token's logit)


def center(
    xp: ModuleType,
    trainer: Any,
    rollout: Any,
    present: Any,
    weigh: Callable[[Any, Any], Any],
    weigh_tail: Callable[[Any], Any],
    *,
    has_tail: bool,
) -> Center:
    """Computes the expected score under the sampler at each position.

    With p and q the probabilities and f the weight of a token, the coefficient of a listed token v is
    q_v f_v - alpha p_v. There rho = (1 - sum q) / (1 - sum p), both at least ``SMALLEST_TAIL``, and
    alpha = rho f(1 / rho), or 0 without a tail.

    Args:
      trainer, rollout: The log-probabilities of the listed tokens under p and q, [..., k] float, nats.
      present: Whether each entry of the list is a token with finite log-probabilities, [..., k] bool.
      weigh: A function that returns the weights f of tokens from their log-probabilities under p and q.
      weigh_tail: A function that returns the weight of the tail from log(p/q) of the tail.
      has_tail: Whether there are tokens besides the listed ones.
    """
    trainer, rollout = xp.where(present, trainer, 0), xp.where(present, rollout, 0)
    p, q = (xp.where(present, xp.exp(side), 0) for side in (trainer, rollout))
    coefficients = q * xp.where(present, weigh(trainer, rollout), 0)
    p_mass, q_mass = xp.sum(p, axis=-1), xp.sum(q, axis=-1)
    if has_tail:
        rho = xp.maximum(1 - q_mass, SMALLEST_TAIL) / xp.maximum(1 - p_mass, SMALLEST_TAIL)
        alpha = rho * weigh_tail(-xp.log(rho))
        coefficients = coefficients - alpha[..., None] * p
    total = xp.sum(coefficients, axis=-1)
    drift = xp.sum(xp.abs(coefficients - p * total[..., None]), axis=-1)
    return Center(coefficients, q_mass, p_mass, drift)
