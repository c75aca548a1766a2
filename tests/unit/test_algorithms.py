"""Advantages and losses against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.advantages import groups_with_signal, rloo
from rljax.algorithms.losses import LossConfig, ppo_clip


def test_rloo_by_hand():
    # Others' means: 1/3 for the winners' row -> 1 - 1/3; losers see 2/3.
    advantages = rloo(np.array([[1, 0, 1, 0], [1, 1, 1, 1]]))
    np.testing.assert_allclose(advantages, [[2 / 3, -2 / 3, 2 / 3, -2 / 3], [0, 0, 0, 0]], atol=1e-7)
    assert advantages.dtype == np.float32


def test_rloo_is_reward_minus_the_mean_of_the_others():
    rewards = np.random.default_rng(0).normal(size=(7, 5))
    expected = np.empty_like(rewards)
    for i in range(7):
        for j in range(5):
            expected[i, j] = rewards[i, j] - np.mean(np.delete(rewards[i], j))
    np.testing.assert_allclose(rloo(rewards), expected, atol=1e-6)


def test_rloo_needs_two():
    with pytest.raises(ValueError, match=r"g at least 2, got shape \(3, 1\)"):
        rloo(np.zeros((3, 1)))


def test_groups_with_signal():
    assert groups_with_signal(np.array([[0, 0], [1, 1], [0, 1]])).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, 0.0, -2.0),
        (1.5, 2.0, -2.56, 1.0, 0.0),  # clipped above at 1.28
        (1.5, -2.0, 3.0, 0.0, 2.0),  # pessimistic branch
        (0.5, 2.0, -1.0, 0.0, -2.0),
        (0.5, -2.0, 1.6, 1.0, 0.0),  # clipped below at 0.8
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, clipped, gradient):
    def run(r):
        losses, flags = ppo_clip(jnp.float32(r)[None, None], jnp.float32(advantage)[None, None], 0.2, 0.28)
        return losses[0, 0], flags[0, 0]

    (value, flag), slope = jax.value_and_grad(run, has_aux=True)(ratio)
    assert float(value) == pytest.approx(loss, abs=1e-6)
    assert float(flag) == clipped
    assert float(slope) == pytest.approx(gradient, abs=1e-6)


def test_bad_bounds_are_quoted():
    with pytest.raises(ValueError, match=r"clip_low must be in \[0, 1\], got 1.5"):
        LossConfig(clip_low=1.5)
    with pytest.raises(ValueError, match=r"clip_high must not be negative, got -0\.1"):
        LossConfig(clip_high=-0.1)
