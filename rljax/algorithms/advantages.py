"""Rewards to advantages, on the host: one number a response."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float


def rloo(rewards: Float[np.ndarray, "b g"]) -> Float[np.ndarray, "b g"]:
    """REINFORCE leave-one-out (arXiv 2402.14740): a response's reward minus the mean of the others in its group.

    Raises:
      ValueError: a group of fewer than two responses.
    """
    rewards = np.asarray(rewards, np.float32)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [b, g] with g at least 2, got shape {rewards.shape}")
    g = rewards.shape[1]
    return (rewards - rewards.mean(axis=1, keepdims=True)) * np.float32(g / (g - 1))


def groups_with_signal(rewards: Float[np.ndarray, "b g"]) -> Bool[np.ndarray, " b"]:
    """True for groups whose rewards differ; the others carry no loss (arXiv 2602.01826, "rejection sampling")."""
    rewards = np.asarray(rewards)
    return np.any(rewards != rewards[:, :1], axis=1)
