"""Finds a reward by name: a shipped one, or a user's ``package.module:function``."""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

# (problem, decoded response, truncated) -> reward
RewardFunction = Callable[[Any, str, bool], float]
# (reward, None), or (None, what went wrong)
Verdict = tuple[float, None] | tuple[None, str]

SHIPPED: Mapping[str, str] = {
    "addition": "rljax.data.toy:addition_reward",
    "swaps": "rljax.data.toy_swaps:swaps_reward",
    "math": "rljax.rewards.math_answer:math_reward",
}
# Shipped rewards that take microseconds and cannot hang: they need no worker process.
CHEAP = frozenset({"addition", "swaps"})


def resolve_reward(path: str) -> RewardFunction:
    """The function that a name stands for.

    Args:
      path: a key of ``SHIPPED``, or ``package.module:function`` with the signature
        ``function(problem: dict, response: str, truncated: bool) -> float``.

    Raises:
      ValueError: no such form, module or function; not callable; or not callable with those three arguments.
    """
    full = SHIPPED.get(path, path)
    if "" in full.partition(":"):
        names = ", ".join(sorted(SHIPPED))
        raise ValueError(f"reward {path!r} is neither one of {names} nor of the form package.module:function")
    try:
        found = pkgutil.resolve_name(full)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"reward {path!r}: cannot import {full}: {describe(error)}") from error
    if not callable(found):
        raise ValueError(f"reward {path!r} is {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind({}, "", False)
    except TypeError as error:
        expected, taken = "(problem, response, truncated)", inspect.signature(found)
        raise ValueError(f"reward {path!r} must take three arguments {expected}, but it takes {taken}") from error
    except ValueError:  # some builtins have no signature; the first call shows whether it fits
        pass
    return found


def reward_path(reward: RewardFunction) -> str:
    """``module:name`` from which another process gets the same function.

    Raises:
      ValueError: it has no such name: a lambda, a closure, a method of an object, or a function of ``__main__``.
    """
    path = f"{getattr(reward, '__module__', None)}:{getattr(reward, '__qualname__', None)}"
    if path.startswith("__main__:") or "<" in path or "None" in path.split(":"):
        raise ValueError(f"reward {reward!r} cannot be imported by a worker: put it in a module, at the top level")
    if resolve_reward(path) is not reward:
        raise ValueError(f"reward {reward!r} cannot be imported by a worker: {path} is something else")
    return path


def score(reward: RewardFunction, problem: Mapping[str, Any], response: str, truncated: bool) -> Verdict:
    """A finite reward, or one line that says why there is none.

    Every exception of the reward is caught but KeyboardInterrupt, which may be that of a person.
    """
    try:
        value = float(reward(problem, response, truncated))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's reward may raise anything, SystemExit included
        return None, describe(error)
    return (value, None) if math.isfinite(value) else (None, f"the reward is {value}")


def describe(error: BaseException) -> str:
    """An exception in one line of at most 300 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's exception may fail at this, too
        text = ""
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
