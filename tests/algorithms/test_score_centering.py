"""With score centering a constant reward has no gradient under the sampler. ``test_peer_losses`` has its sources."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_batches import micro_batch

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.head import TokenScores
from rljax.trainer.objective import Objective, loss_row
from rljax.trainer.packing import PackedBatch

V = 6
WEIGHTS = {
    "none": {},
    "token_tis": {"level": "token", "threshold": 1.3},
    "token_mis": {"level": "token", "mode": "mask", "threshold": 1.3},
    "token_band": {"level": "token", "mode": "band", "threshold_low": 0.8, "threshold": 1.3},
    "normalized": {"level": "token", "threshold": 1.3, "normalize": True},
    "two_sided_tv": {"level": "token", "region": "tv", "region_threshold": 0.05},
    "one_sided_tv": {"level": "token", "region": "tv", "region_threshold": 0.02, "region_sides": "away"},
    "one_sided_kl": {"region": "kl", "region_threshold": 0.005, "region_sides": "away"},
    "two_sided_kl": {"level": "token", "threshold": 1e9, "region": "kpop", "region_threshold": 0.005},
    "smooth_tv": {"level": "token", "threshold": 1e9, "region": "smooth", "region_threshold": 0.2},
    "tops_tv": {"region": "tv", "region_threshold": 0.05, "region_sides": "away", "region_over": "tops"},
    "tops_kl": {"region": "kl", "region_threshold": 10.0, "region_over": "tops"},
}
SHOWN = ("none", "token_tis", "token_band", "one_sided_tv", "smooth_tv", "tops_kl")


def distributions(seed, size):
    """Returns the trainer's logits and the sampler's log-probabilities over V tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(V)
    return logits.astype(np.float32), np.asarray(jax.nn.log_softmax(logits + size * rng.standard_normal(V)), np.float32)


def every_token(rollout, advantages, head):
    """Returns a micro-batch of V responses, one for each token; ``head`` has the ids of the likeliest tokens."""
    second = np.broadcast_to([False, True], (V, 2))
    tokens = np.stack([np.zeros(V, np.int32), np.arange(V, dtype=np.int32)], axis=1)
    tops = {
        "top_ids": np.where(second[..., None], np.asarray(head, np.int32), -1),
        "top_logprobs": np.where(second[..., None], rollout[np.asarray(head)], -np.inf).astype(np.float32),
    }
    return micro_batch(tokens, second, rollout[tokens], np.float32(advantages)[:, None], **tops)


def scores_of(logits, micro):
    logprobs = jax.nn.log_softmax(logits)
    tops = jnp.where(micro.top_ids >= 0, logprobs[jnp.maximum(micro.top_ids, 0)], -jnp.inf)
    of_tokens = jnp.where(micro.loss_mask, logprobs[micro.tokens], 0.0)
    return TokenScores(of_tokens, jnp.zeros_like(of_tokens), tops)


@functools.cache
def compiled(correction, kind, has_tail):
    objective = Objective(LossConfig(kind=kind), correction, V, 2, has_tail=has_tail)

    def loss(logits, micro):
        return objective.micro_loss(scores_of(logits, micro), micro, jnp.float32(1.0))

    return objective, jax.jit(jax.value_and_grad(loss, has_aux=True))


def gradient(correction, logits, micro, kind="ppo_clip", has_tail=False):
    """Returns the gradient of the summed loss by the logits, and the row."""
    objective, run = compiled(CorrectionConfig(**correction), kind, has_tail)
    (_, statistics), found = run(jnp.asarray(logits), micro)
    return np.asarray(found), {k: float(v) for k, v in loss_row(objective, statistics, jnp.float32(1.0)).items()}


@pytest.mark.parametrize(
    "name",
    [name if name in SHOWN else pytest.param(name, marks=[pytest.mark.harness, pytest.mark.slow]) for name in WEIGHTS],
)
def test_a_constant_reward_has_no_gradient(name):
    """The loss is linear in the advantage: with advantages times q, the sum is the expectation over the V tokens."""
    for size, advantage in ((0.1, 2.0), (0.1, -2.0), (1.0, 2.0), (1.0, -2.0)):
        logits, rollout = distributions(1, size)
        micro = every_token(rollout, advantage * np.exp(rollout), np.arange(V))
        for kind in ("ppo_clip", "policy_gradient", "cispo") if name == "none" else ("ppo_clip",):
            centered, _ = gradient({**WEIGHTS[name], "score_centering": True}, logits, micro, kind)
            np.testing.assert_allclose(centered, 0, atol=1e-6)
            plain, _ = gradient(WEIGHTS[name], logits, micro, kind)
            assert np.abs(plain).max() > 1e-3 or size < 1


