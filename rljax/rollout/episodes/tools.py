"""Tools of environments: plain functions that run in processes of their own, with limits of time, memory and output.

:func:`run_tools` is the program of each process. It calls functions of any module, one at a time, without jax.
"""

from __future__ import annotations

import functools
import inspect
import json
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rljax import user_code
from rljax.distributed.answering import answer_requests
from rljax.distributed.child import LONGEST, Child, ChildPool, Decoder, LostError
from rljax.distributed.frames import Frames
from rljax.errors import describe, printable
from rljax.rewards.resolve import resolve_reward
from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.outcomes import UTF8_BYTES, ToolFailure, clip

_IMPORT_S = 60.0
REWARD = "reward "
"""The prefix of the name of a reward that is called like a tool. Its import has a time limit of its own."""
_reward = functools.cache(resolve_reward)
_SHOWN = 320  # characters of the text of a failure
ToolArguments = Mapping[str, Any] | Sequence[Any]
"""The arguments of a tool: a mapping of names, or a sequence of values in their order."""


@dataclass(frozen=True)
class ToolResult:
    """The result of one call of a tool as text, or a text ``error: ...`` that says what went wrong.

    Attributes:
      failure: The kind of failure. error: the tool raised, or could not be imported. timeout: it took too long. died:
        its process crashed or ran out of memory. None: it did not fail.
      cut: Whether the result was longer than the limit and was cut there.
    """

    text: str
    failure: ToolFailure | None = None
    cut: bool = False


Runner = Callable[[str, ToolArguments, bool], Awaitable[ToolResult]]
_runner: Runner | None = None
_count_refused: Callable[[], None] | None = None


async def call_tool(path: str, arguments: ToolArguments, *, counted: bool = True) -> ToolResult:
    """Calls a tool, a plain function, and returns its result as text.

    ``path`` is its name: ``package.module:function`` or ``FILE.py:function``.

    In a run the function is called in a process of its own. The time that the call waits for a free process does not
    count as time of the environment. Outside a run, as in a test of an environment, it is called in this process,
    without limits of time and memory. A tool that fails gives a result with a ``failure``, and no error is raised.

    Args:
      arguments: The arguments, as a mapping of names or as a list. They must be values that can be pickled.
      counted: Whether the call counts in the metrics ``turns/tool_*``.
    """
    if _runner is not None:
        return await _runner(path, arguments, counted)
    return run_function(path, arguments)


def refuse_call(reason: str) -> ToolResult:
    """Returns the result of a call that cannot be made, such as one of an unknown tool, and counts it as an error."""
    if _count_refused is not None:
        _count_refused()
    return ToolResult(f"error: {reason}", "error")


def run_calls_by(runner: Runner, count_refused: Callable[[], None]) -> None:
    """Sets the async function that runs the tools of this process. It takes path, arguments and ``counted``.

    ``refuse_call`` calls ``count_refused`` once for each refused call.
    """
    global _runner, _count_refused
    _runner, _count_refused = runner, count_refused


def run_tools(frames: Frames) -> None:
    """Answers the requests of ``run_in`` in a child process. A request holds the arguments of ``run_function``."""
    answer_requests(frames, run_function)


def run_function(path: str, arguments: ToolArguments | bytes) -> ToolResult:
    """Calls the function ``path`` and returns its result as a text of at most ``MAX_REPLY_CHARS``.

    Arguments in bytes are a pickle. With no bytes the function is only imported, and the text is empty. A result that
    is a text stays as it is. Any other result is written as JSON, or by ``str`` if JSON cannot hold it. An exception of
    the function, or of its import, becomes a text that begins with "error:".
    """
    try:
        function = _function(path)
        if isinstance(arguments, bytes):
            if not arguments:
                return ToolResult("")
            arguments = pickle.loads(arguments)
        value = function(**arguments) if isinstance(arguments, Mapping) else function(*arguments)
        if inspect.iscoroutine(value):
            value = user_code.run_async(value)
        text, cut = clip(_written(value), MAX_REPLY_CHARS)
        return ToolResult(text, cut=cut)
    except KeyboardInterrupt:
        raise
    except MemoryError:
        return ToolResult("error: the tool ran out of memory", "died")
    except BaseException as error:  # a person's tool may raise anything, SystemExit included
        return ToolResult(f"error: {describe(error)}", "error")


def _function(path: str) -> Callable[..., Any]:
    if path.startswith(REWARD):
        return _reward(path.removeprefix(REWARD))
    if "" in path.partition(":"):
        raise ValueError(f"tool {path!r} is not of the form package.module:name or FILE.py:name")
    found = user_code.load(path)
    if not callable(found):
        raise ValueError(f"tool {path!r} is {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def start_tools(limits: EpisodeConfig, workers: int, on_unasked: Callable[[str], None]) -> ChildPool:
    """Starts ``workers`` processes that run tools.

    ``on_unasked`` is called, on any thread, with a sentence about what a process sent without being asked.
    """
    program, longest = "rljax.rollout.episodes.tools:run_tools", LONGEST + UTF8_BYTES * MAX_REPLY_CHARS
    start = functools.partial(Child, "tool worker", program, (), limits.memory_gib, longest=longest)
    return ChildPool(functools.partial(start, on_unasked=on_unasked), workers)


def run_in(process: Child, path: str, arguments: bytes, timeout_s: float, began: Callable[[], None]) -> ToolResult:
    """Calls the function ``path`` with pickled arguments in a process, which is replaced if it takes too long.

    ``began`` is called once the process has imported the function. The result says whether the tool failed. Raises
    RuntimeError only if no process can be started.
    """
    limit_s, decoder = _IMPORT_S, Decoder(ToolResult)
    try:
        result = process.ask((path, b""), limit_s, decoder)
        if result.failure is None:
            began()
            limit_s = timeout_s
            result = process.ask((path, arguments), limit_s, decoder)
    except TimeoutError:
        return ToolResult(f"error: the tool took more than {limit_s:g} s", "timeout")
    except LostError as error:
        return ToolResult(f"error: the tool's process {error}", "died")
    if result.failure == "died":  # The memory may stay full, and the next call would fail, too.
        process.replace()
    if result.failure is not None:
        return ToolResult(printable(result.text[:_SHOWN]), result.failure)
    text, cut = clip(result.text, MAX_REPLY_CHARS)
    return ToolResult(text, cut=result.cut or cut)
