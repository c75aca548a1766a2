"""The environment of the toy task "calculator": a turn that ends in ``123+456=`` calls a tool that adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rljax.data import toy
from rljax.rollout.episodes.environment import Content
from rljax.rollout.episodes.tool_calls import ToolCall
from rljax.rollout.episodes.tool_environment import ToolEnvironment
from rljax.rollout.episodes.tools import ToolResult

_CALL = re.compile(r"(?:^|>)(\d{1,9}(?:\+\d{1,9})+)=$")


class Calculator(ToolEnvironment):
    """A calculator for ``data.task: calculator``. The policy reads a result as a text, such as ``579,``."""

    tools: ClassVar = {"add": f"{toy.__name__}:{toy.add.__name__}"}
    scored_by: ClassVar = "addition"

    def parse(self, response: str) -> Sequence[ToolCall]:
        """Returns the call at the end of a turn, or no call.

        A call is a sum such as ``123+456=``, behind a ``>`` or at the beginning of the turn.
        """
        found = _CALL.search(response)
        return [ToolCall("add", [int(number) for number in found[1].split("+")])] if found else []

    def write(self, results: Sequence[ToolResult]) -> Content:
        """Returns the text of the only result."""
        return results[0].text