@pytest.mark.parametrize("head", [[0, 1], [5, 2, 4], [3]])
def test_the_tail_is_the_trainers_rescaled(head):
    """The gradient of one token is -A (onehot(y) - q^), where q^ is q on the list and rho p off it."""
    logits, rollout = distributions(8, 0.7)
    p, q = np.asarray(jax.nn.softmax(logits)), np.exp(rollout)
    expected = p * (1 - q[head].sum()) / (1 - p[head].sum())
    coefficients = q[head] - expected[head]
    expected[head] = q[head]
    for y in range(V):
        micro = every_token(rollout, 1.5 * np.eye(V)[y], head)
        found, row = gradient({"score_centering": True}, logits, micro, has_tail=True)
        np.testing.assert_allclose(found, -1.5 * (np.eye(V)[y] - expected), atol=2e-6)
    drift = np.abs(coefficients - p[head] * coefficients.sum()).sum()
    assert row["center/drift"] == pytest.approx(drift, rel=1e-5)
    assert row["center/head_mass_rollout"] == pytest.approx(q[head].sum(), rel=1e-5)
    assert row["center/head_mass_trainer"] == pytest.approx(p[head].sum(), rel=1e-5)


@pytest.mark.parametrize(("head", "has_tail"), [(range(V), False), (range(V), True), ([1, 3], True)])
def test_importance_weights_need_no_centering(head, has_tail):
    """With f = r the expected score is already 0, so centering changes nothing, with a tail or without."""
    logits, rollout = distributions(5, 1.0)
    advantages = np.random.default_rng(0).standard_normal(V)
    micro = every_token(rollout, advantages * np.exp(rollout), list(head))
    weights = {"level": "token", "threshold": 1e9}
    plain, _ = gradient(weights, logits, micro)
    centered, row = gradient({**weights, "score_centering": True}, logits, micro, has_tail=has_tail)
    np.testing.assert_allclose(centered, plain, atol=1e-6)
    assert row["center/drift"] == pytest.approx(0, abs=2e-6)


def test_places_that_are_not_finite_are_counted():
    logits, rollout = distributions(2, 0.3)
    micro = every_token(rollout, np.ones(V), np.arange(V))
    lists, ids, sampled = (each.copy() for each in (micro.top_logprobs, micro.top_ids, micro.rollout_logprobs))
    lists[0, 1, 2], lists[1, 1, 0], lists[2, 1, 4] = np.nan, -np.inf, np.inf
    ids[3, 1, 1], sampled[4, 1] = -1, np.nan
    broken = micro._replace(top_logprobs=lists, top_ids=ids, rollout_logprobs=sampled)
    for correction in (WEIGHTS["tops_tv"], WEIGHTS["tops_kl"], {"score_centering": True}):
        found, row = gradient(correction, logits, broken, has_tail=True)
        assert np.isfinite(found).all()
        assert all(np.isfinite(list(row.values())))
        assert row["correction/nonfinite_count"] == 1
    assert row["center/nonfinite_count"] == 3


@pytest.mark.parametrize("name", ["token_tis", "tops_kl"])
def test_micro_batches_change_nothing(name):
    logits, rollout = distributions(7, 0.5)
    correction = {**WEIGHTS[name], "score_centering": True}
    micro = every_token(rollout, np.random.default_rng(1).standard_normal(V), [0, 2, 5])
    whole, row = gradient(correction, logits, micro, has_tail=True)
    parts, drifts = [], []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = PackedBatch(*(None if array is None else array[rows] for array in micro))
        found, part_row = gradient(correction, logits, part, has_tail=True)
        parts.append(found)
        drifts.append(part_row["center/drift"] * len(part.tokens))
    np.testing.assert_allclose(sum(parts), whole, atol=2e-6)
    assert sum(drifts) / V == pytest.approx(row["center/drift"], rel=1e-5)
