"""The class that a user writes for rollouts of several turns: three async methods, one instance per trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rljax import user_code
from rljax.rewards.resolve import accepts

Content = str | Sequence[Mapping[str, str]] | None
"""The type of what an environment writes: a text that is taken as it stands, chat messages, or None for nothing."""


@dataclass(frozen=True)
class Reply:
    """The answer of an environment to one turn of the policy.

    Attributes:
      content: The text that follows the turn, unchanged; or messages ``{"role": ..., "content": ...}`` for the chat
        template; or None for no text.
      done: Whether the trajectory ends here. The policy then does not read ``content``.
    """

    content: Content = None
    done: bool = False


class Environment(Protocol):
    """One trajectory's environment. ``rollout.environment`` names its class.

    Each trajectory has an instance of its own, made without arguments. Thousands of instances share one asyncio loop.
    So a method must await slow work and never block.
    """

    async def reset(self, problem: Mapping[str, Any]) -> Content:
        """Begins the trajectory of a problem, which is a row of the data set.

        Returns the prompt, as a text or as chat messages; None means the problem's own ``"prompt"``.
        """

    async def step(self, response: str, truncated: bool) -> Reply:
        """Answers one turn of the policy. The reply may end the trajectory.

        ``response`` is the decoded text of the turn, without special tokens. ``truncated``: Whether a limit of tokens
        cut it off.
        """

    async def reward(self) -> float:
        """Returns the reward of the whole trajectory, a finite number. It is called once, at the end."""


_CALLS: Mapping[str, tuple[Any, ...]] = {"reset": ({},), "step": ("", False), "reward": ()}
_FORMS = {"reset": "reset(self, problem)", "step": "step(self, response, truncated)", "reward": "reward(self)"}


def find_environment(path: str) -> type[Environment]:
    """Returns the class of an environment by its name ``package.module:Class`` or ``FILE.py:Class``.

    Raises:
      ValueError: The name has another form, the class cannot be imported, it needs arguments, or it lacks one of the
        three methods.
    """
    found = user_code.find(path, "environment")
    if not inspect.isclass(found):
        raise ValueError(f"environment {path!r} is {type(found).__name__}, not a class")
    if not accepts(found):
        raise ValueError(f"environment {path!r} must be made without arguments, but {found.__name__}() needs some")
    for name, arguments in _CALLS.items():
        method = getattr(found, name, None)
        if not inspect.iscoroutinefunction(method):
            raise ValueError(f"environment {path!r} has no method 'async def {_FORMS[name]}'")
        if not accepts(method, found, *arguments):
            got = inspect.signature(method)
            raise ValueError(f"environment {path!r}: the method must be {_FORMS[name]}, but it takes {got}")
    return cast(type[Environment], found)
