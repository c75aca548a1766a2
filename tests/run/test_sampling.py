"""Tests of the host's side of a step: its counts, its watch for missed stops, and its seeds."""

import dataclasses
import functools
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from records import response

from rljax.algorithms.advantages import AdvantageConfig
from rljax.data.prompts import PromptStream
from rljax.data.toy import build_tokenizer
from rljax.errors import ServersLostError
from rljax.rollout.engine import Samples
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config
from rljax.run.sampling import (
    Rollouts,
    Sampler,
    SingleTurn,
    count_missed_stops,
    mixed_fraction,
    rollout_row,
    step_seed,
    training_sequences,
)
from rljax.tokens import common_columns

PROMPTS = [np.array([9, 9], np.int32), np.array([8], np.int32)]


@pytest.fixture
def rollouts():
    def one(i, j, tokens, version=3, **facts):
        return response((i, j), tokens, version=version, prompt=PROMPTS[i], **facts)

    responses = [
        [one(0, 0, [5, 1]), one(0, 1, [5, 6, 7, 8], truncated=True)],
        [one(1, 0, [1]), one(1, 1, [2, 2, 1], version=[2, 3, 3])],
    ]
    return Rollouts(responses, np.array([[1, 0], [1, 1]], np.float32))


def test_rollout_row_by_hand(rollouts):
    assert rollout_row(rollouts, policy_version=3) == {
        "reward/mean": 0.75,
        "reward/std": pytest.approx(math.sqrt(0.1875)),
        "reward/groups_with_signal": 0.5,
        "response_length/mean": 2.5,
        "response_length/max": 4.0,
        "response_length/truncated_fraction": 0.25,
        "rollout/policy_version": 2,
        "rollout/staleness": 0.25,
    }
    assert mixed_fraction(rollouts) == 0.25  # one of four is of two versions
    # Groups without signal are measured, but carry no loss.
    sequences = training_sequences(rollouts, Config(), policy_version=4)
    assert [s.in_loss for s in sequences] == [True, True, False, False]
    assert [s.advantage for s in sequences] == [1.0, -1.0, 0.0, 0.0]
    assert [s.response.tolist() for s in sequences] == [[5, 1], [5, 6, 7, 8], [1], [2, 2, 1]]
    assert [s.prompt.tolist() for s in sequences] == [[9, 9], [9, 9], [8], [8]]
    assert [s["staleness"].tolist() for s in sequences] == [[1, 1], [1, 1, 1, 1], [1], [2, 1, 1]]


def test_a_stop_token_counts_where_sampling_went_on(rollouts):
    def fraction(stop):
        metrics = {}
        assert list(count_missed_stops(rollouts.all(), stop, metrics)) == rollouts.all()
        return metrics["response_length/missed_stop_fraction"]

    assert fraction(1) == 0.0  # token 1 ends three responses
    assert fraction(2) == 0.25
    assert fraction(8) == 0.25  # the last token of a response that the limit cut off
    assert fraction(5) == 0.5


def test_steps_rounds_and_runs_have_seeds_of_their_own():
    seeds = [step_seed(run, step) for run in range(20) for step in range(500)]
    seeds += [step_seed(5, step, number) for step in range(100) for number in range(1, 5)]
    assert len(set(seeds)) == len(seeds)
    assert step_seed(3, 7) == step_seed(3, 7, 0)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_the_likeliest_tokens_come_to_the_trainer_where_asked(rollouts):
    def with_tops(each):
        shape = (each.length, 2)
        return each.add({"top_ids": np.full(shape, each.prompt_index), "top_logprobs": np.full(shape, -0.5)})

    config = Config(rollout=RolloutConfig(top_logprobs=2))
    told = dataclasses.replace(rollouts, responses=[[with_tops(one) for one in group] for group in rollouts.responses])
    sequences = training_sequences(told, config, policy_version=4)
    assert [s["top_ids"].tolist() for s in sequences] == [[[0, 0]] * 2, [[0, 0]] * 4, [[1, 1]], [[1, 1]] * 3]
    assert [s["top_logprobs"].tolist() for s in sequences] == [[[-0.5, -0.5]] * n for n in (2, 4, 1, 3)]
    assert "top_ids" not in common_columns(training_sequences(told, Config(), policy_version=4))
    told.responses[1][0] = rollouts.responses[1][0]
    with pytest.raises(RuntimeError, match="reported no likeliest tokens for 1 of 4 responses"):
        training_sequences(told, config, policy_version=4)


def trajectory(i, j, turns, *, further=(), prompt=(9, 9)):
    logprobs = np.where(np.asarray(turns) > 0, -0.5, 0.0)
    tokens = np.arange(10, 10 + len(turns))
    return response((i, j), tokens, logprobs, 3, prompt=prompt, further=further, turn=turns)


