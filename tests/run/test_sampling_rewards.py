"""A step's rewards stand at the places of their responses, in whatever order responses arrive and are scored."""

import sys

import numpy as np
import pytest
from records import response

from rljax.data.prompts import PromptStream
from rljax.data.toy import build_tokenizer
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import Samples
from rljax.rollout.types import SamplingParams
from rljax.run.sampling import Sampler
from rljax.run.single_turn import SingleTurn

# A longer response is scored sooner.
REWARD = """
import time

def reward(problem, response, truncated):
    time.sleep(0.05 / len(response))
    return float(problem["answer"]) * len(response)
"""
PROBLEMS = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(1, 5)]


class Landing:
    """An engine whose response j to any prompt has j + 1 tokens. A seed decides the order of the responses."""

    def __init__(self, seed, missing=0):
        self.seed, self.missing, self.prompts = seed, missing, None

    def generate(self, prompts, n, sampling, *, seed):
        self.prompts = prompts
        return Samples(self.respond(prompts, n))

    def respond(self, prompts, n):
        places = [(i, j) for i in range(len(prompts)) for j in range(n)]
        for k in np.random.default_rng(self.seed).permutation(len(places))[self.missing :]:
            i, j = places[k]
            yield response((i, j), [3] * (j + 1), version=0, prompt=prompts[i])


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "slow_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool("slow_reward:reward", 3) as made:
        yield made
    sys.modules.pop("slow_reward", None)


def sample(engine, pool):
    problems = PromptStream(PROBLEMS, 4, seed=0).next_batch()
    sampling = SamplingParams(8, 1.0, (14,))
    return Sampler(SingleTurn(engine, build_tokenizer(), pool), sampling, 3).sample(problems, 1).rollouts


@pytest.mark.parametrize("seed", range(2))
def test_rewards_stand_where_their_responses_do(seed, pool):
    engine = Landing(seed)
    rollouts = sample(engine, pool)
    answers = [int(build_tokenizer().decode(prompt)[0]) for prompt in engine.prompts]
    assert sorted(answers) == [1, 2, 3, 4]
    np.testing.assert_array_equal(rollouts.rewards, np.outer(answers, [1, 2, 3]).astype(np.float32))
    assert rollouts.rewards.dtype == np.float32
    assert [[r.length for r in group] for group in rollouts.responses] == [[1, 2, 3]] * 4


def test_a_response_that_never_lands_is_an_error(pool):
    with pytest.raises(RuntimeError, match="the engine returned 11 responses, expected 12"):
        sample(Landing(0, missing=1), pool)
