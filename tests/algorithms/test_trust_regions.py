"""Trust regions by hand; with score centering a constant reward has no gradient under the sampler.

``test_peer_losses`` compares both with their sources.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import micro_batch

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.mismatch import merge
from rljax.mismatch.regions import Region, binary_kl, moment_bound, probability_gap, tops_distance
from rljax.policy.head import TokenScores
from rljax.trainer.objective import Objective, loss_row
from rljax.trainer.packing import PackedBatch

B, T = 3, 8


def at_probabilities(p, q, **fields):
    """Returns a micro-batch whose tokens all count, with their probability under the rollout, the policy's, and lists.

    The listed tokens have the probability 0.1 on both sides.
    """
    lp, rollout = (np.broadcast_to(np.log(each), (B, T)).astype(np.float32) for each in (p, q))
    ids = np.broadcast_to(np.arange(3, dtype=np.int32), (B, T, 3))
    lists, ones = np.full(ids.shape, np.log(0.1), np.float32), np.ones((B, T), np.float32)
    micro = micro_batch(np.zeros((B, T), np.int32), ones == 1, rollout, ones, top_ids=ids, top_logprobs=lists)
    return micro._replace(**fields), lp, lists


@functools.cache
def compiled(correction):
    objective = Objective(LossConfig(kind="policy_gradient"), correction.resolved(), B, T)

    def run(logprobs, tops, micro):
        return objective.micro_loss(TokenScores(logprobs, 0 * logprobs, tops), micro, jnp.float32(1.0))

    return objective, jax.jit(jax.value_and_grad(run, has_aux=True))


def weights_of(correction, micro, logprobs, tops):
    """Returns the factor of -A grad log p at each token, and the row."""
    objective, run = compiled(correction)
    (_, statistics), found = run(logprobs, tops, micro)
    return np.asarray(found) / -micro.advantages, loss_row(objective, statistics, jnp.float32(1.0))


def test_the_row_has_the_share_of_tokens_outside():
    """The first two of eight probabilities differ by 0.3 from the sampler's 0.3, and the others by 0.1.

    A smooth region pulls tokens back: its factor is 1 - 0.3 / 0.2 beyond the threshold, and 1 - 0.1 / 0.2 inside.
    """
    inside = np.arange(T) >= 2
    given = at_probabilities(np.where(inside, 0.4, 0.6), 0.3)
    for region, factors in (("tv", inside), ("smooth", np.where(inside, 0.5, -0.5))):
        found, row = weights_of(CorrectionConfig(region=region, region_threshold=0.2), *given)
        np.testing.assert_allclose(found, np.broadcast_to(factors, (B, T)), atol=1e-5)
        assert float(row["correction/outside_fraction"]) == pytest.approx(2 / T)
        assert float(row["correction/distance_mean"]) == pytest.approx(0.15, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "objective", "count", "outside"), [("m2po", 0.4206, 5, 0.2), ("m2po_areal", 0.4988, 3, 0.4)]
)
def test_the_second_moment_by_hand(preset, objective, count, outside):
    """Five tokens in three micro-batches have the squared log-ratios 0.36, 0.09, 0.01, 0.25 and 0.0025.

    In the paper the token of 0.25 does not count, because its update moves it towards the rollout. The mean of the
    others is 0.1156, and 0.0342 without the first token. AReaL's means are 0.1425, 0.0881 and 0.0342, so two tokens
    leave the batch. The ratios of the last four tokens are 1.3499, 0.9048, 0.6065 and 1.0513.
    """
    ratios, advantages = np.float32([0.6, 0.3, -0.1, -0.5, 0.05]), np.float32([1, 1, -1, 1, 1])
    at = np.array([0, 0, 1, 1, 2]), np.array([1, 4, 0, 7, 3])
    micro, old, _ = at_probabilities(np.exp(-1.0), np.exp(-1.0))
    rollout, of_tokens, mask = old.copy(), np.ones((B, T), np.float32), np.zeros((B, T), bool)
    rollout[at], of_tokens[at], mask[at] = -1 - ratios, advantages, True
    micro = micro._replace(rollout_logprobs=rollout, old_logprobs=old, advantages=of_tokens, loss_mask=mask)
    whole = jax.tree.map(lambda array: array[:, None], micro)
    made = Objective(LossConfig(), CorrectionConfig(preset=preset), B, T)
    assert made.needs_old_logprobs
    numbers = jax.jit(made.batch_numbers)(whole)

    @jax.jit
    def statistics(old, micro):
        return made.micro_loss(TokenScores(old, 0 * old), micro, jnp.float32(1.0), numbers)[1]

    parts = [statistics(old[i : i + 1], jax.tree.map(lambda array, i=i: array[i], whole)) for i in range(B)]
    total = functools.reduce(merge, parts)
    row = loss_row(made, total, made.rescaling(total, jnp.float32(1.0)))
    assert float(total["denominator"]) == count
    assert float(row["policy/loss"]) == pytest.approx(-objective, abs=5e-5)
    assert float(row["correction/outside_fraction"]) == pytest.approx(outside)
    assert float(row["correction/distance_mean"]) == pytest.approx(0.1425)


@pytest.mark.parametrize("xp", [np, jnp])
def test_equal_distances_leave_together(xp):
    """The mean of 0.01 and 0.09 is 0.05, and 0.0633 with another 0.09."""
    ratios = np.float32([0.3, -0.3, 0.1])
    for threshold, counted, bound in ((0.055, True, 0.01), (0.064, True, 0.09), (0.001, True, 0), (0.001, False, 0)):
        arrays = ratios, 0 * ratios, np.full(3, counted), np.ones(3)
        found = moment_bound(xp, Region("moment", threshold), *map(xp.asarray, arrays))
        assert float(found) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("part", ["numerics", "drift"])
def test_a_region_of_one_part(part):
    """The policy that sampled a stale token has 0.5, between a rollout of 0.3 and a policy of 0.8."""
    stale = np.arange(B)[:, None] + np.zeros((B, T), np.int32) > 0
    behaviour = np.full((B, T), np.log(0.5), np.float32)
    given = at_probabilities(0.8, 0.3, behaviour_logprobs=behaviour, staleness=stale.astype(np.int32))
    found, _ = weights_of(CorrectionConfig(region="tv", region_threshold=0.25, part=part), *given)
    # A token that is not stale has no drift, so all of its mismatch is numerics.
    np.testing.assert_allclose(found, stale == (part == "numerics"), atol=1e-6)


def test_tokens_that_are_not_finite_are_outside():
    rollout = np.full((B, T), np.log(0.4), np.float32)
    rollout[0, :4] = np.nan, -np.inf, np.inf, -3.4e38
    given = at_probabilities(0.5, 0.4, rollout_logprobs=rollout)
    for name in ("one_sided_tops_kl", "two_sided_tv", "smooth_tv"):
        found, row = weights_of(CorrectionConfig(preset=name), *given)
        assert not found[0, :4].any()
        assert found[1:].any()
        assert np.isfinite(found).all()
        assert np.isfinite(list(map(float, row.values()))).all()


def test_distances_keep_their_digits():
    """Probabilities near 1 that differ by 1e-6 keep the difference in float32; it is zero if both are 0."""
    p, q = np.log1p(-np.float32(2e-6)), np.log1p(-np.float32(1e-6))
    assert float(probability_gap(jnp, jnp.float32(p), jnp.float32(q))) == pytest.approx(-1e-6, rel=1e-3)
    assert probability_gap(np, np.array(-np.inf), np.array(-np.inf)) == 0
    assert probability_gap(np, np.array(0.0), np.array(-np.inf)) == 1
    assert probability_gap(np, np.log(0.2), np.log(0.5)) == pytest.approx(-0.3)
    assert binary_kl(np, np.log(0.5), np.log(0.25)) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert np.isfinite(binary_kl(jnp, jnp.float32(0.0), jnp.float32(-jnp.inf)))


def test_distances_over_lists_by_hand():
    """With p = (0.5, 0.3 and 0.2) and q = (0.4, 0.2 and 0.4), the total variation is 0.2."""
    lists = np.log([0.5, 0.3, 1.0]), np.log([0.4, 0.2, 1.0])
    listed = np.array([True, True, False])
    assert tops_distance(np, "tv", *lists, listed, has_tail=True) == pytest.approx(0.2)
    assert tops_distance(np, "tv", *lists, listed, has_tail=False) == pytest.approx(0.1)
    kl = 0.4 * np.log(0.4 / 0.5) + 0.2 * np.log(0.2 / 0.3)
    assert tops_distance(np, "kl", *lists, listed, has_tail=False) == pytest.approx(kl)
    assert tops_distance(np, "kl", *lists, listed, has_tail=True) == pytest.approx(kl + 0.4 * np.log(2))


V = 6
WEIGHTS = {
    "none": {},
    "token_tis": {"level": "token", "threshold": 1.3},
    "token_band": {"level": "token", "mode": "band", "threshold_low": 0.8, "threshold": 1.3},
    "normalized": {"level": "token", "threshold": 1.3, "normalize": True},
    "one_sided_tv": {"level": "token", "region": "tv", "region_threshold": 0.02, "region_sides": "away"},
    "two_sided_kl": {"level": "token", "threshold": 1e9, "region": "kpop", "region_threshold": 0.005},
    "smooth_tv": {"level": "token", "threshold": 1e9, "region": "smooth", "region_threshold": 0.2},
    "tops_tv": {"region": "tv", "region_threshold": 0.05, "region_sides": "away", "region_over": "tops"},
    "tops_kl": {"region": "kl", "region_threshold": 10.0, "region_over": "tops"},
}
FURTHER = ("token_band", "one_sided_tv", "two_sided_kl", "tops_tv")  # test_peer_losses.py has regions and bands


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
def compiled_centering(correction, kind, has_tail):
    objective = Objective(LossConfig(kind=kind), correction, V, 2, has_tail=has_tail)

    def loss(logits, micro):
        return objective.micro_loss(scores_of(logits, micro), micro, jnp.float32(1.0))

    return objective, jax.jit(jax.value_and_grad(loss, has_aux=True))


def gradient(correction, logits, micro, kind="ppo_clip", has_tail=False):
    """Returns the gradient of the summed loss by the logits, and the row."""
    objective, run = compiled_centering(CorrectionConfig(**correction), kind, has_tail)
    (_, statistics), found = run(jnp.asarray(logits), micro)
    return np.asarray(found), {k: float(v) for k, v in loss_row(objective, statistics, jnp.float32(1.0)).items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.harness] * (n in FURTHER)) for n in WEIGHTS])
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
    assert row["center/drift"] == pytest.approx(drift, rel=1e-4)
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
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        part = PackedBatch(*(None if array is None else array[rows] for array in micro))
        found, part_row = gradient(correction, logits, part, has_tail=True)
        parts.append(found)
        drifts.append(part_row["center/drift"] * len(part.tokens))
    np.testing.assert_allclose(sum(parts), whole, atol=2e-6)
    assert sum(drifts) / V == pytest.approx(row["center/drift"], rel=1e-5)
