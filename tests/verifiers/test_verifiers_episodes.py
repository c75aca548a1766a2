"""Environments of verifiers run on the embedded engine.

Tokens and numbers must be as the engine answered, and failures must be counted.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from rljax.data.prompts import DataConfig
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config, ModelConfig
from rljax.run.verifiers_episodes import VerifiersEpisodes, program_settings, verifiers_problems

TOY = Path(__file__).parents[2] / "rljax/configs/toy-base"
EOS = 14


class KeepingEngine(RolloutEngine):
    """An engine that keeps its answers: the tokens before each turn, and the turn."""

    def __init__(self, engine):
        self.engine, self.kept = engine, {}

    def answer(self, queue, sampling, *, seed):
        samples = self.engine.answer(queue, sampling, seed=seed)

        def kept():
            for response in samples:
                self.kept.setdefault(response.prompt_index, []).append(response)
                yield response

        return Samples(kept(), samples.metrics)


def run(tmp_path, engine, settings, *, n=2, room=60, model=TOY, sampling=None, **limits):
    """Runs two tasks; returns all trajectories by place, the row of counts, and the engine's answers by key."""
    file = tmp_path / "environment.yaml"
    file.write_text(yaml.safe_dump(settings))
    episode = EpisodeConfig(**{"tool_timeout_s": 60.0, "call_timeout_s": 120.0} | limits)
    rollout = RolloutConfig(environment=f"verifiers:{file}", episode=episode, max_response_tokens=room)
    config = Config(model=ModelConfig(path=str(model)), data=DataConfig(task="verifiers"), rollout=rollout)
    keeping = KeepingEngine(engine)
    source = VerifiersEpisodes(
        keeping, load_tokenizer(model), program_settings(config, [EOS]), episode, max_prompt_tokens=64
    )
    try:
        params = sampling or SamplingParams(room, 1.0, (EOS,), reported=2)
        problems = [{"prompt": "0+1=", "verifiers_task": 0}, {"prompt": "1+1=", "verifiers_task": 1}]
        begun = source.begin(problems, n, params, seed=3)
        scored = {one.place: one for one in begun.scored}
        return scored, begun.metrics | source.pop_metrics(), keeping.kept
    finally:
        source.close()


def check_row(row, turns):
    """Checks that the row has these turns exactly as the engine answered them, and zeros between them."""
    for number, answer in turns.items():
        here = row.turns == number
        assert row.token_ids[here].tolist() == answer.token_ids.tolist()
        assert row.logprobs[here].tobytes() == answer.logprobs.tobytes()
        assert row.tops.ids[here].tolist() == answer.tops.ids.tolist()
        assert row.tops.logprobs[here].tobytes() == answer.tops.logprobs.tobytes()
    between = row.turns == 0
    assert (row.logprobs[between] == 0).all()
    assert (row.tops.ids[between] == -1).all()
    assert set(row.turns.tolist()) - {0} == set(turns)
    assert [span.start for span in row.versions] == [0]
    assert row.versions[-1].end == len(row.token_ids)


def check_scores(row):
    """Checks that the trainer's own forward gives the row's log-probabilities at the sampled tokens."""
    policy = read_config(TOY)
    score = make_scorer(policy, "float32")
    (own,) = score(load_params(TOY, policy), [np.concatenate([row.prompt, row.token_ids])])
    sampled = row.turns > 0
    np.testing.assert_allclose(own[len(row.prompt) :][sampled], row.logprobs[sampled], atol=2e-5)


