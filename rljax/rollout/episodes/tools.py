"""Tools of environments: plain functions that run in processes of their own, with limits of time, memory and output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from rljax.rollout.episodes.tool_worker import Arguments, run_function

ToolFailure = Literal["error", "timeout", "died"]
_CHARS = 16384


@dataclass(frozen=True)
class ToolResult:
    """The result of one call of a tool.

    Attributes:
      text: The result as text, or a text ``error: ...`` that says what went wrong.
      failure: The kind of failure. error: the tool raised, or could not be imported. timeout: it took too long. died:
        its process crashed or ran out of memory. None: it did not fail.
      cut: Whether the result was longer than the limit and was cut there.
    """

    text: str
    failure: ToolFailure | None = None
    cut: bool = False


Runner = Callable[[str, Arguments, bool], Awaitable[ToolResult]]
_runner: Runner | None = None
_count_refused: Callable[[], None] | None = None


async def call_tool(path: str, arguments: Arguments, *, counted: bool = True) -> ToolResult:
    """Calls a tool, a plain function ``package.module:function``, and returns its result as text.

    In a run the function is called in a process of its own. The time that the call waits for a free process does not
    count as time of the environment. Outside a run, as in a test of an environment, it is called in this process,
    without limits of time and memory.

    Args:
      path: The name of the function.
      arguments: The arguments, as a mapping of names or as a list. They must be values that can be pickled.
      counted: Whether the call counts in the metrics ``turns/tool_*``.

    Returns:
      The result. A tool that fails gives a result with a ``failure``, and no error is raised.
    """
    if _runner is not None:
        return await _runner(path, arguments, counted)
    text, cut, raised = run_function(path, arguments, _CHARS)
    return ToolResult(f"error: {text}" if raised else text, "error" if raised else None, cut)


def refuse_call(reason: str) -> ToolResult:
    """Returns the result of a call that cannot be made, such as one of an unknown tool, and counts it as an error."""
    if _count_refused is not None:
        _count_refused()
    return ToolResult(f"error: {reason}", "error")


def run_calls_by(runner: Runner, count_refused: Callable[[], None]) -> None:
    """Sets the function that runs the tools of this process, and the function that counts refused calls.

    Args:
      runner: An async function of path, arguments and ``counted`` that returns the result of a call.
      count_refused: A function that ``refuse_call`` calls once for each refused call.
    """
    global _runner, _count_refused
    _runner, _count_refused = runner, count_refused
