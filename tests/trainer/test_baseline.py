"""Tests of the optimal token baseline: numbers by hand, the gradient of a whole update, and settings it refuses."""

import functools

import jax
import numpy as np
import pytest
import tiny_step
from records import train_sequence
from tiny_step import CONFIG, COUNT, expected_gradient, forward_of, fresh_state, make_step, packed, sequences

from rljax.algorithms.advantages import AdvantageConfig, compute_advantages, optimal_token_advantages
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.model import init_params
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.training import has_separate_forward
from rljax.trainer.update import MultipleUpdates, UpdateOptions, subtract_baselines

GROUP, OPTIMAL = 3, AdvantageConfig(estimator="optimal_token")


def test_an_environments_tokens_have_no_energy():
    group = [
        train_sequence([0], np.zeros(3), np.log(p), gain, True, old_logprobs=np.log(p), turn=turns)
        for p, gain, turns in (([0.5, 1.0, 0.25], 1.0, [1, 0, 2]), ([0.5, 0.25, 0.5], 0.0, [1, 1, 1]))
    ]
    collisions = [np.array([0.5, 0.0, 0.5]), np.array([0.5, 0.5, 0.5])]
    first, second = subtract_baselines(group, collisions, group_size=2, correction=CorrectionConfig())
    # The energies 1 - 2p + sum p^2 of sampled tokens are 0.5, none, 1 more in the first response, and 0.5, 1 more, 0.5
    # more in the second.
    baselines = np.array([0.5 / 1.0, 0.5 / 2.0, 1.5 / 3.5])
    np.testing.assert_allclose(first["advantages"], 1 - baselines, rtol=1e-6)
    np.testing.assert_allclose(second["advantages"], -baselines, rtol=1e-6)


def test_returns_are_centred_and_a_silent_group_is_zero():
    rewards = np.array([[1.0, 0, 0, 1], [1, 1, 1, 1]])
    returns = compute_advantages(rewards, OPTIMAL, lengths=np.ones((2, 4), int), max_response_tokens=9)
    np.testing.assert_array_equal(returns, [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]])


def of_group(i):
    return (i // GROUP) % 2 == 0


def test_importance_weights_weigh_the_energies():
    rng, given = np.random.default_rng(1), []
    own = [-rng.exponential(size=n).astype(np.float32) for n in (2, 5, 3, 2, 4, 3)]
    for i, old in enumerate(own):
        rollout = (old + rng.normal(0, 0.5, len(old))).astype(np.float32)
        given.append(train_sequence([0], np.zeros(len(old)), rollout, float(i), of_group(i), old_logprobs=old))
    collisions = [rng.uniform(0.2, 0.9, len(each)) for each in own]
    config = CorrectionConfig(level="token", threshold=1.2)
    result = subtract_baselines(given, collisions, group_size=GROUP, correction=config)
    ratios = [np.minimum(np.exp(a - s["rollout_logprobs"]), 1.2) for a, s in zip(own, given, strict=True)]
    expected = optimal_token_advantages(np.arange(3.0), own[:GROUP], collisions[:GROUP], ratios[:GROUP])
    for s, each in zip(result[:GROUP], expected, strict=True):
        np.testing.assert_allclose(s["advantages"], each, rtol=1e-6, atol=1e-7)
    for s, advantage in zip(result[GROUP:], (3.0, 4.0, 5.0), strict=True):
        assert set(s["advantages"]) == {advantage}  # this group carries no loss


@pytest.mark.harness  # the tests above have its parts by hand
@pytest.mark.slow
def test_the_update_has_the_gradient_of_token_advantages():
    given = sequences(of_group)
    with jax.default_matmul_precision("highest"):
        rows = np.asarray(
            tiny_step.log_distributions(init_params(CONFIG, 0), *tiny_step.in_own_rows(given)), np.float64
        )
    every = [row[len(s.prompt) - 1 :][: len(s.response)] for s, row in zip(given, rows, strict=True)]
    logprobs = [logp[np.arange(len(logp)), s.response] for s, logp in zip(given, every, strict=True)]
    collisions, expected = [np.sum(np.exp(logp) ** 2, axis=1) for logp in every], list(given)
    for start in range(0, COUNT, GROUP):
        group = slice(start, start + GROUP)
        returns = np.array([s.advantage for s in given[group]])
        if given[start].in_loss:
            each = optimal_token_advantages(returns, logprobs[group], collisions[group])
            expected[group] = [s.add({"advantages": a}) for s, a in zip(given[group], each, strict=True)]
    step, shape = make_step(), {"mini_batches": 1, "epochs": 1, "group_size": GROUP}
    baseline = functools.partial(subtract_baselines, group_size=GROUP, correction=CorrectionConfig())
    update = MultipleUpdates(step, forward_of(step), packed, packed, **shape, baseline=baseline)
    updated = update(fresh_state(), update.pack(given), given, UpdateOptions(0.0, 0, False))
    gradient = updated.state.opt_state.inner_state.trace
    for ours, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient(expected)), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6 * float(np.abs(wanted).max()) + 1e-9, rtol=2e-4)
    for ours, wanted in zip(updated.trainer().logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_it_takes_a_forward_before_the_update():
    normalized = CorrectionConfig(level="token", normalize=True)
    configs = [Config(advantage=OPTIMAL), Config(loss=LossConfig(kl="k3", kl_coefficient=0.7), correction=normalized)]
    assert [has_separate_forward(config) for config in (*configs, Config())] == [True, True, False]
    with pytest.raises(ValueError, match="needs a forward before the update"):
        Config(advantage=OPTIMAL, rollout=RolloutConfig(engine="exact"))
    stale = RolloutConfig(engine="vllm", max_staleness=1, urls=("http://127.0.0.1:1",))
    with pytest.raises(ValueError, match="part = whole, got drift"):
        Config(advantage=OPTIMAL, rollout=stale, correction=CorrectionConfig(preset="token_tis", part="drift"))
