"""In first-fit packing nothing is lost, nothing leaks, and there is always room."""

import dataclasses

import numpy as np
import pytest
import sharded_step
from hypothesis import given, settings
from hypothesis import strategies as st
from python_calls import count_calls
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.prompts import DataConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.tokens import TOPS
from rljax.trainer import packing
from rljax.trainer.packing import PackingConfig, lay_out_rows, max_micro_batches, unpack


def pack(sequences, row, rows=1, micro=1):
    return packing.pack(sequences, row_tokens=row, rows_per_micro_batch=rows, micro_batches=micro)


def sequence(rng, prompt, response, in_loss=True):
    ids, answer = (rng.integers(0, 32, n).astype(np.int32) for n in (prompt, response))
    return train_sequence(ids, answer, rng.normal(-2, 1, response).astype(np.float32), float(rng.normal()), in_loss)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40))
def test_every_sequence_comes_back_out(seed, count):
    rng = np.random.default_rng(seed)
    sequences = [sequence(rng, int(rng.integers(1, 6)), int(rng.integers(0, 15)), bool(i % 3)) for i in range(count)]
    if seed % 2:  # some tokens are an environment's: they have places, and are in no mask
        sequences = [s.add({"turn": rng.integers(0, 3, len(s.response))}) for s in sequences]
    batch = pack(sequences, 50, 2, max_micro_batches(count, 20, 50, 2))
    for i, s in enumerate(sequences):
        micros, rows, places = np.nonzero((batch.sequence_ids == i) & (batch.segment_ids > 0))
        assert len(set(zip(micros.tolist(), rows.tolist(), strict=True))) == 1
        own = {name: array[micros, rows, places] for name, array in batch._asdict().items() if np.ndim(array) == 3}
        mask = np.append(np.zeros(len(s.prompt), bool), s.turns > 0)
        np.testing.assert_array_equal(own["tokens"], s.ids)
        np.testing.assert_array_equal(own["positions"], np.arange(len(places)))
        np.testing.assert_array_equal(own["response_mask"], mask)
        np.testing.assert_array_equal(own["loss_mask"], mask & s.in_loss)
        np.testing.assert_array_equal(own["rollout_logprobs"][mask], s["rollout_logprobs"][s.turns > 0])
        np.testing.assert_array_equal(own["advantages"][mask], np.float32(s.advantage))
    for values, s in zip(unpack(batch.rollout_logprobs, batch, sequences), sequences, strict=True):
        np.testing.assert_array_equal(values, np.where(s.turns > 0, s["rollout_logprobs"], 0))
    assert not batch.segment_ids[batch.used :].any()
    assert batch.segment_ids[batch.used - 1].any()
    assert packing.useful_fraction(sequences, batch) == sum(len(s.ids) for s in sequences) / (int(batch.used) * 2 * 50)


def test_rows_are_dealt_in_turn_and_given_arrays_are_carried():
    """Lengths are 10, 9, 8, 7 and 6 in rows of 10. Two micro-batches of three rows get 10 8 6 and 9 7."""
    rng, sequences = np.random.default_rng(0), []
    for n in (6, 10, 8, 9, 7):
        own = {"staleness": np.full(n - 1, n), "old_logprobs": np.full(n - 1, -float(n))}
        sequences.append(sequence(rng, 1, n - 1).add(own))
    batch = pack(sequences, 10, 3, 4)
    assert int(batch.used) == 2
    assert (batch.segment_ids > 0).sum(axis=2).tolist() == [[10, 8, 6], [9, 7, 0], [0, 0, 0], [0, 0, 0]]
    for name in ("staleness", "old_logprobs"):
        for values, s in zip(unpack(getattr(batch, name), batch, sequences), sequences, strict=True):
            np.testing.assert_array_equal(values, s[name])
    assert batch.reference_logprobs is None
    with pytest.raises(ValueError, match="old_logprobs must be given for all sequences or for none, got 4 of 5"):
        pack([sequences[0].without("old_logprobs"), *sequences[1:]], 10, 3, 4)


def test_a_group_has_the_rows_of_its_prompt():
    one = sequence(np.random.default_rng(0), 1, 1)
    rows = [dataclasses.replace(one, trajectory=number) for number in (0, 0, 1, 2, 6, 7)]
    assert [list(group) for group in packing.groups_of(rows, 2)] == [[0, 1, 2], [3], [4, 5]]
    assert [list(group) for group in packing.groups_of([one] * 4, 2)] == [[0, 1], [2, 3]]
    assert packing.groups_of([], 2) == []


def test_a_budget_of_tokens_fills_every_part_of_the_mesh():
    for tokens, ways, rows in ((0, 8, 6), (9_216, 8, 8), (9_215, 8, 8), (18_432, 8, 16), (27_000, 4, 8)):
        config = PackingConfig(rows_per_micro_batch=6, tokens_per_device=tokens)
        assert config.resolve_rows(9_216, ways) == rows
    assert [PackingConfig(asked).resolve_row_tokens(44) for asked in (0, 128)] == [64, 128]
    with pytest.raises(ValueError, match="row_tokens = 32 is shorter than the longest possible sequence, 44"):
        PackingConfig(32).resolve_row_tokens(44)


