"""Tests of the trainer against itself: the steps, tokens and programs of the measurement, and what it leaves alone."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from number_updates import NumberUpdate
from records import train_sequence
from tiny_step import forward_of, fresh_state, make_step
from tree_batches import groups, in_trees, separate

from rljax.trainer import self_check
from rljax.trainer.self_check import FLOORS, distance, first_micro_batches, is_rounding, largest_tree, other_mesh
from rljax.trainer.update import SingleUpdate, UpdateOptions

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
    checked = self_check.SelfCheckedUpdate(inner, checks)
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
    row = self_check.self_metrics([*map(np.float32, first)], [*map(np.float32, second)], sampled)
    assert row["logprob_abs_diff_mean"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert row["logprob_abs_diff_max"] == 1.0
    assert row["log_ppl_abs_diff"] == pytest.approx((0.25 + 1.0) / 2)


def test_the_other_shape_fits_the_mesh():
    given = [(8, 128, 1), (8, 128, 8), (1, 1024, 1), (6, 64, 2), (4, 64, 2)]
    assert [self_check.other_shape(*each) for each in given] == [(4, 256), (8, 256), (1, 2048), (6, 128), (2, 128)]


@pytest.mark.mesh
def test_another_mesh_has_the_same_devices_in_order():
    expected = {(1, 8, 1): (1, 4, 2), (1, 2, 4): (1, 4, 2), (2, 1, 3): (2, 3, 1), (2, 3, 1): (2, 1, 3)}
    for shape in (*expected, (8, 1, 1), (1, 1, 1)):
        devices = np.array(jax.devices()[: np.prod(shape)])
        other = other_mesh(Mesh(devices.reshape(shape), ("replica", "fsdp", "tp")))
        assert (None if other is None else other.devices.shape) == expected.get(shape)
        assert other is None or other.devices.ravel().tolist() == devices.tolist()


OPTIONS = UpdateOptions(1e-2, 0, False)


def checked(pack_first):
    """Returns an update on trees whose first check packs trees by ``pack_first``."""
    step = make_step(shape=(1, 2, 48), count=20, limit=24)
    forward = forward_of(step, 20, diagnosis=None)
    packs = pack_first, separate, functools.partial(separate, row=64)
    on_trees, apart = (SingleUpdate(step, forward, pack) for pack in (in_trees, separate))
    return self_check.CheckedTrees(on_trees, forward, packs, FLOORS["float32"], lambda: apart)


def misread(sequences):
    """Packs trees in which each response token reads the state of the first token of its row."""
    batch = in_trees(sequences)
    return batch._replace(trees=batch.trees._replace(sources=np.zeros_like(batch.trees.sources)))


@pytest.mark.parametrize(("pack_first", "stays"), [(in_trees, True), (misread, False)])
def test_a_mistake_sends_the_run_back_to_separate_rows(pack_first, stays, capsys):
    update, state, sequences = checked(pack_first), fresh_state(), groups()
    for is_in_trees in (True, stays):
        batch = update.pack(sequences)
        assert (batch.trees is not None) == is_in_trees
        updated = update(state, batch, sequences, OPTIONS)
        state = updated.state
        # The sequences have 273 tokens without their last ones, and the trees have 161.
        assert updated.row["perf/shared_token_fraction"] == pytest.approx(112 / 273 if stays else 0.0)
    said = capsys.readouterr().err
    assert said.startswith("\nwarning: packing.share_prefixes: off. Trees differ by ") == (not stays)


def test_tokens_of_an_environment_hide_no_mistake(capsys):
    """Each log-probability is 1 in trees and 0 in separate rows, so the mean over sampled tokens is 1."""
    update, sequences = checked(in_trees), groups(turns=True)

    def forward(params, batch):
        return None, SimpleNamespace(logprobs=np.full(batch.segment_ids.shape, float(batch.trees is not None)))

    update.forward = forward
    update(fresh_state(), update.pack(sequences), sequences, OPTIONS)
    assert "Trees differ by 1 nats a token (at most 1) from" in capsys.readouterr().err


def test_the_compared_sequences_begin_alike():
    chosen = largest_tree(groups())
    assert 2 <= len(chosen) <= 8
    assert len({chosen[0].ids[0], *(s.ids[0] for s in chosen)}) == 1
    assert largest_tree([groups(count=1)[0]]) == []


def off_by(difference, tokens=1):
    return np.where(np.arange(1000) < tokens, np.float32(difference - 2.0), np.float32(-2.0))


@pytest.mark.parametrize(
    ("trees", "other", "is_mistake"),
    [
        (off_by(2.0, tokens=3), off_by(0.01, tokens=1000), True),  # 0.006 a token in the mean, 2 at most
        (off_by(0.3, tokens=3), off_by(0.01, tokens=1000), False),
        (off_by(2.0, tokens=3), off_by(0.6), False),
        (off_by(0.03, tokens=1000), off_by(0.01, tokens=1000), False),
        (off_by(0.05, tokens=1000), off_by(0.01, tokens=1000), True),
        (off_by(np.nan), off_by(0.0), True),
        (off_by(-np.inf), off_by(0.0), True),
    ],
)
def test_what_is_more_than_rounding(trees, other, is_mistake):
    apart = off_by(0.0)
    assert is_rounding(distance(trees, apart), distance(other, apart), FLOORS["bfloat16"]) != is_mistake
    for value in (np.nan, -np.inf):  # in both, which is no mistake of trees
        assert distance(off_by(value), off_by(value)).tolist() == [0.0, 0.0]
