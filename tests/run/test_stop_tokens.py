"""The tokens that a run stops at, besides those of the model's files."""

import pytest
from toy_runs import TOY_BASE, comparable, complete, tiny

from rljax.evaluate import find_policy
from rljax.rollout.types import RolloutConfig


def test_a_run_stops_at_the_tokens_that_it_names(tmp_path):
    """All 16 tokens stop, so each response has one token, in training and in evaluation."""
    every = [str(token) for token in range(16)]
    words = tiny(TOY_BASE, tmp_path, 1, "--eval.every", "1", "--rollout.stop-token-ids", *every)
    status, output = complete(words)
    assert status == 0, output
    (row,) = comparable(tmp_path)
    assert (row["response_length/max"], row["eval/toy/response_length"]) == (1.0, 1.0)
    assert row["response_length/truncated_fraction"] == 0.0
    assert find_policy(tmp_path).stops(14) == (14, *range(14), 15)


@pytest.mark.parametrize("word", ["16", "-1"])
def test_a_stop_token_outside_the_vocabulary_is_refused(word, tmp_path):
    status, output = complete(tiny(TOY_BASE, tmp_path, 1, "--rollout.stop-token-ids", "3", word))
    assert status == 2
    assert "stop_token_ids" in output
    assert "Traceback" not in output


def test_no_stop_token_is_added_by_default():
    assert RolloutConfig().stop_token_ids == ()
    assert find_policy(TOY_BASE).stops(15) == (14,)
