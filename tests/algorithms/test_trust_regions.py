"""Trust regions of tokens and masks of sequences, by hand. ``test_peer_losses`` compares them with their sources."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro_batches import micro_batch

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.mismatch import merge
from rljax.mismatch.regions import Region, binary_kl, moment_bound, probability_gap, tops_distance
from rljax.policy.head import TokenScores
from rljax.trainer.objective import Objective, loss_row

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

    def statistics(i):
        scores = TokenScores(old[i : i + 1], 0 * old[i : i + 1])
        return made.micro_loss(scores, jax.tree.map(lambda array: array[i], whole), jnp.float32(1.0), numbers)[1]

    total = functools.reduce(merge, map(statistics, range(B)))
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
