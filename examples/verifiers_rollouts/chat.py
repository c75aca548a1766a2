"""The chat loop of an agent, in the process of ``verifiers`` itself: no program is started for a trajectory.

The loop asks the policy and calls the tools that its answer names. It ends with an answer that names no tool.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content

TOOLS = "rljax_tools"
"""The key of ``Trace.info`` under which the loop counts the calls, errors and timeouts of its tools."""

FULL = "maximum context length"
"""The words by which the shim refuses a turn for which no token is left. ``verifiers`` looks for them, too."""


class ChatHarnessConfig(vf.HarnessConfig):
    """The settings of the loop. They are the settings of every harness."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """The harness that runs an agent's chat loop."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        """Runs the loop to its end.

        The result has exit code 1, and the server's words, if the server refused to answer a turn. A trajectory without
        room for a further turn ends with exit code 0.
        """
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            unlimited = aiohttp.ClientTimeout(total=None)
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=unlimited))
            servers = {
                name: {"url": url, "timeout": 2 * self.config.tool_timeout, "connect_timeout": 5.0}
                for name, url in mcp_urls.items()
            }
            tools = _Tools(self.config.tool_timeout, trace.info.setdefault(TOOLS, {}))
            if servers:
                tools.schemas, tools.places, tools.servers = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools.schemas} if servers else {})
                keys = {"Authorization": f"Bearer {secret}"}
                async with http.post(f"{endpoint}/chat/completions", json=body, headers=keys) as reply:
                    text = await reply.text()
                if reply.status == 400 and FULL in text:
                    break
                if reply.status != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=text)
                message = json.loads(text)["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    content = await tools.call(call["function"]["name"], call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class _Tools:
    def __init__(self, timeout_s: float, counts: dict[str, int]) -> None:
        self.schemas: list[Any] = []
        self.places: dict[str, tuple[str, str]] = {}
        self.servers: dict[str, Any] = {}
        self._timeout_s, self._counts = timeout_s, counts

    async def call(self, name: str, arguments: str) -> Any:
        """Returns the result of a call, or a text that says what went wrong with it."""
        self._count("calls")
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = None
        if name not in self.places or not isinstance(given, dict):
            self._count("errors")
            known = "the arguments are no JSON object" if name in self.places else f"there is no tool {name!r}"
            return f"error: {known}"
        server, tool = self.places[name]
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self.servers[server].run(lambda client: client.call_tool(tool, given))
        except TimeoutError:
            self._count("timeouts")
            return f"error: the tool gave no answer within {self._timeout_s:g} s"
        except Exception as error:  # a tool's server may fail in any way
            self._count("errors")
            return f"error: the tool failed ({type(error).__name__})"
        if getattr(result, "is_error", False):
            self._count("errors")
        return mcp_content_to_chat_content(result.content)

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1


__all__ = ["ChatHarness"]
