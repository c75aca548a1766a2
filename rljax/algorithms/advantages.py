"""Advantages from rewards, on the host: one number for each response, or one for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.errors import check_at_least, check_choices, check_finite

Estimator = Literal["rloo", "grpo", "grpo_no_std", "reinforce", "optimal_token"]

STD_EPSILON = 1e-6  # added to a group's standard deviation, as verl does; TRL adds 1e-4
# Rewards that differ by at most two units in the last place of float32, relative to the largest of them, are equal.
# The absolute bound is for rewards of 0 that are left over from a difference in float64, such as 0.1 + 0.2 - 0.3.
_ROUNDING, _LEFT_OVER = 2.0**-22, 2.0**-40
ENERGY_EPSILON = 1e-8  # added to the summed energies of a place, as verl does


@dataclass(frozen=True)
class AdvantageConfig:
    """The rule that turns rewards into advantages."""

    estimator: Estimator = "rloo"
    """rloo: subtract the mean reward of the other responses in the group. grpo: subtract the mean of the group and
    divide by its standard deviation. grpo_no_std (Dr.GRPO): only subtract the mean of the group. reinforce: subtract
    the mean of the whole batch. optimal_token: like grpo_no_std, then subtract a baseline from each token. It is the
      mean over the group's responses that reach this token, weighted by the energy of their gradients (arXiv
      2602.07078). It costs one forward of the batch before the update."""
    overlong_buffer_tokens: int = 0
    """Number of tokens before the length limit over which the penalty of a long response grows linearly, as in DAPO.
    0: no penalty."""
    overlong_factor: float = 1.0
    """Penalty (in units of reward) of a response that reaches the length limit."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 0, "overlong_buffer_tokens")
        check_finite(self, "overlong_factor")