ENGINES = ["toy_engine", pytest.param("vllm_engine", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("name", ENGINES)
def test_turns_as_the_engine_answered(tmp_path, request, name):
    settings = {"taskset": {"id": "turns_env"}}
    scored, counts, kept = run(tmp_path, request.getfixturevalue(name), settings)
    assert sorted(scored) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    tokenizer = load_tokenizer(TOY)
    for (i, j), one in scored.items():
        answers, row = kept[2 * i + j], one.response
        assert len(answers) == 3
        check_row(row, {k + 1: answer for k, answer in enumerate(answers)})
        assert tokenizer.decode(row.token_ids[row.turns == 0]) == "9+9+"
        assert row.prompt is None
        texts = [tokenizer.decode(answer.token_ids) for answer in answers]
        assert one.reward == sum(map(len, texts))
        assert one.text == "".join(texts)
        check_scores(dataclasses.replace(row, prompt=one.prompt))
    assert counts["reward/errors"] == counts["turns/forked"] == counts["turns/unmatched"] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_a_tool_that_adds(tmp_path, request, name):
    settings = {"taskset": {"id": "adder_env"}, "renderer": {"parser": "adder_env:calls"}}
    scored, counts, kept = run(tmp_path, request.getfixturevalue(name), settings, n=4, max_turns=4)
    tokenizer = load_tokenizer(TOY)
    replies = 0
    for (i, j), one in scored.items():
        answers, row = kept[4 * i + j], one.response
        check_row(row, {k + 1: answer for k, answer in enumerate(answers)})
        assert tokenizer.decode(row.prompt) == f"{i}{i}1+11{i}="
        expected = ""
        for answer in answers[:-1]:
            digits = [c for c in tokenizer.decode(answer.token_ids) if c.isdigit()]
            expected += f"{int(digits[0]) + int(digits[-1])}="
        assert tokenizer.decode(row.token_ids[row.turns == 0]) == expected
        replies += len(answers) - 1
        assert one.reward >= len(answers) - 1  # the reply to the last turn of a full trajectory is not read
        check_scores(row)
    assert counts["turns/tool_calls"] >= replies > 0
    assert counts["turns/tool_errors"] == counts["turns/tool_timeouts"] == counts["reward/errors"] == 0


@pytest.mark.parametrize(("mode", "name"), [("raises", "errors"), ("hangs", "timeouts"), ("dies", "timeouts")])
def test_a_tool_that_misbehaves(tmp_path, toy_engine, mode, name):
    taskset = {"id": "adder_env", "tools": {"mode": mode}}
    settings = {"taskset": taskset, "renderer": {"parser": "adder_env:calls"}}
    late = {} if mode == "raises" else {"tool_timeout_s": 3.0}
    scored, counts, _ = run(tmp_path, toy_engine, settings, max_turns=2, room=300, **late)
    assert counts["turns/tool_calls"] == counts[f"turns/tool_{name}"] > 0
    assert counts["reward/errors"] == 0
    assert all(math.isfinite(one.reward) for one in scored.values())


def test_a_reward_that_raises_is_counted(tmp_path, toy_engine):
    settings = {"taskset": {"id": "turns_env", "task": {"rewards_fail": True}}}
    scored, counts, kept = run(tmp_path, toy_engine, settings)
    assert counts["turns/unscored"] == counts["reward/errors"] == 4
    for (i, j), one in scored.items():
        assert math.isnan(one.reward)
        check_row(one.response, {k + 1: answer for k, answer in enumerate(kept[2 * i + j])})


def test_an_environment_that_is_late(tmp_path, toy_engine):
    settings = {"taskset": {"id": "turns_env", "task": {"seconds": 600.0}}}
    scored, counts, _ = run(tmp_path, toy_engine, settings, n=1, call_timeout_s=5.0)
    assert counts["turns/env_timeouts"] == counts["reward/timeouts"] == counts["reward/errors"] == 2
    assert all(math.isnan(one.reward) and one.response.length > 0 for one in scored.values())


@pytest.mark.parametrize("max_rows", [1, 3])
def test_turns_that_do_not_extend_the_last(tmp_path, toy_engine, forgetful_model, max_rows):
    settings = {"taskset": {"id": "turns_env"}}
    scored, counts, kept = run(tmp_path, toy_engine, settings, n=1, model=forgetful_model, max_rows=max_rows)
    assert counts["turns/forked"] == 2
    assert counts["turns/too_many_rows"] == counts["reward/errors"] == (2 if max_rows == 1 else 0)
    tokenizer = load_tokenizer(TOY)
    for (i, _), one in scored.items():
        assert math.isnan(one.reward) == (max_rows == 1)
        rows = one.response.rows
        assert len(rows) == max_rows
        for k, row in enumerate(rows):
            check_row(row, {k + 1: kept[i][k]})
            if k:
                assert tokenizer.decode(row.prompt) == "9+"


def test_a_trajectory_without_room(tmp_path, toy_engine):
    """The prompt has 4 tokens, a turn samples 3 and the user writes 2, so the second turn is cut at 8 tokens."""
    settings = {"taskset": {"id": "turns_env"}, "turns": 4}
    params = SamplingParams(8, 1.0, (), reported=2)  # only the limit ends a turn
    scored, counts, _ = run(tmp_path, toy_engine, settings, n=1, sampling=params, max_turn_tokens=3)
    assert counts["turns/limited"] == 2
    assert counts["reward/errors"] == 0
    for one in scored.values():
        assert one.response.turns.tolist() == [1, 1, 1, 0, 0, 2, 2, 2]
        assert one.response.truncated
        assert one.reward > 0


def test_two_agents_are_refused(tmp_path, toy_engine):
    with pytest.raises(RuntimeError, match=r"2 agents of one episode are trained \(agent, other\)"):
        run(tmp_path, toy_engine, {"taskset": {"id": "turns_env"}, "both": True}, n=1)


def test_remote_agents_are_refused(tmp_path, toy_engine):
    settings = {"taskset": {"id": "turns_env"}, "agent": {"runtime": {"type": "prime"}}}
    with pytest.raises(ValueError, match=r"agent\.runtime must run on this machine, got prime"):
        run(tmp_path, toy_engine, settings)


def test_an_unknown_environment_is_named(tmp_path, toy_engine):
    with pytest.raises(ValueError, match=r"cannot be loaded .* 'no_such_env'"):
        run(tmp_path, toy_engine, {"taskset": {"id": "no_such_env"}})


def test_problems_are_the_tasks(tmp_path):
    rollout = RolloutConfig(environment="verifiers:turns_env")
    data = DataConfig(task="verifiers")
    problems = verifiers_problems(Config(model=ModelConfig(path=str(TOY)), data=data, rollout=rollout))
    assert [problem["prompt"] for problem in problems] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert [problem["verifiers_task"] for problem in problems] == [0, 1, 2, 3]
    assert len({problem["answer"] for problem in problems}) == 4
