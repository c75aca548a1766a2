"""The code of the page on environments does what the page says."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from counting_environments import play

from rljax.rollout.episodes.environment import Reply, find_environment

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Yields the name of a module with all code blocks of the page, except the block that starts processes."""
    code = "\n".join(block for block in BLOCKS if "__main__" not in block)
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_tools"
    sys.modules.pop("my_tools", None)


def test_the_classes_of_the_page_answer_as_it_says(page):
    guess, short, calculator = (
        find_environment(f"{page}:{name}") for name in ("GuessNumber", "ShortCalculator", "Calculator")
    )
    problem = {"prompt": "Guess.", "answer": "7"}
    assert play(guess(), problem, "I say 3", "I say 7") == ([Reply("\nToo low.\n"), Reply(done=True)], 1.0)
    replies, score = play(short(), problem, "so [3+4]", "Answer: 7")
    assert (replies, score) == ([Reply("7"), Reply(done=True)], 1.0)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 123, "b": 456}}\n</tool_call>'
    replies, score = play(calculator(), {"answer": "579"}, call, "Answer: 579")
    assert replies == [Reply([{"role": "tool", "content": "579"}]), Reply(done=True)]
    assert score == 1.0


def test_the_tool_of_the_page_adds(page):
    names = {}
    exec((BLOCKS[2]), names)
    assert asyncio.run(names["ask_calculator"](1, 2)) == "3"


def test_the_block_with_processes_prints_what_it_says(page, monkeypatch, capsys):
    """Each call of ``print`` prints the text that the page writes behind it."""
    block = BLOCKS[1].replace("my_environments", page)
    exec(block, {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", block)