def test_all_rows_of_a_trajectory_have_its_advantage():
    again = trajectory(0, 1, [2], prompt=[9, 9, 4])
    group = [trajectory(0, 0, [1, 0, 2]), trajectory(0, 1, [1, 1], further=(again,)), trajectory(0, 2, [1])]
    rollouts = Rollouts([group], np.array([[1, 0, np.nan]], np.float32))
    row = rollout_row(rollouts, policy_version=3)
    assert (row["reward/mean"], row["reward/std"], row["response_length/mean"]) == (0.5, 0.5, 2.0)
    sequences = training_sequences(rollouts, Config(), policy_version=3)
    assert [s.advantage for s in sequences] == [1.0, -1.0, -1.0, 0.0]
    assert [s.in_loss for s in sequences] == [True, True, True, False]
    assert [s.trajectory for s in sequences] == [0, 1, 1, 2]
    assert [s.prompt.tolist() for s in sequences] == [[9, 9], [9, 9], [9, 9, 4], [9, 9]]
    assert sequences[0].sampled.tolist() == [True, False, True]
    assert [s["turn"].tolist() for s in sequences] == [[1, 0, 2], [1, 1], [2], [1]]
    # The limit counts the tokens of a row.
    group = [trajectory(0, 0, [1, 0, 2]), trajectory(0, 1, [1, 1], further=(trajectory(0, 1, [2, 2]),))]
    advantage = AdvantageConfig(overlong_buffer_tokens=2, overlong_factor=2.0)
    config = Config(rollout=RolloutConfig(max_response_tokens=4), advantage=advantage)
    sequences = training_sequences(Rollouts([group], np.ones((1, 2), np.float32)), config, policy_version=3)
    assert [s.advantage for s in sequences] == [-1.0, 1.0, 1.0]


def longer_is_sooner(problem, response, truncated):
    time.sleep(0.05 / len(response))
    return float(problem["answer"]) * len(response)


PROBLEMS = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(1, 5)]


class Landing:
    """An engine whose response j to any prompt has j + 1 tokens. A seed decides the order of the responses."""

    def __init__(self, seed, missing=0, error=None):
        self.seed, self.missing, self.error = seed, missing, error

    def generate(self, prompts, n, sampling, *, seed):
        self.prompts = prompts
        return Samples(self.respond(prompts, n))

    def respond(self, prompts, n):
        places = [(i, j) for i in range(len(prompts)) for j in range(n)]
        for k in np.random.default_rng(self.seed).permutation(len(places))[self.missing :]:
            i, j = places[k]
            yield response((i, j), [3] * (j + 1), version=0, prompt=prompts[i])
        if self.error:
            raise self.error


def sample(engine, rewards):
    problems = PromptStream(PROBLEMS, 4, seed=0).take()
    sampling = SamplingParams(8, 1.0, (14,))
    return Sampler(SingleTurn(engine, build_tokenizer(), rewards), sampling, 3).sample(problems, 1)


def test_rewards_stand_where_their_responses_do():
    """A longer response is scored sooner, and one that never lands is an error."""
    engine = Landing(0)
    with ThreadPoolExecutor(3) as threads:
        submit = functools.partial(threads.submit, longer_is_sooner)
        rewards = SimpleNamespace(submit=submit, pop_metrics=lambda: {"reward/errors": 0})
        rollouts = sample(engine, rewards)
        with pytest.raises(RuntimeError, match="the engine returned 11 responses, expected 12"):
            sample(Landing(1, missing=1), rewards)
    answers = [int(build_tokenizer().decode(prompt)[0]) for prompt in engine.prompts]
    assert sorted(answers) == [1, 2, 3, 4]
    np.testing.assert_array_equal(rollouts.rewards, np.outer(answers, [1, 2, 3]).astype(np.float32))
    assert rollouts.rewards.dtype == np.float32
    assert [[r.length for r in group] for group in rollouts.responses] == [[1, 2, 3]] * 4


def test_a_lost_batch_leaves_neither_counts_nor_rewards():
    """The first of two responses fails, and the second waits for its reward, when the servers are lost."""
    futures, failed = [], []

    def submit(*response):
        futures.append(Future())
        if len(futures) != 2:
            failed.append(futures[-1])
            futures[-1].set_result(0.0)
        return futures[-1]

    def pop_metrics():
        counts = {"reward/errors": len(failed)}
        failed.clear()
        return counts

    rewards = SimpleNamespace(submit=submit, pop_metrics=pop_metrics)
    with pytest.raises(ServersLostError):
        sample(Landing(0, missing=10, error=ServersLostError("none is left")), rewards)
    assert futures[1].cancelled()
    assert sample(Landing(0), rewards).row["reward/error_fraction"] == 1.0
