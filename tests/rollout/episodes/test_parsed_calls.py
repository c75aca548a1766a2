"""Calls of tools are read from the texts of models, and a broken one is an error value, never an exception."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.rollout.episodes.tool_calls import ToolCall, parse_tool_calls

ADD, NOW = ToolCall("add", {"a": 1, "b": 2}), ToolCall("now")
NOT_JSON = "a call is not JSON ({})"
NO_CALL = 'a call must be {"name": ..., "arguments": {...}}'
NO_OBJECT = "the arguments of add must be a JSON object"


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
        ('<tool_call>{"name": 5}</tool_call>', [NO_CALL]),
        ('<tool_call>{"name": "add", "arguments": "[1, 2]"}</tool_call>', [NO_OBJECT]),
        ('<tool_call>{"name": "add", "arguments": 7}</tool_call>', [NO_OBJECT]),
        (
            '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>',
            ["the arguments of add are a text that is not JSON"],
        ),
        (f"<tool_call>add(1)</tool_call><tool_call>{CALL}</tool_call>", [NOT_JSON.format("Expecting value"), ADD]),
    ],
)
def test_calls_and_errors_by_hand(text, expected):
    assert [call.error or call for call in parse_tool_calls(text)] == expected


@pytest.mark.parametrize("said", ["</tool_call><tool_call>\n", "</think></think>"])
def test_a_text_among_the_arguments_ends_no_call(said):
    call = json.dumps({"name": "say", "arguments": {"text": said}})
    assert parse_tool_calls(f"<think>a</think><tool_call>{call}</tool_call>") == [ToolCall("say", {"text": said})]


def test_another_tag_and_none():
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
