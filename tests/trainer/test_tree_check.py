"""The first step of a run compares a tree with separate rows, and a mistake sends the run back to separate rows."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_step import forward_of, fresh_state, make_step
from tree_batches import groups, in_trees, separate

from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.self_check import FLOORS, CheckedTrees, distance, is_rounding, largest_tree
from rljax.trainer.update import SingleUpdate, UpdateOptions

OPTIONS = UpdateOptions(1e-2, 0, False)


def checked(pack_first):
    """Returns an update on trees whose first check packs trees by ``pack_first``."""
    step = make_step(shape=(1, 2, 48), count=20, limit=24, diagnosis=DiagnosisConfig())
    forward = forward_of(step, 20)
    packs = pack_first, separate, functools.partial(separate, row=64)
    on_trees, apart = (SingleUpdate(step, forward, pack) for pack in (in_trees, separate))
    return CheckedTrees(on_trees, forward, packs, FLOORS["float32"], lambda: apart)


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
