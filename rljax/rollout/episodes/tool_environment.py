"""A ready environment with tools: it reads calls, runs them, and scores the final answer by a reward's name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rljax.rewards.resolve import CHEAP, resolve_reward
from rljax.rollout.episodes.environment import Content, Reply
from rljax.rollout.episodes.tool_calls import ToolCall, parse_tool_calls
from rljax.rollout.episodes.tools import REWARD, ToolResult, call_tool, refuse_call


class ToolEnvironment:
    """An environment whose policy calls tools until it answers without a call; subclasses name the tools.

    A turn with calls is answered by one message of role ``tool`` for each, in their order. A turn without a call, or a
    turn that was cut off, is the final answer. Override ``reset`` for another prompt, ``parse`` for another form of
    calls, ``write`` for another form of replies, and ``reward`` for another score.

    Attributes:
      tools: A mapping of the names that the policy uses to functions, as for ``call_tool``.
      tag: The word in the tags around a call; see ``parse_tool_calls``.
      scored_by: The name of the reward that scores the final answer, as for ``data.reward``.
      max_calls: The most calls of one turn. Further calls are answered by an error.
    """

    tools: ClassVar[Mapping[str, str]] = {}
    tag: ClassVar[str] = "tool_call"
    scored_by: ClassVar[str] = "math"
    max_calls: ClassVar[int] = 16

    async def reset(self, problem: Mapping[str, Any]) -> Content:
        """Keeps the problem, and returns None, which stands for the problem's own prompt."""
        self.problem, self.answer, self.truncated = problem, "", False
        return None

    async def step(self, response: str, truncated: bool) -> Reply:
        """Runs the calls of a turn side by side. A turn without calls becomes the final answer."""
        self.answer, self.truncated = response, truncated
        calls = [] if truncated else self.parse(response)
        if not calls:
            return Reply(done=True)
        results = await asyncio.gather(*(self._run(place, call) for place, call in enumerate(calls)))
        return Reply(self.write(results))

    async def reward(self) -> float:
        """Scores the last turn by the reward ``scored_by``, in a process for tools unless the reward is in ``CHEAP``.

        Raises RuntimeError if the reward fails in that process.
        """
        arguments = (dict(self.problem), self.answer, self.truncated)
        if self.scored_by in CHEAP:
            return resolve_reward(self.scored_by)(*arguments)
        result = await call_tool(f"{REWARD}{self.scored_by}", arguments, counted=False)
        if result.failure is not None:
            raise RuntimeError(result.text)
        return float(result.text)

    def parse(self, response: str) -> Sequence[ToolCall]:
        """Returns the calls in the text of a turn."""
        return parse_tool_calls(response, self.tag)

    def write(self, results: Sequence[ToolResult]) -> Content:
        """Returns the messages by which the policy reads the results of its calls, of role ``tool``."""
        return [{"role": "tool", "content": result.text} for result in results]

    async def _run(self, place: int, call: ToolCall) -> ToolResult:
        if place >= self.max_calls:
            return refuse_call(f"more than {self.max_calls} calls in one turn")
        if call.error:
            return refuse_call(call.error)
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            return refuse_call(f"there is no tool {call.name[:100]!r}, only {known}")
        return await call_tool(self.tools[call.name], call.arguments)
