"""Losses and their gradients are compared with numbers worked by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import LossConfig, kl_penalty, policy_loss, ppo_clip, vespo_factor

KINDS = ("policy_gradient", "ppo_clip", "gspo", "cispo", "vespo")
IDS = np.array([[3, 3, 3, 3, 0, 0, 0, 0], [2, 2, 2, 1, 1, 1, 1, 1]], np.int32)
MASK = np.array([[0, 1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0, 1, 1]], bool)


def numbers(seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, IDS.shape)
    advantages = rng.normal(size=4)[IDS]
    return old + spread * rng.standard_normal(IDS.shape), old, advantages


def summed(config, *, ids=IDS, num_sequences=4):
    """Returns a function that gives ((the sum of the losses, (losses, flags)), its gradient)."""

    def run(logprobs, old, advantages, mask):
        found = policy_loss(config, logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=num_sequences)
        return jnp.sum(found[0]), found

    return jax.jit(jax.value_and_grad(run, has_aux=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, 0.0, -2.0),
        (1.5, 2.0, -2.56, 1.0, 0.0),  # clipped above at 1.28
        (1.5, -2.0, 3.0, 0.0, 2.0),  # the pessimistic branch
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


@pytest.mark.parametrize(
    ("kind", "losses", "clipped", "gradient"),
    [
        # One sequence has two tokens: log pi is -1 and -2, the ratios are 2 and 1/8 (geometric mean 1/2), A is 3, and
        # the bounds are 0.4 and 1.5.
        ("policy_gradient", [3.0, 6.0], [0, 0], [-3.0, -3.0]),
        ("ppo_clip", [-4.5, -0.375], [1, 0], [0.0, -0.375]),
        ("gspo", [-1.5, -1.5], [0, 0], [-1.5, -1.5]),  # each token's loss depends on both tokens: 2 x -3 x 1/2 x 1/2
        ("cispo", [4.5, 2.4], [1, 1], [-4.5, -1.2]),
        # w is 1/4, so log phi = 3 + 2 log(1/4) - 3/4 and phi is 0.59298.
        ("vespo", [1.77895, 3.55790], [0, 0], [-1.77895, -1.77895]),
    ],
)
def test_kinds_by_hand(kind, losses, clipped, gradient):
    logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
    old = logprobs - jnp.log(jnp.array([[2.0, 0.125]]))
    run = summed(LossConfig(kind=kind, clip_low=0.6, clip_high=0.5), ids=jnp.zeros((1, 2), jnp.int32), num_sequences=1)
    (_, (found, flags)), slope = run(logprobs, old, jnp.array([[3.0, 3.0]]), mask)
    np.testing.assert_allclose(found, [losses], rtol=1e-6)
    np.testing.assert_array_equal(flags, [clipped])
    np.testing.assert_allclose(slope, [gradient], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "losses", "gradient"),
    [
        ("ppo_clip", [-4.5, -0.375, 3.0], [0.0, -0.375, 3.0]),
        # The mean ratio of the first sequence is over its two sampled tokens and is 1/2; the second sequence has one
        # token.
        ("gspo", [-1.5, -1.5, 3.0], [-1.5, -1.5, 3.0]),
        ("vespo", [1.77895, 3.55790, -9.0], [-1.77895, -1.77895, 3.0]),  # w is 1/4, and 1
    ],
)
def test_tokens_of_an_environment_have_no_loss(kind, losses, gradient):
    """Two packed trajectories have holes between their sampled tokens, filled with arbitrary numbers."""
    ids = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    mask = jnp.array([[True, False, False, True, False, True, False, False]])
    ratios = jnp.array([[2.0, 1e9, 1e-9, 0.125, 5.0, 1.0, 7.0, 1.0]])
    logprobs = jnp.array([[-1.0, -50.0, jnp.nan, -2.0, -9.0, -3.0, jnp.nan, 0.0]])
    advantages = jnp.where(ids == 0, 3.0, -3.0)
    run = summed(LossConfig(kind=kind, clip_low=0.6, clip_high=0.5), ids=ids, num_sequences=2)
    (_, (found, flags)), slope = run(logprobs, logprobs - jnp.log(ratios), advantages, mask)
    np.testing.assert_allclose(found[mask], losses, rtol=1e-6)
    np.testing.assert_allclose(slope[mask], gradient, rtol=1e-6)
    assert not found[~mask].any()
    assert not slope[~mask].any()
    assert not flags[~mask].any()


@pytest.mark.parametrize(
    ("log_ratios", "above", "below"),
    [([0.2, -0.1, 0.3], 0.5089, 1.2415), ([np.log(0.5)], 1.1204, 0.3398), ([np.log(2.0)], 0.1991, 1.0827)],
)
def test_the_factor_of_vespo_by_hand(log_ratios, above, below):
    """The sums of the log-ratios are 0.4, log 0.5 and log 2; the advantage is at least 0, or below 0."""
    shape = (2, len(log_ratios))
    where = (np.ones(shape, bool), np.arange(2)[:, None].repeat(shape[1], 1), 2)
    factors = vespo_factor(np.broadcast_to(log_ratios, shape), np.array([[0.0], [-1.0]]) + np.zeros(shape), *where)
    np.testing.assert_allclose(factors, np.broadcast_to([[above], [below]], shape), atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_outside_the_mask_does_not_matter(kind):
    logprobs, old, advantages = (x.astype(np.float32) for x in numbers())
    slope = summed(LossConfig(kind=kind))
    clean = slope(logprobs, old, advantages, MASK)
    for rubbish in (np.nan, np.inf, -np.inf, 3e38):
        dirty = [np.where(MASK, x, np.float32(rubbish)) for x in (logprobs, old, advantages)]
        jax.tree.map(np.testing.assert_array_equal, slope(*dirty, MASK), clean)
    (_, (losses, clipped)), gradient = clean
    assert not np.asarray(losses)[~MASK].any()
    assert not np.asarray(clipped)[~MASK].any()
    assert not np.asarray(gradient)[~MASK].any()
    assert np.asarray(gradient)[MASK].any()
    (total, _), gradient = slope(*(np.full_like(logprobs, np.nan),) * 3, np.zeros_like(MASK))
    assert float(total) == 0.0
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_exponents_are_bounded(kind):
    """The rollout engine reports a log-probability of -inf.

    The ratio must stop at exp(20), and nothing may become NaN.
    """
    logprobs, old, _ = (x.astype(np.float32) for x in numbers())
    old[0, 1] = -np.inf
    (_, (losses, _)), gradient = summed(LossConfig(kind=kind))(logprobs, old, -np.ones_like(old), MASK)
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()
    if kind != "cispo":
        assert float(losses[0, 1]) == pytest.approx(math.exp(20), rel=1e-6)


def test_on_policy_all_kinds_have_the_policy_gradient():
    """If old equals current, the ratio is 1 and inside the bounds.

    Only GSPO spreads the gradient over the sequence.
    """
    logprobs, _, advantages = (x.astype(np.float32) for x in numbers())
    for kind in KINDS:
        (_, (_, clipped)), gradient = summed(LossConfig(kind=kind))(logprobs, logprobs, advantages, MASK)
        assert not clipped.any()
        np.testing.assert_allclose(gradient, np.where(MASK, -advantages, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.10653066, 0.39346934)]
)
def test_kl_by_hand(kind, value, slope):
    """The policy is 0.5 nats above the reference, so k3 is exp(-0.5) - 1 + 0.5 and its slope is 1 - exp(-0.5)."""
    run = jax.jit(functools.partial(kl_penalty, kind))
    found = run(jnp.float32(-1.0), jnp.float32(-1.5))
    assert float(found) == pytest.approx(value, rel=1e-6)
    assert float(jax.grad(run)(jnp.float32(-1.0), jnp.float32(-1.5))) == pytest.approx(slope, rel=1e-6)
    assert float(jax.grad(run, argnums=1)(jnp.float32(-1.0), jnp.float32(-1.5))) == 0.0


@pytest.mark.parametrize("difference", [1e-4, -1e-4, 1e-2, -0.3, 0.49, -0.51, 5.0, -15.0])
def test_k3_keeps_its_digits(difference):
    logprobs, reference = np.float32(-1.0), np.float32(-1.0 - difference)
    exact = float(reference) - float(logprobs)
    value, slope = jax.jit(jax.value_and_grad(functools.partial(kl_penalty, "k3")))(logprobs, reference)
    expected = sum(exact**n / math.factorial(n) for n in range(2, 60))
    assert float(value) == pytest.approx(expected, rel=1e-6)
    assert float(slope) == pytest.approx(-math.expm1(exact), rel=1e-6)


def test_kl_is_masked_and_bounded():
    policy, reference = np.array([[-1.0, np.nan, -60.0]], np.float32), np.array([[-1.0, 0.0, -1.0]], np.float32)
    mask = np.array([[True, False, True]])
    for kind, last in (("k1", -59.0), ("k2", 59.0**2 / 2), ("k3", math.exp(20) - 21)):

        def run(x, kind=kind):
            found = kl_penalty(kind, x, reference, mask)
            return jnp.sum(found), found

        gradient, found = jax.jit(jax.grad(run, has_aux=True))(policy)
        np.testing.assert_allclose(found, [[0, 0, last]], rtol=1e-6)
        assert np.isfinite(gradient).all()
        assert gradient[0, 1] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.5}, r"clip_low must be in \[0, 1\], got 1.5"),
        ({"clip_high": -0.1}, r"clip_high must not be negative, got -0\.1"),
        ({"kind": "ppo"}, r"kind must be one of .*, got 'ppo'"),
        ({"aggregation": "mean"}, r"aggregation must be one of .*, got 'mean'"),
        ({"kl": "k4"}, r"kl must be one of .*, got 'k4'"),
        ({"old_logprobs": "server"}, r"old_logprobs must be one of .*, got 'server'"),
        ({"kl": "k3"}, r"above 0 if kl is set, and 0 if kl is none, got 0\.0 with k3"),
        ({"kl_coefficient": 0.1}, r"above 0 if kl is set, and 0 if kl is none, got 0\.1 with none"),
        ({"kl": "k3", "kl_coefficient": float("nan")}, r"above 0 if kl is set, and 0 if kl is none, got nan with k3"),
        ({"sequence_constant": 100}, r"0 unless aggregation is sequence_sum, got 100 with token_mean"),
        ({"mini_batches": 0}, "mini_batches must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_quoted(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)