def test_the_likeliest_tokens_lie_with_their_tokens():
    """Two sequences lie in a row of 8. Prompts and padding have id -1 and log-probability -inf."""
    rng, made = np.random.default_rng(0), {"top_ids": np.arange(6).reshape(3, 2), "top_logprobs": -np.ones((3, 2))}
    sequences = [
        sequence(rng, prompt, response).add({name: values[:response] for name, values in made.items()})
        for prompt, response in ((2, 3), (1, 1))
    ]
    batch = pack(sequences, 8, micro=2)
    assert (batch.top_ids.dtype, batch.top_logprobs.dtype) == (np.int32, np.float32)
    assert batch.top_ids.shape == batch.top_logprobs.shape == (2, 1, 8, 2)
    for name, empty in (("top_ids", -1), ("top_logprobs", -np.inf)):
        found, nothing = getattr(batch, name), np.full((2, 2), empty)
        values = [s[name] for s in sequences]
        expected = np.concatenate([nothing, values[0], nothing[:1], values[1], nothing[:1]])
        np.testing.assert_array_equal(found[0, 0], expected)
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


@pytest.mark.parametrize("centers", [False, True])
def test_only_what_the_loss_reads_is_packed(centers):
    every = [s.add({name: np.zeros((len(s.response), 2)) for name in TOPS}) for s in sharded_step.sequences()]
    config = Config(
        data=DataConfig(batch_size=12, max_prompt_tokens=9),
        rollout=RolloutConfig(group_size=4, max_response_tokens=22, top_logprobs=2),
        correction=CorrectionConfig(score_centering=centers),
    )
    packed = make_pack(config, sharded_step.CONFIG, config.num_sequences)(every)
    assert (packed.top_ids is not None) == (packed.top_logprobs is not None) == centers


def test_first_fit_by_hand():
    # 7 opens row 0, and 5 opens row 1. Neither 4 fits row 0. The first goes to row 1, and the next opens row 2.
    assert packing.first_fit([4, 5, 7, 4, 3], [2, 1, 0, 3, 4], 10) == [[2, 4], [1, 0], [3]]
    with pytest.raises(ValueError, match="11 tokens does not fit a row of 10"):
        packing.first_fit([3, 11], [1, 0], 10)
    with pytest.raises(ValueError, match="3 rows do not fit 1 micro-batches of 2"):
        lay_out_rows([9] * 3, [True] * 3, (1, 2, 10))


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=80),
    row=st.integers(20, 100),
    rows=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_every_sequence_has_one_place_in_the_micro_batches(lengths, row, rows, seed, share):
    in_loss = (np.random.default_rng(seed).random(len(lengths)) < share).tolist()
    most = max_micro_batches(len(lengths), 20, row, rows)
    layout = lay_out_rows(lengths, in_loss, (most, rows, row))
    assert sorted(i for members in layout.rows.values() for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= row for members in layout.rows.values())
    assert all(members for members in layout.rows.values())
    assert layout.used <= most
    assert {micro for micro, _ in layout.rows} == set(range(layout.used))
    assert all(place < rows for _, place in layout.rows)
    carrying = {micro for (micro, _), members in layout.rows.items() if any(in_loss[i] for i in members)}
    assert carrying == set(range(layout.with_loss))
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assert layout.cost <= -(-len(packing.first_fit(lengths, longest_first, row)) // rows)


def test_sequences_without_loss_fill_up_and_then_stand_alone():
    """Rows of 10 with loss of 8, 7, 7 and 6 take 2, 3, 3 and 4, and three 9s need two forwards."""
    layout = lay_out_rows([8, 7, 7, 6, 2, 3, 3, 4, 9, 9, 9], [True] * 4 + [False] * 7, (6, 2, 10))
    assert (layout.with_loss, layout.used, layout.cost) == (2, 4, pytest.approx(2 + 2 / 3))
    filled = {(0, 0): [0, 4], (1, 0): [1, 5], (0, 1): [2, 6], (1, 1): [3, 7]}
    assert layout.rows == filled | {(2, 0): [8], (3, 0): [9], (2, 1): [10]}
    # Of two rows with loss and four without, a forward alone would leave one micro-batch with loss for the noise.
    layout = lay_out_rows([9] * 6, [True, True] + [False] * 4, (6, 4, 10))
    assert (layout.with_loss, layout.used) == (2, 2)
    assert {place: members for place, members in layout.rows.items() if members[0] < 2} == {(0, 0): [0], (1, 0): [1]}
    layout = lay_out_rows([9] * 6, [False] * 6, (2, 4, 10))
    assert (layout.with_loss, layout.used) == (0, 2)
