"""The factor of the rate from the effective sample size: worked numbers, and the same in every form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.schedule import (
    LengthTriggeredLR,
    effective_sample_share,
    get_learning_rate,
    inject_learning_rate,
    length_triggered_schedule,
    sample_size_factor,
    scaled_by_sample_size,
)


def test_worked_numbers():
    """Weights 1, 1, 1, 5: (1 + 1 + 1 + 5)^2 / (1 + 1 + 1 + 25) = 64 / 28, of 4 sequences."""
    share = effective_sample_share(np.log([1, 1, 1, 5]))
    assert share == pytest.approx(64 / 28 / 4)
    assert sample_size_factor(share) == pytest.approx(0.7559, abs=5e-5)
    assert sample_size_factor(share, 0.55) == 1.0
    assert sample_size_factor(0.25, 0.5) == pytest.approx(np.sqrt(0.5))

    for log_weight in (0.0, 5000.0, -5000.0):
        assert effective_sample_share([log_weight] * 7) == pytest.approx(1.0)
    assert effective_sample_share([5000.0, 0.0]) == pytest.approx(0.5)
    assert sample_size_factor(None) == 1.0  # no batch before
    assert sample_size_factor(float("nan")) == sample_size_factor(0.0) == 0.0


def update_with(**given):
    tx = inject_learning_rate(optax.sgd, scaled_by_sample_size(1e-3))
    tx.update({"w": 1.0}, tx.init({"w": 1.0}), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_sample_share([]), "log_weights must be finite numbers"),
        (lambda: effective_sample_share([0.0, np.inf]), "log_weights must be finite numbers"),
        (lambda: sample_size_factor(1.5), r"share must be in \[0, 1\]"),
        (lambda: sample_size_factor(0.5, 0.0), r"base must be in \(0, 1\]"),
        (lambda: scaled_by_sample_size(1e-3, 2.0), r"base must be in \(0, 1\]"),
        (update_with, "needs effective_sample_share="),
        (lambda: update_with(effective_sample_share=1.7), r"effective_sample_share must be in \[0, 1\]"),
        (lambda: update_with(effective_sample_share=jnp.ones(1)), "effective_sample_share: scalars are expected"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("base", [1.0, 0.55])
def test_the_forms_agree(base):
    """The compiled optimizer has the rates of the host: the schedule's own times the factor of the batch before."""
    draw = np.random.default_rng(0)
    lengths = np.concatenate([np.full(20, 10.0), np.full(40, 40.0)])
    shares = np.asarray([*draw.uniform(0, 1, 58), np.nan, 0.0], np.float32)
    host = LengthTriggeredLR(1e-3)
    schedule = scaled_by_sample_size(length_triggered_schedule(1e-3), base)
    tx = inject_learning_rate(optax.sgd, schedule)
    state, before = tx.init({"w": np.float32(0)}), None
    update = jax.jit(tx.update)
    for length, share in zip(lengths, shares, strict=True):
        how = {"response_length": length, "effective_sample_share": share}
        _, state = update({"w": np.float32(1)}, state, {"w": np.float32(0)}, **how)
        expected = host.step(length) * sample_size_factor(before, base)
        np.testing.assert_allclose(get_learning_rate(state), expected, rtol=1e-6)
        before = share
    assert host.surge_step is not None
    assert update._cache_size() == 1


def test_a_plain_schedule_is_scaled_too():
    tx = inject_learning_rate(optax.sgd, scaled_by_sample_size(optax.linear_schedule(1.0, 0.0, 4)))
    state, rates = tx.init({"w": np.float32(0)}), []
    for share in (0.25, 1.0, 0.25):
        _, state = tx.update({"w": np.float32(1)}, state, None, effective_sample_share=share)
        rates.append(float(get_learning_rate(state)))
    assert rates == pytest.approx([1.0, 0.5 * 0.75, 0.5])
