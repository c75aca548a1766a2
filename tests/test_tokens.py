"""The record of a sequence: its arrays stay with their tokens when it is cut, joined and sent."""

import numpy as np
import pytest

from rljax.tokens import COLUMNS, TokenRecord, common_columns, join


def tokens(prompt, response, **arrays):
    return TokenRecord.of(np.int32(prompt), np.int32(response), arrays)


def test_an_array_of_the_response_is_filled_at_the_prompt():
    one = tokens([7, 8], [1, 2, 3], rollout_logprobs=[-1.0, -2.0, -3.0], turn=[1, 0, 2], top_ids=np.ones((3, 2)))
    assert one.columns["rollout_logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert one.columns["top_ids"].tolist() == [[-1, -1], [-1, -1], [1, 1], [1, 1], [1, 1]]
    assert {name: array.dtype for name, array in one.columns.items()} == {
        name: COLUMNS[name].dtype for name in one.columns
    }
    assert one["rollout_logprobs"].tolist() == [-1, -2, -3]
    assert (one.prompt.tolist(), one.response.tolist()) == ([7, 8], [1, 2, 3])
    assert one.sampled.tolist() == [True, False, True]
    assert one.without("turn").turns.tolist() == [1, 1, 1]


def test_an_array_of_all_tokens_is_not_copied():
    whole = np.arange(5, dtype=np.int32)
    one = tokens([7, 8], [1, 2, 3], version=whole)
    assert one.columns["version"] is whole
    with pytest.raises(ValueError, match=r"each array must have 5 entries, one for each token, got .*\(4,\)"):
        one.add({"staleness": np.zeros(4)})


@pytest.mark.parametrize(
    ("start", "end", "prompt", "response"), [(0, 4, [7, 8], [1, 2]), (1, 2, [8], []), (3, None, [], [2, 3])]
)
def test_a_cut_takes_every_array_along(start, end, prompt, response):
    one = tokens([7, 8], [1, 2, 3], staleness=[1, 2, 3])
    cut = one.cut(start, end)
    assert (cut.prompt.tolist(), cut.response.tolist()) == (prompt, response)
    assert cut.columns["staleness"].tolist() == [0, 0, 1, 2, 3][start:end]


def test_pieces_without_an_array_are_filled():
    routes = np.ones((2, 1, 2), np.uint8)
    pieces = [tokens([7], []), tokens([], [1, 2], version=[4, 4], routes=routes), tokens([], [3], version=[5])]
    whole = join(pieces, 1)
    assert (whole.ids.tolist(), whole.prompt_length) == ([7, 1, 2, 3], 1)
    assert whole.columns["version"].tolist() == [-1, 4, 4, 5]
    assert whole.columns["routes"].dtype == np.uint8
    assert whole.columns["routes"][:, 0].tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_sequences_of_a_batch_have_the_same_arrays():
    both = [tokens([7], [1], turn=[1]), tokens([7], [2])]
    with pytest.raises(ValueError, match="turn must be given for all sequences or for none, got 1 of 2"):
        common_columns(both)
    assert common_columns(both[:1]) == ["turn"]
