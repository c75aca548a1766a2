"""Episodes without processes: environments, their page, the calculator, calls in texts, and the row of a trajectory."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from counting_environments import play
from hypothesis import given, settings
from hypothesis import strategies as st
from records import response
from toy_texts import TASKS as TEXTS
from toy_texts import ToyBaseConfig

from rljax.data.toy import ALPHABET, MAX_CALCULATOR_TOKENS, PROMPT_TOKENS, build_tokenizer
from rljax.rollout.episodes.calculator import Calculator
from rljax.rollout.episodes.environment import Reply, find_environment
from rljax.rollout.episodes.tool_calls import ToolCall, parse_tool_calls
from rljax.run.episodes import TokenRecorder
from rljax.tokens import as_stored

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


PROBLEM = {"prompt": "123+456=", "answer": "579"}


TURNS = [
    (["579"], [None], 1.0),
    (["578"], [None], 0.0),
    ([">123+456=", "597"], ["579,", None], 0.0),
    ([">3+6+0=", "09,579"], ["9,", None], 1.0),
    (["123+456=", ">1+2=", "579"], ["579,", "3,", None], 1.0),
    *(([turn], [None], float("579" in turn)) for turn in (">123+=", ">3+6+0=09,579", ">1+=2+3=")),
]


def test_turns_of_the_calculator_by_hand():
    """A turn that was cut off is the last."""
    tokenizer = build_tokenizer()
    for turns, contents, reward in TURNS:
        replies = [Reply(content, content is None) for content in contents]
        assert play(Calculator(), PROBLEM, *turns) == (replies, reward)
        for content in contents[:-1]:
            assert tokenizer.decode(tokenizer.encode(content)) == content
    assert play(Calculator(), PROBLEM, ">123+456=", truncated=True) == ([Reply(None, True)], 0.0)


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


ADD, NOW = ToolCall("add", {"a": 1, "b": 2}), ToolCall("now")
NOT_JSON = "a call is not JSON ({})"
NO_CALL = 'a call must be {"name": ..., "arguments": {...}}'
NO_OBJECT = "the arguments of add must be a JSON object"
NO_TEXT = "the arguments of add are a text that is not JSON"


CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 3.", []),
        (f"<tool_call>\n{CALL}\n</tool_call>", [ADD]),
        ('I add. <tool_call>{"name": "add", "parameters": {"a": 1, "b": 2}}</tool_call> Then', [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [NOW]),
        (f'<tool_call>[{{"name": "now"}}, {CALL}]</tool_call>', [NOW, ADD]),
        (f"<tool_call>{CALL}", [ADD]),
        ('<tool_call>{"name": "now"}<tool_call>{"name": "now"}</tool_call>', [NOW, NOW]),
        ('<think><tool_call>{"name": "now"}</tool_call></think>So 3.', []),
        ('<think>First <tool_call> and so on</think><tool_call>{"name": "now"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', [NOT_JSON.format("Expecting ',' delimiter")]),
        ("<tool_call>", [NOT_JSON.format("Expecting value")]),
        (f"<tool_call>{'9' * 5000}</tool_call>", [NOT_JSON.format("ValueError")]),
        (f"<tool_call>{'[' * 100_000}</tool_call>", [NOT_JSON.format("RecursionError")]),
        (f"<tool_call>{CALL} more</tool_call>", ["there is other text between the JSON of a call and </tool_call>"]),
        ("<tool_call>[]</tool_call>", ["a list of calls is empty"]),
        ("<tool_call>42</tool_call>", [NO_CALL]),
        ('<tool_call>{"name": 5}</tool_call>', [NO_CALL]),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', [NO_OBJECT]),
        ('<tool_call>{"name": "add", "arguments": "[1, 2]"}</tool_call>', [NO_OBJECT]),
        ('<tool_call>{"name": "add", "arguments": 7}</tool_call>', [NO_OBJECT]),
        ('<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>', [NO_TEXT]),
        (f"<tool_call>add(1)</tool_call><tool_call>{CALL}</tool_call>", [NOT_JSON.format("Expecting value"), ADD]),
    ],
)
def test_calls_and_errors_by_hand(text, expected):
    assert [call.error or call for call in parse_tool_calls(text)] == expected


def test_another_tag_and_none():
    """A text among the arguments ends no call."""
    for said in ("</tool_call><tool_call>\n", "</think></think>"):
        call = json.dumps({"name": "say", "arguments": {"text": said}})
        assert parse_tool_calls(f"<think>a</think><tool_call>{call}</tool_call>") == [ToolCall("say", {"text": said})]
    assert parse_tool_calls(f"<use>{CALL}</use>", tag="use") == [ADD]
    assert parse_tool_calls(f"<use>{CALL}</use>") == []
    assert parse_tool_calls(f" {CALL}", tag="") == [ADD]
    assert parse_tool_calls("3", tag="") == []
    assert [bool(found.error) for found in parse_tool_calls("{3", tag="")] == [True]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3)), max_size=4))
def test_whatever_is_written_is_read_back(pairs):
    written = [{"name": name, "arguments": arguments} for name, arguments in pairs]
    text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written)
    if "</think>" not in text:
        assert parse_tool_calls(text) == [ToolCall(name, arguments) for name, arguments in pairs]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='<>/tol_ca{}[]":,aeg1 \n\\', max_size=60))
def test_no_text_raises(text):
    assert all(isinstance(call, ToolCall) for call in parse_tool_calls(f"<tool_call>{text}"))


def turn(tokens, logprobs, versions, **arrays):
    return response((0, 0), tokens, logprobs, versions, **arrays)


def ints(*values):
    return np.asarray(values, np.int32)


def test_turns_and_texts_stand_in_their_order():
    """Versions have no gap where an environment wrote. A trajectory without a turn has no tokens."""
    recorder = TokenRecorder(ints(7, 8))
    assert recorder.tokens().tolist() == [7, 8]
    row = recorder.response(0, 0, truncated=False)
    assert (row.length, row.response.dtype, row.versions.tolist(), row.trained_rows) == (0, np.int32, [], ())
    recorder.add_turn(turn([1, 2], [-0.1, -0.2], [2, 3]))
    recorder.add_text(ints(50, 51, 52))
    assert recorder.tokens().tolist() == [7, 8, 1, 2, 50, 51, 52]
    recorder.add_turn(turn([4], [-0.4], 4))
    recorder.add_turn(turn([5, 6], [-0.5, -0.6], [4, 5]))  # an environment may write nothing
    row = recorder.response(2, 1, truncated=True)
    assert (row.prompt_index, row.sample_index, row.truncated, row.prompt.tolist()) == (2, 1, True, [7, 8])
    assert row.response.tolist() == [1, 2, 50, 51, 52, 4, 5, 6]
    np.testing.assert_array_equal(row["rollout_logprobs"], np.float32([-0.1, -0.2, 0, 0, 0, -0.4, -0.5, -0.6]))
    assert row.turns.tolist() == [1, 1, 0, 0, 0, 2, 3, 3]
    assert (row.length, recorder.count, recorder.turn) == (5, 8, 3)
    assert row["version"].tolist() == [2, 3, 3, 3, 3, 4, 4, 5]
    assert set(row.columns) == {"rollout_logprobs", "version", "turn"}


def test_likeliest_tokens_and_routes_stay_with_their_tokens():
    def arrays(*ids, count, first):
        routes = as_stored(np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1))
        return {"top_ids": ids, "top_logprobs": -np.asarray(ids), "routes": routes}

    recorder = TokenRecorder(ints(7, 8))
    # Two tokens of prompt and two of response have three routes. The second turn's reply has six routes, from its own
    # pass.
    recorder.add_turn(turn([1, 2], [0, 0], 0, prompt=[7, 8], **arrays([1, 3], [2, 4], count=3, first=10)))
    recorder.add_text(ints(50, 51))
    recorder.add_turn(turn([5], [0], 0, prompt=recorder.tokens(), **arrays([5, 6], count=6, first=20)))
    row = recorder.response(0, 0, truncated=False)
    # The last token of the first turn went through the layers in the second turn's pass.
    assert row.columns["routes"].ravel().tolist() == [11, 12, 13, 24, 25, 26, 0]
    assert row["top_ids"].tolist() == [[1, 3], [2, 4], [-1, -1], [-1, -1], [5, 6]]
    assert row["top_logprobs"].tolist() == [[-1, -3], [-2, -4], [-np.inf] * 2, [-np.inf] * 2, [-5, -6]]
