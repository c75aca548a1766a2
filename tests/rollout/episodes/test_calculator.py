"""Tests of the calculator: a call by hand, turns that are no call, and demonstrations that it takes unchanged."""

import numpy as np
import pytest
from counting_environments import play
from toy_texts import TASKS as TEXTS
from toy_texts import ToyBaseConfig

from rljax.data.prompts import TOYS, DataConfig, training_problems
from rljax.data.toy import ALPHABET, MAX_CALCULATOR_TOKENS, PROMPT_TOKENS, build_tokenizer
from rljax.rollout.episodes.calculator import Calculator
from rljax.rollout.episodes.environment import Reply, find_environment

PATH = "rljax.rollout.episodes.calculator:Calculator"
PROBLEM = {"prompt": "123+456=", "answer": "579"}


@pytest.mark.parametrize(
    ("turns", "contents", "reward"),
    [
        (["579"], [None], 1.0),
        (["578"], [None], 0.0),
        ([">123+456=", "579"], ["579,", None], 1.0),
        ([">123+456=", "597"], ["579,", None], 0.0),
        ([">3+6+0=", "09,579"], ["9,", None], 1.0),
        (["123+456=", ">1+2=", "579"], ["579,", "3,", None], 1.0),
        ([">123+="], [None], 0.0),
        ([">3+6+0=09,579"], [None], 1.0),
        ([">1+=2+3="], [None], 0.0),
    ],
)
def test_turns_by_hand(turns, contents, reward):
    replies, got = play(Calculator(), PROBLEM, *turns)
    assert replies == [Reply(content, content is None) for content in contents]
    assert got == reward
    tokenizer = build_tokenizer()
    for content in contents[:-1]:
        assert tokenizer.decode(tokenizer.encode(content)) == content


def test_a_turn_that_was_cut_off_is_the_last():
    assert play(Calculator(), PROBLEM, ">123+456=", truncated=True) == ([Reply(None, True)], 0.0)


def test_the_task_names_its_problems():
    config = DataConfig(task="calculator")
    assert config.reward_name == "addition"
    assert training_problems(config)[7] == training_problems(DataConfig(task="toy"))[7]
    assert TOYS["calculator"].max_response_tokens == 35
    assert find_environment(PATH) is Calculator


def test_demonstrations_are_trajectories_of_the_environment():
    config = ToyBaseConfig(batch_size=400, practice_rate=0.5, wrong_digit_rate=0.0, wrong_direct_rate=0.0)
    tokens, lengths = TEXTS["calculator"].sample_batch(np.random.default_rng(0), config, settled=False)
    texts = ["".join(ALPHABET[i] for i in row[:n]) for row, n in zip(tokens, lengths, strict=True)]
    calls = [text for text in texts if ">" in text]
    assert 150 < len(calls) < 250
    assert max(lengths) <= PROMPT_TOKENS + MAX_CALCULATOR_TOKENS
    for text in calls[:20]:
        prompt, response = text.split("=", 1)
        a, b = (int(number) for number in prompt.split("+"))
        assert response == f">{a}+{b}=${a + b},{a + b}$"
