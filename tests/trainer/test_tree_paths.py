"""The path of each sequence through rows of trees, walked token by token, has its tokens, positions and routes."""

import numpy as np
import pytest
from records import train_sequence

from rljax.trainer.packing import max_micro_batches, unpack_whole
from rljax.trainer.trees import flat_row_tokens, pack_trees, tree_row_tokens

SEEDS, CASES = range(4), 50


def with_routes(sequence, changes=()):
    """Adds routes of two layers. From each place in ``changes`` on, one layer has other routes."""
    routes = np.ones((len(sequence.ids), 2, 2), np.uint8)
    for place in changes:
        routes[place:, place % 2] += 1
    routes[-1] = 0
    return sequence.add({"routes": routes})


def make_sequences(rng, longest_prompt, longest_response):
    """Returns groups that begin alike at any depth: equal sequences, beginnings of others, equal prompts of groups.

    Some responses have one token. In half of the cases sequences of a group differ in whether they are in the loss.
    """
    vocab, size = int(rng.choice([2, 3, 50])), int(rng.integers(1, 6))
    turns, routes, mixed, full = rng.integers(2, size=4).astype(bool)
    text = rng.integers(0, vocab, longest_prompt + longest_response)
    made, prompt = [], text[:1]
    for _ in range(int(rng.integers(1, 8))):
        kind, length, in_loss = rng.integers(3), rng.integers(1, longest_prompt + 1), bool(rng.integers(2))
        if kind:  # else it is the prompt of the group before
            prompt = text[:length] if kind == 1 else rng.integers(0, vocab, length)
        for _ in range(size):
            kind, start, ids = rng.integers(4), len(prompt), np.concatenate([prompt, rng.integers(0, vocab, 99)])
            if kind == 0 and made:
                ids = made[rng.integers(len(made))].ids
                start = int(rng.integers(1, min(len(ids) - 1, longest_prompt) + 1))
            elif kind == 1:
                ids = np.concatenate([prompt, text])[: len(text)]
            lengths = (longest_response - longest_response // 4, longest_response) if full else (1, longest_response)
            response = ids[start:][: int(rng.integers(lengths[0], lengths[1] + 1)) if rng.integers(3) else 1]
            response = response if len(response) else text[:1]
            arrays = {"turn": (rng.random(len(response)) < 0.7).astype(np.int32)} if turns else {}
            of_group = bool(rng.integers(2)) if mixed else in_loss
            s = train_sequence(ids[:start], response, rng.normal(size=len(response)), 1.0, of_group, **arrays)
            made.append(with_routes(s, rng.integers(len(s.ids), size=rng.integers(2))) if routes else s)
    return made


def check_row(sequences, batch, row, two_levels):
    """Walks the path of each sequence of a row; returns the indices of the sequences."""
    trees = [array[row] for array in batch.trees[:3]]
    tokens, ends, positions = (array[: np.count_nonzero(trees[1])] for array in trees)
    assert not any(array[len(ends) :].any() for array in trees)  # no gap
    above = [[j for j in range(i) if ends[j] > i] for i in range(len(ends))]
    assert positions.tolist() == [len(each) for each in above]
    if two_levels:
        assert all(len({int(ends[j]) for j in (*each, i)}) <= 2 for i, each in enumerate(above))
    segments, walked, found = batch.segment_ids[row], set(), []
    for segment in range(1, segments.max(initial=0) + 1):
        (places,) = np.nonzero(segments == segment)
        (index,) = set(batch.sequence_ids[row][places].tolist())
        s, sources = sequences[index], batch.trees.sources[row][places]
        path = [*above[sources[-1]], int(sources[-1])]
        assert tokens[path].tolist() == s.ids[:-1].tolist()
        assert sources.tolist() == path[s.prompt_length - 1 :]
        assert batch.tokens[row][places].tolist() == s.response.tolist()
        assert batch.positions[row][places].tolist() == list(range(s.prompt_length, len(s.ids)))
        if batch.routes is not None:
            assert (batch.routes[row][path].reshape(-1, 2, 2) == s.columns["routes"][:-1]).all()
        assert row[0] < batch.used
        assert row[0] < batch.with_loss or not s.in_loss
        walked |= set(path)
        found.append(index)
    assert walked == set(range(len(ends)))  # no token that nobody needs
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_every_path_has_the_tokens_of_its_sequence(seed):
    rng = np.random.default_rng(seed)
    for case in range(CASES):
        prompt, response, size, rows = (int(rng.integers(1, most)) for most in (20, 20, 6, 4))
        sequences, two_levels, longest = make_sequences(rng, prompt, response), bool(case % 2), prompt + response
        row = tree_row_tokens(longest, prompt, response, size) if rng.integers(2) else longest + int(rng.integers(40))
        flat = flat_row_tokens(row, prompt, response, size) if rng.integers(2) else row + int(rng.integers(2)) * 16
        micro = max_micro_batches(len(sequences), longest, row, rows)  # what fits as separate rows
        shape = {"row_tokens": row, "rows_per_micro_batch": rows, "micro_batches": micro, "flat_tokens": flat}
        batch = pack_trees(sequences, **shape, two_levels=two_levels)
        every = [check_row(sequences, batch, place, two_levels) for place in np.ndindex(batch.tokens.shape[:2])]
        assert sorted(i for found in every for i in found) == list(range(len(sequences)))
        has_loss = batch.loss_mask[: int(batch.with_loss)].any(axis=(1, 2))
        assert has_loss.all() or "turn" in sequences[0].columns  # a turn may have no sampled token
        assert batch.loss_mask.sum() == sum(s.sampled.sum() for s in sequences if s.in_loss)
        for s, own in zip(sequences, unpack_whole(batch.rollout_logprobs, batch, sequences), strict=True):
            np.testing.assert_array_equal(own, s["rollout_logprobs"])


def test_equal_sequences_share_all_their_routes():
    shape = {"row_tokens": 8, "rows_per_micro_batch": 1, "micro_batches": 1, "flat_tokens": 8}
    equal = pack_trees([with_routes(train_sequence([1, 2], [3, 4])) for _ in range(2)], **shape)
    assert np.count_nonzero(equal.trees.ends) == 3
    # The first and the third sequence share their routes and fill a row with the second, without loss, which does not.
    made = [train_sequence([1, 2, 3, 4], [5], in_loss=in_loss) for in_loss in (True, False, True)]
    batch = pack_trees([with_routes(s, changes) for s, changes in zip(made, ([], [0], []), strict=True)], **shape)
    assert np.count_nonzero(batch.trees.ends) == 8
