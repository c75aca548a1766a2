"""The program of a process for tools: functions of any module, one call at a time, without jax."""

from __future__ import annotations

import asyncio
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rljax.rewards.resolve import describe
from rljax.rewards.worker import answer_requests
from rljax.rollout.episodes.outcomes import clip

Arguments = Mapping[str, Any] | Sequence[Any]
"""The arguments of a tool: a mapping of names, or a sequence of values in their order."""


class Ran(NamedTuple):
    """The result of a function.

    Attributes:
      text: The result as text, or a line that describes the error.
      cut: Whether the text was cut at the limit.
      raised: The name of the error's class; "" if there was none.
    """

    text: str
    cut: bool = False
    raised: str = ""


def run_tools(connection: Connection) -> None:
    """Answers the requests of a ``ToolPool`` until the parent closes the pipe.

    A request holds the argument of ``import_function``, or the three arguments of ``run_function``.
    """

    def answer(*arguments: Any) -> Any:
        return run_function(*arguments) if len(arguments) > 1 else import_function(*arguments)

    answer_requests(connection, answer)


def import_function(path: str) -> str | None:
    """Imports the tool ``path``. Returns None, or a line that says why it cannot be imported."""
    try:
        _function(path)
    except BaseException as error:  # a person's module may raise anything
        return describe(error)
    return None


def run_function(path: str, arguments: Arguments, longest: int) -> Ran:
    """Calls the function ``path`` and returns its result as a text of at most ``longest`` characters.

    A result that is a text stays as it is. Any other result is written as JSON, or by ``str`` if JSON cannot hold it.
    """
    try:
        function = _function(path)
        value = function(**arguments) if isinstance(arguments, Mapping) else function(*arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return Ran(*clip(_written(value), longest))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a person's tool may raise anything, SystemExit included
        return Ran(describe(error), raised=type(error).__name__)


def _function(path: str) -> Callable[..., Any]:
    if "" in path.partition(":"):
        raise ValueError(f"tool {path!r} is not of the form package.module:function")
    found = pkgutil.resolve_name(path)
    if not callable(found):
        raise ValueError(f"tool {path!r} is {type(found).__name__}, not a function")
    return found


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
