"""Tests of the trainer against itself: the steps, tokens and programs of the measurement, and what it leaves alone."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from number_updates import NumberUpdate
from records import train_sequence

from rljax.trainer import self_check
from rljax.trainer.self_check import SelfCheckedUpdate, first_micro_batches, other_mesh, other_shape, self_metrics
from rljax.trainer.update import UpdateOptions

DUE = UpdateOptions(1e-3, 0, noise=False, self_mismatch=True)


def sequence(length):
    tokens = np.ones(length, np.int32)
    return train_sequence(tokens[:1], tokens, np.zeros(length, np.float32), 0.0, True)


def updated(lengths, sample=64, options=DUE):
    """Returns the batches that the two other programs scored, and the outcome of the update."""
    inner = NumberUpdate(-1.0, rows=2)

    def loss_forward(state, batch):
        return inner.forward(state.params + 0.25, batch)[1]

    checks = {
        "shape": self_check.at_other_shape(inner.forward, functools.partial(inner.pack, row=16, rows=1), sample=sample),
        "remat": self_check.in_other_program(loss_forward, sample=sample, stand_ins=("old_logprobs",)),
    }
    checked = SelfCheckedUpdate(inner, checks)
    sequences = [sequence(length) for length in lengths]
    found = checked(SimpleNamespace(params=1.25), checked.pack(sequences), sequences, options)
    return [batch for _, batch in inner.asked], found


def test_the_same_tokens_in_two_other_programs():
    """The first program has micro-batches of another shape, and the second one the update's own micro-batches."""
    batches, found = updated([3, 2], options=DUE._replace(self_mismatch=False))
    assert (batches, found.row) == ([], {"policy/loss": 1.0})
    (batch, same), found = updated([3, 2])
    assert batch.tokens.shape == (8, 1, 16)
    assert found.state.params == 2.25
    assert found.row["policy/loss"] == 1.0
    assert batch.response_mask.sum() == found.row["mismatch_self/token_count"] == 5
    assert found.row["mismatch_self/logprob_abs_diff_mean"] == pytest.approx(0.25)
    assert found.row["mismatch_self/kl"] == pytest.approx(-0.25)  # lr is the update's number less the other one
    assert [len(values) for values in found.trainer().logprobs] == [3, 2]
    assert same.tokens.shape == (8, 2, 8)
    assert same.old_logprobs is same.rollout_logprobs
    assert same.reference_logprobs is None
    assert found.row["mismatch_self/remat/token_count"] == 5
    assert found.row["mismatch_self/remat/logprob_abs_diff_mean"] == pytest.approx(0.5)


def test_a_sample_or_the_first_micro_batches_are_scored_again():
    """A micro-batch has two rows of 8 tokens. Each response takes a row with its prompt of one token."""
    lengths = np.array([7, 6, 5, 7, 6])
    (sampled, batch), found = updated(lengths, sample=3)
    assert sampled.response_mask.sum() == found.row["mismatch_self/token_count"] == 7 + 5 + 6
    assert (int(batch.used), int(batch.with_loss)) == (2, 2)
    count, held = first_micro_batches(batch, 3)
    assert (count, len(held)) == (2, 4)
    assert found.row["mismatch_self/remat/token_count"] == lengths[held].sum()


def test_metrics_by_hand():
    # An environment wrote the token with zeros.
    first, second = [[-1.0, 0.0, -2.0], [-3.0]], [[-1.5, 0.0, -2.0], [-2.0]]
    sampled = [np.array([True, False, True]), np.array([True])]
    row = self_metrics([*map(np.float32, first)], [*map(np.float32, second)], sampled)
    assert row["logprob_abs_diff_mean"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert row["logprob_abs_diff_max"] == 1.0
    assert row["log_ppl_abs_diff"] == pytest.approx((0.25 + 1.0) / 2)


def test_the_other_shape_fits_the_mesh():
    given = [(8, 128, 1), (8, 128, 8), (1, 1024, 1), (6, 64, 2), (4, 64, 2)]
    assert [other_shape(*each) for each in given] == [(4, 256), (8, 256), (1, 2048), (6, 128), (2, 128)]


@pytest.mark.mesh
def test_another_mesh_has_the_same_devices_in_order():
    expected = {(1, 8, 1): (1, 4, 2), (1, 2, 4): (1, 4, 2), (2, 1, 3): (2, 3, 1), (2, 3, 1): (2, 1, 3)}
    for shape in (*expected, (8, 1, 1), (1, 1, 1)):
        devices = np.array(jax.devices()[: np.prod(shape)])
        other = other_mesh(Mesh(devices.reshape(shape), ("replica", "fsdp", "tp")))
        assert (None if other is None else other.devices.shape) == expected.get(shape)
        assert other is None or other.devices.ravel().tolist() == devices.tolist()
