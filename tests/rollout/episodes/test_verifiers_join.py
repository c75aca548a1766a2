"""An engine's answers are joined to the branches that verifiers kept. The expected rows are worked out by hand."""

import numpy as np
import pytest

from rljax.rollout.episodes.verifiers.join import Answered, Branch, UnmatchedBranchError, rows_of
from rljax.rollout.types import Response, VersionSpan
from rljax.run.config import Config, DataConfig, RolloutConfig
from rljax.run.verifiers_episodes import described


def answered(tokens, sampled, logprobs, version):
    ids, values = np.asarray(sampled, np.int32), np.asarray(logprobs, np.float32)
    return Answered(
        np.asarray(tokens, np.int32), Response(0, 0, ids, values, False, (VersionSpan(version, 0, len(ids)),))
    )


def branch(ids, marks):
    return Branch(np.asarray(ids, np.int32), np.asarray([mark == "s" for mark in marks]))


FIRST = answered([1, 2], [3, 4], [-0.1, -0.2], 5)
SECOND = answered([1, 2, 3, 4, 9], [6], [-0.7], 7)


def made(recorder):
    return recorder.response(0, 0, truncated=False, own_prompt=True)


def test_one_row_of_two_turns():
    (row,) = map(made, rows_of([FIRST, SECOND], [branch([1, 2, 3, 4, 9, 6], "--ss-s")]))
    assert row.prompt.tolist() == [1, 2]
    assert row.token_ids.tolist() == [3, 4, 9, 6]
    assert row.turns.tolist() == [1, 1, 0, 2]
    assert row.logprobs.tolist() == np.float32([-0.1, -0.2, 0.0, -0.7]).tolist()
    assert row.versions == (VersionSpan(5, 0, 3), VersionSpan(7, 3, 4))


def test_a_shared_turn_is_sampled_once():
    """The second branch has the shared turn in its prompt, and only its own turn counts as sampled."""
    other = answered([1, 2, 3, 4, 8], [7], [-0.9], 5)
    kept = [branch([1, 2, 3, 4, 9, 6], "--ss-s"), branch([1, 2, 3, 4, 8, 7], "--ss-s")]
    first, second = map(made, rows_of([FIRST, SECOND, other], kept))
    assert first.turns.tolist() == [1, 1, 0, 2]
    assert second.prompt.tolist() == [1, 2, 3, 4, 8]
    assert (second.token_ids.tolist(), second.turns.tolist()) == ([7], [3])


def test_a_turn_asked_for_twice():
    """The library kept the second answer to the same prompt. The first answer is in no row."""
    lost = answered([1, 2, 3, 4, 9], [5, 5], [-1.0, -1.0], 6)
    (row,) = map(made, rows_of([FIRST, lost, SECOND], [branch([1, 2, 3, 4, 9, 6], "--ss-s")]))
    assert row.token_ids.tolist() == [3, 4, 9, 6]
    assert row.turns.tolist() == [1, 1, 0, 3]


def test_the_last_of_equal_answers_counts():
    again = answered([1, 2], [3, 4], [-0.3, -0.4], 6)
    (row,) = map(made, rows_of([FIRST, again], [branch([1, 2, 3, 4], "--ss")]))
    assert row.logprobs.tolist() == np.float32([-0.3, -0.4]).tolist()
    assert row.versions == (VersionSpan(6, 0, 2),)


@pytest.mark.parametrize("ids", [[1, 2, 3, 5], [0, 2, 3, 4]])
def test_tokens_that_no_engine_answered(ids):
    with pytest.raises(UnmatchedBranchError, match=r"took 2 tokens .* answered 0 of them"):
        rows_of([FIRST], [branch(ids, "--ss")])


def test_no_branch_makes_no_row():
    assert rows_of([FIRST], []) == []


def test_settings_of_an_environment(tmp_path):
    yaml, toml = tmp_path / "env.yaml", tmp_path / "env.toml"
    yaml.write_text("taskset: {id: some_env}\nturns: 3\n")
    toml.write_text('turns = 3\n[taskset]\nid = "some_env"\n')
    assert described("some_env") == {"taskset": {"id": "some_env"}}
    assert described(str(yaml)) == described(str(toml)) == {"taskset": {"id": "some_env"}, "turns": 3}
    yaml.write_text("turns: 3\n")
    with pytest.raises(ValueError, match=r"must be a mapping with taskset: \{id: NAME\}"):
        described(str(yaml))


@pytest.mark.parametrize(
    ("data", "environment", "message"),
    [
        ({"task": "verifiers"}, None, "belong together, got data.task = verifiers and rollout.environment = None"),
        ({}, "verifiers:some_env", "belong together, got data.task = toy"),
        ({"task": "verifiers", "reward": "math"}, "verifiers:some_env", r"leave data\.reward out"),
    ],
)
def test_settings_that_do_not_fit(data, environment, message):
    with pytest.raises(ValueError, match=message):
        Config(data=DataConfig(**data), rollout=RolloutConfig(environment=environment))
