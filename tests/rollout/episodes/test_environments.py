"""Environments in this process: found by name or refused in one line, as on their page, and the calculator."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
from played_episodes import play
from toy_texts import TASKS as TEXTS
from toy_texts import ToyBaseConfig

from rljax.data.prompts import TOYS, DataConfig, training_problems
from rljax.data.toy import ALPHABET, MAX_CALCULATOR_TOKENS, PROMPT_TOKENS, build_tokenizer
from rljax.rollout.episodes.calculator import Calculator
from rljax.rollout.episodes.environment import Reply, find_environment

MODULE = """
class Good:
    async def reset(self, problem): ...
    async def step(self, response, truncated): ...
    async def reward(self): ...
class Heir(Good):
    def __init__(self, depth=3): ...
    async def step(self, response, truncated=False, *more): ...
class Plain(Good):
    def step(self, response, truncated): ...
class Short(Good):
    async def step(self, response): ...
class Unscored:
    reset, step = Good.reset, Good.step
class Needy(Good):
    def __init__(self, depth): ...
def function(): ...
"""
REFUSED = {
    "Missing": "cannot be imported: AttributeError: .* has no attribute 'Missing'",
    "function": "environment 'named_environments:function' is function, not a class",
    "Plain": r"has no method 'async def step\(self, response, truncated\)'",
    "Unscored": r"has no method 'async def reward\(self\)'",
    "Short": r"must be step\(self, response, truncated\), but it takes \(self, response\)",
    "Needy": r"must be made without arguments, but Needy\(\) needs some",
}
PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Writes a module of environments, and one with all code blocks of the page that start no processes."""
    (tmp_path / "named_environments.py").write_text(MODULE)
    (tmp_path / "my_tools.py").write_text("\n".join(block for block in BLOCKS if "__main__" not in block))
    monkeypatch.syspath_prepend(tmp_path)


def test_a_class_with_three_async_methods_is_found():
    for name in ("Good", "Heir"):
        assert find_environment(f"named_environments:{name}").__name__ == name
    for name, message in REFUSED.items():
        with pytest.raises(ValueError, match=f"^.*{message}.*$"):
            find_environment(f"named_environments:{name}")


def test_the_classes_of_the_page_answer_as_it_says():
    guess, short, calculator = (
        find_environment(f"my_tools:{name}") for name in ("GuessNumber", "ShortCalculator", "Calculator")
    )
    problem = {"prompt": "Guess.", "answer": "7"}
    assert play(guess(), problem, "I say 3", "I say 7") == ([Reply("\nToo low.\n"), Reply(done=True)], 1.0)
    replies, score = play(short(), problem, "so [3+4]", "Answer: 7")
    assert (replies, score) == ([Reply("7"), Reply(done=True)], 1.0)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 123, "b": 456}}\n</tool_call>'
    replies, score = play(calculator(), {"answer": "579"}, call, "Answer: 579")
    assert replies == [Reply([{"role": "tool", "content": "579"}]), Reply(done=True)]
    assert score == 1.0
    names = {}
    exec((BLOCKS[2]), names)
    assert asyncio.run(names["ask_calculator"](1, 2)) == "3"


def test_the_block_with_processes_prints_what_it_says(capsys):
    """Each call of ``print`` prints the text that the page writes behind it."""
    block = BLOCKS[1].replace("my_environments", "my_tools")
    exec(block, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", block)


# ---- The calculator ----

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
    assert find_environment("rljax.rollout.episodes.calculator:Calculator") is Calculator


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
