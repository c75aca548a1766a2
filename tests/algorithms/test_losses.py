"""Losses, their gradients and the weights of their tokens are compared with numbers worked by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import (
    LossConfig,
    aggregation_weights,
    kl_penalty,
    mean_over_sequence,
    policy_loss,
    ppo_clip,
)

KINDS = ("policy_gradient", "ppo_clip", "gspo", "cispo", "vespo")
IDS = np.array([[3, 3, 3, 3, 0, 0, 0, 0], [2, 2, 2, 1, 1, 1, 1, 1]], np.int32)
MASK = np.array([[0, 1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0, 1, 1]], bool)


def numbers():
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.0, IDS.shape)
    advantages = rng.normal(size=4)[IDS]
    return [np.float32(x) for x in (old + 0.3 * rng.standard_normal(IDS.shape), old, advantages)]


def summed(config, *, ids=IDS, num_sequences=4):
    """Returns a function that gives ((the sum of the losses, (losses, flags)), its gradient)."""

    def run(logprobs, old, advantages, mask):
        found = policy_loss(config, logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=num_sequences)
        return jnp.sum(found[0]), found

    return jax.jit(jax.value_and_grad(run, has_aux=True))


def test_ppo_clip_by_hand():
    """The ratio 1.5 is clipped above at 1.28, and 0.5 below at 0.8, except in the pessimistic branches."""
    ratios, advantages = jnp.array([[1.0, 1.5, 1.5, 0.5, 0.5]]), jnp.array([[2.0, 2.0, -2.0, 2.0, -2.0]])
    losses, pull, clipped = jax.vjp(lambda r: ppo_clip(r, advantages, 0.2, 0.28), ratios, has_aux=True)
    np.testing.assert_allclose(losses, [[-2.0, -2.56, 3.0, -1.0, 1.6]], atol=1e-6)
    np.testing.assert_array_equal(clipped, [[0, 1, 0, 0, 1]])
    np.testing.assert_allclose(pull(jnp.ones_like(ratios))[0], [[-2.0, 0.0, 2.0, -2.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "losses", "clipped", "gradient"),
    [
        # The first sequence has two tokens: log pi is -1 and -2, the ratios are 2 and 1/8 (geometric mean 1/2), A is 3,
        # and the bounds are 0.4 and 1.5. The second has a token with log pi = -3, a ratio of 2 and A = -3.
        ("policy_gradient", [3.0, 6.0, -9.0], [0, 0, 0], [-3.0, -3.0, 3.0]),
        ("ppo_clip", [-4.5, -0.375, 6.0], [1, 0, 0], [0.0, -0.375, 6.0]),
        # Each token's loss of GSPO depends on both tokens: 2 x -3 x 1/2 x 1/2.
        ("gspo", [-1.5, -1.5, 6.0], [0, 0, 0], [-1.5, -1.5, 6.0]),
        ("cispo", [4.5, 2.4, -13.5], [1, 1, 1], [-4.5, -1.2, 4.5]),
        # w is 1/4, so log phi = 3 + 2 log(1/4) - 3/4 and phi is 0.59298. Then it is 2, and log phi = 2 + 3 log 2 - 4.
        ("vespo", [1.778950, 3.557901, -9.744140], [0, 0, 0], [-1.778950, -1.778950, 3.248047]),
    ],
)
def test_kinds_by_hand(kind, losses, clipped, gradient):
    """Two packed trajectories have holes between their sampled tokens, filled with arbitrary numbers."""
    ids = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    mask = jnp.array([[True, False, False, True, False, True, False, False]])
    ratios = jnp.array([[2.0, 1e9, 1e-9, 0.125, 5.0, 2.0, 7.0, 1.0]])
    logprobs = jnp.array([[-1.0, -50.0, jnp.nan, -2.0, -9.0, -3.0, jnp.nan, 0.0]])
    advantages = jnp.where(ids == 0, 3.0, -3.0)
    run = summed(LossConfig(kind=kind, clip_low=0.6, clip_high=0.5), ids=ids, num_sequences=2)
    (_, (found, flags)), slope = run(logprobs, logprobs - jnp.log(ratios), advantages, mask)
    np.testing.assert_allclose(found[mask], losses, rtol=1e-6)
    np.testing.assert_array_equal(flags[mask], clipped)
    np.testing.assert_allclose(slope[mask], gradient, rtol=1e-6)
    assert not any(np.asarray(each)[~mask].any() for each in (found, flags, slope))


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_outside_the_mask_does_not_matter(kind):
    logprobs, old, advantages = numbers()
    slope = summed(LossConfig(kind=kind))
    clean = slope(logprobs, old, advantages, MASK)
    for rubbish in (np.nan, np.inf, -np.inf, 3e38):
        dirty = [np.where(MASK, x, np.float32(rubbish)) for x in (logprobs, old, advantages)]
        jax.tree.map(np.testing.assert_array_equal, slope(*dirty, MASK), clean)
    assert not np.asarray(clean[1])[~MASK].any()
    assert np.asarray(clean[1])[MASK].any()
    (total, _), gradient = slope(*(np.full_like(logprobs, np.nan),) * 3, np.zeros_like(MASK))
    assert float(total) == 0.0
    assert not np.asarray(gradient).any()
    # If old equals current, the ratio is 1 and inside the bounds. Only GSPO spreads the gradient over the sequence.
    (_, (_, clipped)), gradient = slope(logprobs, logprobs, advantages, MASK)
    assert not clipped.any()
    np.testing.assert_allclose(gradient, np.where(MASK, -advantages, 0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_exponents_are_bounded(kind):
    """The engine reports a log-probability of -inf: the ratio stops at exp(20), and nothing becomes NaN."""
    logprobs, old, _ = numbers()
    old[0, 1] = -np.inf
    (_, (losses, _)), gradient = summed(LossConfig(kind=kind))(logprobs, old, -np.ones_like(old), MASK)
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()
    if kind != "cispo":
        assert float(losses[0, 1]) == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_by_hand(kind):
    """The estimate keeps its digits, and no gradient goes to the reference."""
    run = jax.jit(jax.value_and_grad(functools.partial(kl_penalty, kind), argnums=(0, 1)))
    for difference in (1e-4, -1e-4, 1e-2, -0.3, 0.49, -0.51, 5.0, -15.0):
        logprobs, reference = np.float32(-1.0), np.float32(-1.0 - difference)
        r = float(logprobs) - float(reference)
        k3 = sum((-r) ** n / math.factorial(n) for n in range(2, 60))
        value, slope = {"k1": (r, 1.0), "k2": (r**2 / 2, r), "k3": (k3, -math.expm1(-r))}[kind]
        found, (of_policy, of_reference) = run(logprobs, reference)
        assert (float(found), float(of_policy)) == pytest.approx((value, slope), rel=1e-6)
        assert float(of_reference) == 0.0


def test_kl_is_masked_and_bounded():
    policy, reference = np.array([[-1.0, np.nan, -60.0]], np.float32), np.array([[-1.0, 0.0, -1.0]], np.float32)
    mask = np.array([[True, False, True]])
    for kind, last in (("k1", -59.0), ("k2", 59.0**2 / 2), ("k3", math.exp(20) - 21)):
        found, pull = jax.vjp(lambda x, kind=kind: kl_penalty(kind, x, reference, mask), policy)
        np.testing.assert_allclose(found, [[0, 0, last]], rtol=1e-6)
        (gradient,) = pull(jnp.ones_like(found))
        assert np.isfinite(gradient).all()
        assert gradient[0, 1] == 0


# The first row has sequences 4 (three tokens and a hole) and 0 (one token). The second row has sequences 2 (two tokens)
# and 1 (no token in the mask).
FIVE = np.array([[4, 4, 4, 4, 0, 0], [2, 2, 1, 1, 0, 0]], np.int32)
COUNTED = np.array([[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], bool)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token_mean", [[1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], 6),
        ("sequence_mean", [[1 / 3, 0, 1 / 3, 1 / 3, 1, 0], [1 / 2, 1 / 2, 0, 0, 0, 0]], 3),
        ("sequence_sum", [[1 / 8, 0, 1 / 8, 1 / 8, 1 / 8, 0], [1 / 8, 1 / 8, 0, 0, 0, 0]], 3),
    ],
)
def test_weights_of_tokens_by_hand(aggregation, weights, denominator):
    run = jax.jit(functools.partial(aggregation_weights, aggregation, constant=8, sequence_ids=FIVE, num_sequences=5))
    found, total = run(COUNTED)
    np.testing.assert_allclose(found, weights, rtol=1e-7)
    assert float(total) == denominator
    assert found.dtype == total.dtype == jnp.float32
    nothing, zero = run(np.zeros_like(COUNTED))
    assert not nothing.any()
    assert float(zero) == 0.0


def test_mean_over_sequence_by_hand_with_its_gradient():
    values = np.array([[1.0, np.nan, 4.0, 7.0, 5.0, np.nan], [2.0, 4.0, np.inf, 0, 0, 0]], np.float32)
    means, pull = jax.vjp(jax.jit(lambda values: mean_over_sequence(values, COUNTED, FIVE, 5)), values)
    np.testing.assert_array_equal(means, [[4, 0, 4, 4, 5, 0], [3, 3, 0, 0, 0, 0]])
    cotangent = np.array([[3.0, 9.0, 0.0, 6.0, 2.0, np.nan], [1.0, 0.0, 9.0, 9.0, 9.0, 9.0]], np.float32)
    np.testing.assert_array_equal(pull(cotangent)[0], [[3, 0, 3, 3, 2, 0], [0.5, 0.5, 0, 0, 0, 0]])


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo"])
def test_stale_tokens_have_bounds_of_their_own(kind):
    """The ratios are 1.25 and 0.85. Fresh tokens are inside 0.2 / 0.28, and stale ones are outside 0.1 / 0.05."""
    ratios, advantages = np.array([[1.25, 1.25, 0.85, 0.85]]), np.array([[1.0, 1.0, -1.0, -1.0]])
    logprobs = np.log(ratios) if kind == "ppo_clip" else np.ones((1, 4))
    given = logprobs, logprobs - np.log(ratios), advantages, np.ones((1, 4), bool)
    where = {"sequence_ids": np.zeros((1, 4), np.int32), "num_sequences": 1, "staleness": np.array([[0, 2, 0, 1]])}
    losses, clipped = policy_loss(LossConfig(kind=kind, stale_clip_low=0.1, stale_clip_high=0.05), *given, **where)
    np.testing.assert_allclose(losses[0], [-1.25, -1.05, 0.85, 0.9], rtol=1e-5)
    np.testing.assert_array_equal(clipped[0], [0, 1, 0, 1])
    fresh, _ = policy_loss(LossConfig(kind=kind), *given, **where)
    np.testing.assert_allclose(fresh[0], [-1.25, -1.25, 0.85, 0.85], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.5}, r"clip_low must be in \[0, 1\], got 1.5"),
        ({"clip_high": -0.1}, r"clip_high must not be negative, got -0\.1"),
        ({"kind": "ppo"}, r"kind must be one of .*, got 'ppo'"),
        ({"kl": "k3"}, r"above 0 if kl is set, and 0 if kl is none, got 0\.0 with k3"),
        ({"kl_coefficient": 0.1}, r"above 0 if kl is set, and 0 if kl is none, got 0\.1 with none"),
        ({"kl": "k3", "kl_coefficient": float("nan")}, r"above 0 if kl is set, and 0 if kl is none, got nan with k3"),
        ({"sequence_constant": 100}, r"0 unless aggregation is sequence_sum, got 100 with token_mean"),
        ({"mini_batches": 0}, "mini_batches must be at least 1, got 0"),
        ({"stale_clip_high": 0.3}, r"stale_clip_high must be in 0 .. clip_high = 0\.28, got 0\.3"),
        ({"kind": "policy_gradient", "stale_clip_low": 0.1}, "do nothing for kind policy_gradient"),
    ],
)
def test_mistakes_are_quoted(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)
