"""In first-fit packing nothing is lost, nothing leaks, and there is always room."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_calls import count_calls
from records import train_sequence

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer, packed_logprobs
from rljax.trainer.packing import PackingConfig, groups_of, max_micro_batches, unpack, useful_fraction
from rljax.trainer.packing import pack as pack_all


def pack(sequences, row, rows=1, micro=1):
    return pack_all(sequences, row_tokens=row, rows_per_micro_batch=rows, micro_batches=micro)


def sequence(rng, prompt, response, in_loss=True):
    return train_sequence(
        rng.integers(0, 32, prompt).astype(np.int32),
        rng.integers(0, 32, response).astype(np.int32),
        rng.normal(-2, 1, response).astype(np.float32),
        float(rng.normal()),
        in_loss,
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40))
def test_every_sequence_comes_back_out(seed, count):
    rng = np.random.default_rng(seed)
    sequences = [sequence(rng, int(rng.integers(1, 6)), int(rng.integers(0, 15)), bool(i % 3)) for i in range(count)]
    micro = max_micro_batches(count, 20, 50, 2)
    batch = pack(sequences, 50, 2, micro)
    flat = {name: np.asarray(array).reshape(-1, 50) for name, array in batch._asdict().items() if np.ndim(array)}
    for i, s in enumerate(sequences):
        row, places = 0, np.array([], int)
        for row in range(len(flat["tokens"])):
            places = np.flatnonzero((flat["sequence_ids"][row] == i) & (flat["segment_ids"][row] > 0))
            if len(places):
                break
        np.testing.assert_array_equal(flat["tokens"][row, places], np.concatenate([s.prompt, s.response]))
        np.testing.assert_array_equal(flat["positions"][row, places], np.arange(len(places)))
        mask = flat["response_mask"][row, places]
        np.testing.assert_array_equal(mask, np.arange(len(places)) >= len(s.prompt))
        np.testing.assert_array_equal(flat["loss_mask"][row, places], mask & s.in_loss)
        np.testing.assert_array_equal(flat["rollout_logprobs"][row, places][mask], s["rollout_logprobs"])
        np.testing.assert_array_equal(flat["advantages"][row, places][mask], np.float32(s.advantage))
    for values, s in zip(unpack(batch.rollout_logprobs, batch, sequences), sequences, strict=True):
        np.testing.assert_array_equal(values, s["rollout_logprobs"])
    used = int(batch.used) * 2
    assert not flat["segment_ids"][used:].any()
    assert flat["segment_ids"][used - 2 : used].any()
    total = sum(len(s.prompt) + len(s.response) for s in sequences)
    assert useful_fraction(sequences, batch) == total / (used * 50)


def test_rows_are_dealt_in_turn_and_given_arrays_are_carried():
    """Lengths are 10, 9, 8, 7 and 6 in rows of 10. Two micro-batches of three rows get 10 8 6 and 9 7."""
    rng = np.random.default_rng(0)
    sequences = [
        sequence(rng, 1, n - 1).add({"staleness": np.full(n - 1, n), "old_logprobs": np.full(n - 1, -float(n))})
        for n in (6, 10, 8, 9, 7)
    ]
    batch = pack(sequences, 10, 3, 4)
    assert int(batch.used) == 2
    assert (batch.segment_ids > 0).sum(axis=2).tolist() == [[10, 8, 6], [9, 7, 0], [0, 0, 0], [0, 0, 0]]
    for name, sign in (("staleness", 1), ("old_logprobs", -1)):
        expected = [[sign * len(s.response) + sign] * len(s.response) for s in sequences]
        assert [values.tolist() for values in unpack(getattr(batch, name), batch, sequences)] == expected
    assert batch.reference_logprobs is None
    with pytest.raises(ValueError, match="old_logprobs must be given for all sequences or for none, got 4 of 5"):
        pack([sequences[0].without("old_logprobs"), *sequences[1:]], 10, 3, 4)


def test_tokens_of_an_environment_are_in_no_mask():
    rng = np.random.default_rng(0)
    of_turns = sequence(rng, 2, 5).add({"turn": np.array([1, 0, 0, 2, 2])})
    single = sequence(rng, 1, 2).add({"turn": np.ones(2)})
    batch = pack([of_turns, single], 12)
    assert batch.response_mask[0, 0, :10].astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1]
    np.testing.assert_array_equal(batch.loss_mask, batch.response_mask)
    assert batch.positions[0, 0, :7].tolist() == list(range(7))  # an environment's tokens have places, too
    values = np.arange(1.0, 13.0, dtype=np.float32)[None, None]
    assert [each.tolist() for each in unpack(values, batch, [of_turns, single])] == [[3, 0, 0, 6, 7], [9, 10]]


def test_a_group_has_the_rows_of_its_prompt():
    one = sequence(np.random.default_rng(0), 1, 1)
    rows = [dataclasses.replace(one, trajectory=number) for number in (0, 0, 1, 2, 6, 7)]
    assert [list(group) for group in groups_of(rows, 2)] == [[0, 1, 2], [3], [4, 5]]
    assert [list(group) for group in groups_of([one] * 4, 2)] == [[0, 1], [2, 3]]
    assert groups_of([], 2) == []


def test_packed_scores_equal_lone_scores_and_nothing_leaks():
    config = PolicyConfig(32, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.3)
    params = init_params(config, 0)
    rng = np.random.default_rng(0)
    sequences = [sequence(rng, 3, int(rng.integers(1, 12))) for _ in range(9)]
    batch = pack(sequences, 40, 4)

    @jax.jit
    def score(tokens):
        arrays = (tokens, batch.segment_ids[0], batch.positions[0])
        return packed_logprobs(params, config, *(jnp.asarray(a) for a in arrays)).logprobs

    packed = np.asarray(score(batch.tokens[0]))
    alone = make_scorer(config, jnp.float32)(params, [np.concatenate([s.prompt, s.response]) for s in sequences])
    for i, logprobs in enumerate(alone):
        places = (batch.sequence_ids[0] == i) & (batch.segment_ids[0] > 0)
        np.testing.assert_allclose(packed[places], logprobs, atol=5e-6, rtol=0)

    # Every token of each row's first segment changes. No bit of any other segment may change.
    changed = np.where(batch.segment_ids[0] == 1, (batch.tokens[0] + 7) % 32, batch.tokens[0])
    other = batch.segment_ids[0] > 1
    assert other.any()
    np.testing.assert_array_equal(np.asarray(score(changed))[other], packed[other])
    assert not np.array_equal(np.asarray(score(changed)), packed)


def test_row_length_is_checked_and_defaults_to_the_longest():
    assert PackingConfig(0).resolve_row_tokens(44) == 64
    assert PackingConfig(128).resolve_row_tokens(44) == 128
    with pytest.raises(ValueError, match="row_tokens = 32 is shorter than the longest possible sequence, 44"):
        PackingConfig(32).resolve_row_tokens(44)


@pytest.mark.parametrize(
    ("tokens", "ways", "rows"), [(0, 8, 6), (9_216, 8, 8), (9_215, 8, 8), (18_432, 8, 16), (27_000, 4, 8)]
)
def test_a_budget_of_tokens_fills_every_part_of_the_mesh(tokens, ways, rows):
    config = PackingConfig(rows_per_micro_batch=6, tokens_per_device=tokens)
    assert config.resolve_rows(9_216, ways) == rows


def test_the_likeliest_tokens_lie_with_their_tokens():
    """Two sequences lie in a row of 8. Prompts and padding have id -1 and log-probability -inf."""
    rng = np.random.default_rng(0)
    sequences = [
        sequence(rng, prompt, response).add(
            {"top_ids": rng.integers(0, 32, (response, 2)), "top_logprobs": rng.normal(-2, 1, (response, 2))}
        )
        for prompt, response in ((2, 3), (1, 1))
    ]
    batch = pack(sequences, 8, micro=2)
    assert (batch.top_ids.dtype, batch.top_logprobs.dtype) == (np.int32, np.float32)
    assert batch.top_ids.shape == batch.top_logprobs.shape == (2, 1, 8, 2)
    for name, empty in (("top_ids", -1), ("top_logprobs", -np.inf)):
        found, nothing = getattr(batch, name), np.full((2, 2), empty)
        values = [s[name] for s in sequences]
        np.testing.assert_array_equal(
            found[0, 0], np.concatenate([nothing, values[0], nothing[:1], values[1], nothing[:1]])
        )
        assert (int(batch.used), found[1].any()) == (1, False)  # a micro-batch that is never computed is not written
        for a, b in zip(unpack(found, batch, sequences), values, strict=True):
            np.testing.assert_array_equal(a, b)
    plain = pack([s.without("top_ids", "top_logprobs") for s in sequences], 8, micro=2)
    assert plain.top_ids is plain.top_logprobs is None


def test_no_python_runs_for_a_token():
    def calls(length):
        sequences = [sequence(np.random.default_rng(0), length, length) for _ in range(4)]
        return count_calls(lambda: pack(sequences, 4 * length, micro=2))

    assert calls(4) == calls(4000)
