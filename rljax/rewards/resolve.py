"""Finds a reward by name: a shipped reward, or a user's ``package.module:function``."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from rljax.distributed.answering import answer_requests, tell_ready
from rljax.distributed.frames import Frames
from rljax.errors import describe

RewardFunction = Callable[[Any, str, bool], float]  # (problem, decoded response, truncated) -> reward
Verdict = tuple[float, None] | tuple[None, str]  # (reward, None), or (None, reason)

SHIPPED: Mapping[str, str] = {
    "addition": "rljax.data.toy:addition_reward",
    "swaps": "rljax.data.toy_swaps:swaps_reward",
    "math": "rljax.rewards.math_answer:math_reward",
    "reasoning_gym": "rljax.rewards.gym_answer:strict_reward",
    "reasoning_gym_library": "rljax.rewards.gym_answer:library_reward",
}
# These shipped rewards take microseconds and cannot hang, so they need no worker process.
CHEAP = frozenset({"addition", "swaps"})


def resolve_reward(path: str) -> RewardFunction:
    """Returns the reward of a name: a key of ``SHIPPED``, or ``package.module:function``.

    Its signature is ``function(problem: dict, response: str, truncated: bool) -> float``.

    Raises:
      ValueError: The name has another form, there is no such module or function, or it does not accept these arguments.
    """
    full = SHIPPED.get(path, path)
    if "" in full.partition(":"):
        names = ", ".join(sorted(SHIPPED))
        raise ValueError(f"reward {path!r} is neither one of {names} nor of the form package.module:function")
    try:
        reward = pkgutil.resolve_name(full)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"reward {path!r}: cannot import {full}: {describe(error)}") from error
    if not callable(reward):
        raise ValueError(f"reward {path!r} is {type(reward).__name__}, not a function")
    if not accepts(reward, {}, "", False):
        expected, got = "(problem, response, truncated)", inspect.signature(reward)
        raise ValueError(f"reward {path!r} must take three arguments {expected}, but it takes {got}")
    return reward


def accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function can be called with these arguments, as far as its signature tells."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature; the first call shows whether it fits
        pass
    return True


def score(reward: RewardFunction, problem: Mapping[str, Any], response: str, truncated: bool) -> Verdict:
    """Returns (a finite reward, None), or (None, one line with the reason).

    Every exception of the reward is caught, except KeyboardInterrupt, which a user may cause.
    """
    try:
        value = float(reward(problem, response, truncated))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's reward may raise anything, SystemExit included
        return None, describe(error)
    return (value, None) if math.isfinite(value) else (None, f"the reward is {value}")


def score_responses(frames: Frames, path: str) -> None:
    """Scores responses in a child process with the reward ``path``; a request has the last arguments of ``score``."""
    try:
        reward = resolve_reward(path)
    except ValueError as error:
        tell_ready(frames, str(error))
    else:
        answer_requests(frames, functools.partial(score, reward))
