"""Finds a reward by name: a shipped reward, or a user's function in one of several forms."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from rljax import user_code
from rljax.distributed.answering import answer_requests, tell_ready
from rljax.distributed.frames import Frames
from rljax.rewards.call_forms import NamedReward

RewardFunction = Callable[[Any, str, bool], float]  # (problem, decoded response, truncated) -> reward
RewardOrReason = tuple[float, None] | tuple[None, str]  # (reward, None), or (None, reason)

SHIPPED: Mapping[str, str] = {
    "addition": "rljax.data.toy:addition_reward",
    "swaps": "rljax.data.toy:swaps_reward",
    "math": "rljax.rewards.math_answer:math_reward",
    "reasoning_gym": "rljax.rewards.gym_answer:strict_reward",
    "reasoning_gym_library": "rljax.rewards.gym_answer:library_reward",
}
# These shipped rewards take microseconds and cannot hang, so they need no worker process.
CHEAP = frozenset({"addition", "swaps"})
_LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32


def resolve_reward(path: str) -> RewardFunction:
    """Returns the reward of a name: a key of ``SHIPPED``, ``package.module:function``, or ``FILE.py:function``.

    It is called as ``function(problem: dict, response: str, truncated: bool) -> float``. A user's function may have
    another form of ``rljax.rewards.call_forms``. It may also be a class that is made without arguments.

    Raises:
      ValueError: The name has another form, there is no such module or function, or its parameters have no known form.
    """
    if path in SHIPPED:
        shipped: RewardFunction = pkgutil.resolve_name(SHIPPED[path])
        return shipped
    if ":" not in path:
        names = ", ".join(sorted(SHIPPED))
        raise ValueError(f"reward {path!r} is none of {names}, package.module:function or FILE.py:function")
    reward = user_code.find(path, "reward")
    if inspect.isclass(reward) and accepts(reward):
        try:
            reward = reward()
        except Exception as error:  # a person's class may raise anything
            raise ValueError(f"reward {path!r} cannot be made: {user_code.located(error)}") from error
    if not callable(reward):
        raise ValueError(f"reward {path!r} is {type(reward).__name__}, not a function")
    try:
        return NamedReward(reward)
    except ValueError as error:
        raise ValueError(f"reward {path!r} {error}") from error


def is_reward(value: Any) -> bool:
    """Returns whether a number can be a reward: it is not NaN, and float32 can hold it."""
    return bool(abs(value) <= _LARGEST)


def accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function can be called with these arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature; the first call shows whether it fits
        pass
    return True


def score(reward: RewardFunction, problem: Mapping[str, Any], response: str, truncated: bool) -> RewardOrReason:
    """Returns (a finite reward, None), or (None, one line with the reason).

    Every exception of the reward is caught, except KeyboardInterrupt.
    """
    try:
        value = float(reward(problem, response, truncated))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's reward may raise anything, SystemExit included
        return None, user_code.located(error)
    return (value, None) if is_reward(value) else (None, f"the reward is {value}, not a finite float32")


def score_responses(frames: Frames, path: str) -> None:
    """Scores responses in a child process with the reward ``path``. A request is (problem, response, truncated)."""
    try:
        reward = resolve_reward(path)
    except ValueError as error:
        tell_ready(frames, str(error))
    else:
        answer_requests(frames, functools.partial(score, reward))
