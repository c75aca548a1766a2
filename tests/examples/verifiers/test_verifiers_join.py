"""Answers of servers are joined to the branches that verifiers kept. The expected rows are worked out by hand."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from verifiers_rollouts.join import Answered, Branch, UnmatchedBranchError, rows_of
from verifiers_rollouts.settings import EndError, described, stops_of, template_arguments

from rljax.data import prompts
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config

TOY = Path(__file__).parents[3] / "rljax/configs/toy-base"


def answered(tokens, sampled, logprobs, version, routes=()):
    columns = {"logprobs": logprobs, "version": [version] * len(sampled)}
    return Answered(np.asarray(tokens, np.int32), np.asarray(sampled, np.int32), columns, routes=routes)


def branch(ids, marks):
    return Branch(np.asarray(ids, np.int32), np.asarray([mark == "s" for mark in marks]))


FIRST = answered([1, 2], [3, 4], [-0.1, -0.2], 5, routes=[[1], [2], [3]])
SECOND = answered([1, 2, 3, 4, 9], [6], [-0.7], 7, routes=[[0], [0], [0], [4], [9]])


def test_one_row_of_two_turns():
    """The experts of a token are those of the first answer that reports them."""
    (row,) = rows_of([FIRST, SECOND], [branch([1, 2, 3, 4, 9, 6], "--ss-s")])
    assert row == {
        **{"prompt_ids": [1, 2], "token_ids": [3, 4, 9, 6], "turns": [1, 1, 0, 2]},
        **{"logprobs": [-0.1, -0.2, None, -0.7], "version": [5, 5, None, 7], "routes": [[1], [2], [3], [4], [9]]},
    }


def test_a_shared_turn_is_sampled_once():
    """The second branch, which was answered first, has the shared turn in its prompt. Only its own turn is sampled."""
    other = answered([1, 2, 3, 4, 8], [7], [-0.9], 5)
    kept = [branch([1, 2, 3, 4, 9, 6], "--ss-s"), branch([1, 2, 3, 4, 8, 7], "--ss-s")]
    first, second = rows_of([FIRST, other, SECOND], kept)
    assert first["turns"] == [1, 1, 0, 2]
    assert second["prompt_ids"] == [1, 2, 3, 4, 8]
    assert (second["token_ids"], second["turns"]) == ([7], [3])
    assert "routes" not in second


def test_what_was_answered_twice_or_not_at_all():
    """The library kept the second answer to the same prompt, or the last of equal answers."""
    lost = answered([1, 2, 3, 4, 9], [5, 5], [-1.0, -1.0], 6)
    (row,) = rows_of([FIRST, lost, SECOND], [branch([1, 2, 3, 4, 9, 6], "--ss-s")])
    assert (row["token_ids"], row["turns"]) == ([3, 4, 9, 6], [1, 1, 0, 2])
    (row,) = rows_of([FIRST, answered([1, 2], [3, 4], [-0.3, -0.4], 6)], [branch([1, 2, 3, 4], "--ss")])
    assert (row["logprobs"], row["version"]) == ([-0.3, -0.4], [6, 6])
    for ids in ([1, 2, 3, 5], [0, 2, 3, 4]):
        with pytest.raises(UnmatchedBranchError, match=r"took 2 tokens .* answered 0 of them"):
            rows_of([FIRST], [branch(ids, "--ss")])
    assert rows_of([FIRST], []) == []


def test_settings_of_an_environment(tmp_path):
    yaml, toml = tmp_path / "env.yaml", tmp_path / "env.toml"
    yaml.write_text("taskset: {id: some_env}\nturns: 3\n")
    toml.write_text('turns = 3\n[taskset]\nid = "some_env"\n')
    assert described("some_env") == {"taskset": {"id": "some_env"}}
    assert described(str(yaml)) == described(str(toml)) == {"taskset": {"id": "some_env"}, "turns": 3}
    yaml.write_text("turns: 3\n")
    with pytest.raises(EndError, match=r"must be a mapping with taskset: \{id: NAME\}"):
        described(str(yaml))


def test_arguments_of_the_template_are_those_of_the_run():
    for thinking, words in ((None, ("depth=3", "effort=low", 'names=["a"]')), (False, ())):
        data = {"enable_thinking": thinking, "chat_template_kwargs": words}
        assert template_arguments(data) == prompts.template_arguments(thinking, words)


def test_a_turn_ends_where_a_response_of_the_run_ends(tmp_path):
    assert stops_of(TOY, [3]) == list(read_config(TOY).stops(load_tokenizer(TOY).eos_token_id, [3]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOY / name, tmp_path)
    assert stops_of(tmp_path, [3]) == [load_tokenizer(TOY).eos_token_id, 3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    assert stops_of(tmp_path, [3, 9]) == [9, 8, 3]
