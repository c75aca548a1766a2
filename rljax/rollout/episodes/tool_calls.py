"""Reads the calls of tools in a text of the policy: JSON between tags, as Qwen, Hermes and other models write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rljax.rollout.episodes.tools import ToolArguments

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str = ""  # the name of the tool; "" if it cannot be read
    arguments: ToolArguments = field(default_factory=dict)  # the arguments, as a mapping of names or as a list
    error: str = ""  # a line that says why the call cannot be read; "" if it can


def parse_tool_calls(text: str, tag: str = "tool_call") -> list[ToolCall]:
    """Returns the calls in the text of a turn, in their order. A call that cannot be read has an ``error``.

    A call is ``<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>``. The arguments may be called
    ``parameters``, may be a string that holds JSON, and may be left out. Several calls may stand in a JSON list, or
    each in its own tags. The last closing tag may be missing, because an engine may stop at it. Text up to the last
    ``</think>`` is ignored. If the word ``tag`` is "", the whole text is the JSON, without tags.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    before, _, after = text.rpartition("</think>")
    # The word may stand inside a call, whose tags are then on both sides of it.
    while tag and before.rfind(opening) > before.rfind(closing) and closing in after.partition(opening)[0]:
        before, _, _ = before.rpartition("</think>")
        after = text[len(before) :].removeprefix("</think>")
    text = after
    if not tag:
        return list(_calls(text)[0]) if text.strip().startswith(("{", "[")) else []
    calls: list[ToolCall] = []
    start = text.find(opening)
    while start >= 0:
        start += len(opening)
        found, end = _calls(text[start:])
        rest = text[start + end :].lstrip()
        if not found[0].error and rest and not rest.startswith((closing, opening)):
            found = [ToolCall(error=f"there is other text between the JSON of a call and {closing}")]
        calls += found
        start = text.find(opening, start + end)
    return calls


def _calls(text: str) -> tuple[list[ToolCall], int]:
    """Returns the calls in the JSON at the beginning of a text, and the index at which the JSON ends."""
    blank = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, blank)
    except (ValueError, RecursionError) as error:
        # A ValueError that is not about JSON is about a number with thousands of digits.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return [ToolCall(error=f"a call is not JSON ({reason})")], blank
    listed = value if isinstance(value, list) else [value]
    return list(_read(listed)) or [ToolCall(error="a list of calls is empty")], end


def _read(values: list[Any]) -> Iterator[ToolCall]:
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            yield ToolCall(error='a call must be {"name": ..., "arguments": {...}}')
            continue
        arguments = value.get("arguments", value.get("parameters")) or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False) or {}
            except (ValueError, RecursionError):
                yield ToolCall(value["name"], error=f"the arguments of {value['name']} are a text that is not JSON")
                continue
        if isinstance(arguments, dict):
            yield ToolCall(value["name"], arguments)
        else:
            yield ToolCall(value["name"], error=f"the arguments of {value['name']} must be a JSON object")