def compute_advantages(
    rewards: Float[np.ndarray, "b g"],
    config: AdvantageConfig,
    *,
    lengths: Int[np.ndarray, "b g"],
    max_response_tokens: int,
) -> Float[np.ndarray, "b g"]:
    """Computes the advantages of a complete batch, all processes included.

    Args:
      rewards: The rewards of g responses to each of b prompts. NaN: the response has failed and has no reward. The
        other responses of its group are compared without it.
      config: The estimator and the overlong penalty.
      lengths: The number of tokens after the prompt in each response's longest row, an environment's included.
      max_response_tokens: The limit on the length of a response.

    Returns:
      The advantages, float32. They are exactly 0 in a group of rewards that are equal but for rounding, except under
      "reinforce", and where the reward is NaN. Under "optimal_token" they are the returns from which
      ``optimal_token_advantages`` subtracts its baselines.

    Raises:
      ValueError: A group has fewer than two responses under an estimator that compares them, the shapes are wrong,
        or rewards are infinite.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or np.shape(lengths) != rewards.shape:
        raise ValueError(f"rewards and lengths must both be [b, g], got {rewards.shape} and {np.shape(lengths)}")
    if np.isinf(rewards).any():
        raise ValueError(f"rewards must be finite, or NaN for failed ones, got {int(np.isinf(rewards).sum())} infinite")
    if buffer := config.overlong_buffer_tokens:  # DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)
        over = np.asarray(lengths, np.float64) - (max_response_tokens - buffer)
        rewards = rewards - config.overlong_factor * np.clip(over / buffer, 0.0, 1.0)
    known = ~np.isnan(rewards)
    if config.estimator == "reinforce":
        mean = rewards.mean() if known.all() else rewards[known].sum() / max(known.sum(), 1)
        differs = groups_with_signal(np.insert(rewards, 0, mean, axis=1))[:, None]
        return np.where(known & differs, rewards - mean, 0.0).astype(np.float32)
    if rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [b, g] with g at least 2, got shape {rewards.shape}")
    if known.all():
        return compare_in_groups(rewards, config.estimator)
    # A failed response gets 0. So does the only reward of a group, because there is nothing to compare it with.
    advantages = np.zeros(rewards.shape, np.float32)
    for i in np.flatnonzero(known.sum(axis=1) > 1):
        advantages[i, known[i]] = compare_in_groups(rewards[i : i + 1, known[i]], config.estimator)[0]
    return advantages


def compare_in_groups(rewards: Float[np.ndarray, "b g"], estimator: Estimator) -> Float[np.ndarray, "b g"]:
    """Computes the advantages of responses that are compared with the others of their group.

    "rloo" (REINFORCE leave-one-out, arXiv 2402.14740) is the reward minus the mean of the others. "grpo" (DeepSeekMath,
    arXiv 2402.03300) is the reward minus the mean of the group, divided by its standard deviation. That is the one of a
    sample (divisor g - 1), as in verl and TRL. Other estimators leave out the division (Dr.GRPO, arXiv 2503.20783).
    Groups without signal give exactly 0. A group has at least two responses.
    """
    g, mean = rewards.shape[1], rewards.mean(axis=1, keepdims=True)
    centered = np.where(groups_with_signal(rewards)[:, None], rewards - mean, 0.0)
    if estimator == "rloo":
        centered = centered * (g / (g - 1))
    elif estimator == "grpo":
        centered = centered / (np.sqrt(np.sum(centered**2, axis=1, keepdims=True) / (g - 1)) + STD_EPSILON)
    return centered.astype(np.float32)


def optimal_token_advantages(
    returns: Float[np.ndarray, " g"],
    logprobs: Sequence[Float[np.ndarray, " r"]],
    collisions: Sequence[Float[np.ndarray, " r"]],
    ratios: Sequence[Float[np.ndarray, " r"]] | None = None,
) -> list[Float[np.ndarray, " r"]]:
    """Computes the advantages of the tokens of one group under the optimal token baseline (arXiv 2602.07078).

    The energy of a token is 1 - 2 p + sum_v p_v^2, the squared norm of the gradient of log p by the logits. The
    baseline at token t is the mean of the returns of the responses that reach t, weighted by their energies up to t.
    Where a single response is longer than all others, its baseline beyond them is 0, as in verl.

    Args:
      returns: The return of each response. Adding a constant to all of them changes the advantages only where the
        baseline is 0.
      logprobs: The trainer's log-probability of each sampled token before the update (nats).
      collisions: The sum of the squared probabilities of all tokens at each position.
      ratios: The importance weight of each token. Energies are multiplied by its square. None: 1.
    """
    lengths = np.array([len(each) for each in logprobs])
    energy = np.zeros((len(lengths), lengths.max(initial=0)))
    for i, (own, collision) in enumerate(zip(logprobs, collisions, strict=True)):
        ratio = 1.0 if ratios is None else np.asarray(ratios[i], np.float64)
        each = 1 - 2 * np.exp(np.asarray(own, np.float64)) + np.asarray(collision, np.float64)
        energy[i, : lengths[i]] = np.cumsum(each * np.square(ratio))
    gains = np.asarray(returns, np.float64)
    baselines = gains @ energy / (np.sum(energy, axis=0) + ENERGY_EPSILON)
    reached = np.sort(lengths)[-2] if len(lengths) > 1 else 0
    baselines[reached:] = 0.0  # Beyond it at most one response goes on.
    return [(gain - baselines[:n]).astype(np.float32) for gain, n in zip(gains, lengths, strict=True)]


def groups_with_signal(rewards: Float[np.ndarray, "b g"]) -> Bool[np.ndarray, " b"]:
    """Marks groups whose rewards differ ("rejection sampling" of arXiv 2602.01826 drops the others).

    Rewards that are equal but for rounding do not differ: by at most 2**-22 of the largest size among them, or by at
    most 2**-40. NaN rewards of failed responses are ignored.
    """
    rewards = np.asarray(rewards, np.float64)
    low, high = np.fmin.reduce(rewards, axis=1), np.fmax.reduce(rewards, axis=1)
    bound = np.maximum(_ROUNDING * np.fmax(np.abs(low), np.abs(high)), _LEFT_OVER)
    return np.asarray(high - low > bound)


def groups_with_loss(advantages: Float[np.ndarray, "b g"]) -> Bool[np.ndarray, " b"]:
    """Marks groups that carry loss, because some advantage is not 0.

    For an estimator that compares the responses of a group, these are the groups whose rewards differ, penalty
    included. Under "reinforce", a group carries no loss if its rewards and the mean of the batch are all equal.
    """
    return np.any(np.asarray(advantages) != 0, axis=1)
