"""Tests of top-p's effect on the ratio of two engines that agree: exact sums, with tokens in sampled proportions."""

import numpy as np
import pytest

from rljax.mismatch import importance_weights, mismatch_metrics

POLICY = np.asarray([0.5, 0.3, 0.2])
KEPT = np.asarray([True, True, False])  # top_p = 0.8 keeps these
MASS = 0.8
SAMPLED = np.asarray([[0] * 5 + [1] * 3])  # 0.5 / 0.8 and 0.3 / 0.8 of eight tokens
RAW, PROCESSED = np.log(POLICY), np.log(np.where(KEPT, POLICY / MASS, 1.0))


def ratio_and_metrics(trainer, rollout):
    sides = trainer[SAMPLED], rollout[SAMPLED], np.ones(SAMPLED.shape, bool)
    weights, _ = importance_weights(*sides, level="token", mode="truncate", threshold=2.0)
    return weights, mismatch_metrics(*sides)


def test_after_the_cut_every_ratio_is_the_surviving_mass():
    weights, found = ratio_and_metrics(RAW, PROCESSED)
    np.testing.assert_allclose(weights, MASS)
    assert found["kl"] == found["log_ppl_abs_diff"] == pytest.approx(-np.log(MASS))
    assert found["k3_kl"] == pytest.approx(MASS - 1 - np.log(MASS))


def test_before_the_cut_the_ratio_is_1_and_hides_the_cut():
    """The sampled mean of a function is that of the cut policy. For 1[token 0] it is 5/8, not 1/2."""
    weights, found = ratio_and_metrics(RAW, RAW)
    np.testing.assert_array_equal(weights, 1.0)
    assert found["kl"] == found["k3_kl"] == 0.0
    assert np.mean(weights * (SAMPLED == 0)) == 5 / 8


def test_a_trainer_with_the_same_cut_has_no_bias():
    weights, found = ratio_and_metrics(PROCESSED, PROCESSED)
    np.testing.assert_array_equal(weights, 1.0)
    assert found["k3_kl"] == 0.0


def test_the_ratio_misses_what_cannot_be_sampled():
    """Weighted by pi / mu', the sample gives the sum of pi f over the kept tokens.

    Token 2 with 0.2 of the mass is missed.
    """
    weights, _ = ratio_and_metrics(RAW, PROCESSED)
    assert [np.mean(weights * (token == SAMPLED)) for token in range(3)] == pytest.approx([0.5, 0.3, 0.0])
