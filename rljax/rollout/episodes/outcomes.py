"""The outcome of one call of an environment, and the checks of what the environment returned."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljax.errors import printable
from rljax.rewards.resolve import is_reward
from rljax.rollout.episodes.environment import Content, Reply

UTF8_BYTES = 4
"""The most bytes of one character of a text (UTF-8)."""
LONGEST_MESSAGE = 500
"""The most characters of the message of a failure."""
Failure = Literal["raised", "timeout", "died", "bad_reply"]


@dataclass(frozen=True)
class Outcome:
    """The result of one call of an environment: a value, or a failure."""

    # The prompt of ``reset`` (a text, messages or None), the ``Reply`` of ``step``, or the number of ``reward``; None
    # after a failure.
    value: Content | Reply | float = None
    # The kind of failure. raised: the environment raised. timeout: the call took too long, or blocked its process.
    # died: the process crashed, ran out of memory, or was ended because of another trajectory. bad_reply: the call
    # returned a value of a wrong type or form. None: there is a value.
    failure: Failure | None = None
    message: str = ""  # one line that says what happened in a failure
    cut: bool = False  # whether the value was longer than the limit and was cut there


def clip(text: str, limit: int) -> tuple[str, bool]:
    """Returns a text of at most ``limit`` characters, and whether it was cut.

    Lone surrogates, which UTF-8 cannot encode, become question marks.
    """
    return (text[:limit].encode("utf-8", "replace").decode(), len(text) > limit)


def check_outcome(method: str, value: Any, limit: int) -> Outcome:
    """Returns the outcome of a call of reset, step or reward: ``value`` in plain types, or the failure ``bad_reply``.

    ``limit`` is the longest text in characters. A longer prompt is a failure, a longer reply is cut.
    """
    try:
        if method == "reward":
            return Outcome(_reward(value))
        if method == "reset":
            prompt, cut = _content(value, limit)
            if cut:
                raise ValueError(f"reset returned a prompt of more than {limit} characters")
            return Outcome(prompt)
        if not isinstance(value, Reply) or not isinstance(value.done, bool):
            raise ValueError(f"step must return Reply(content, done), got {_named(value)}")
        content, cut = _content(value.content, limit)
        return Outcome(Reply(content, value.done), cut=cut)
    except ValueError as error:
        return Outcome(failure="bad_reply", message=printable(str(error)[:LONGEST_MESSAGE]))


def _reward(value: Any) -> float:
    if not isinstance(value, numbers.Real) or not is_reward(value):
        raise ValueError(f"reward must return a finite float32, got {_named(value)}")
    return float(value)


def _content(value: Any, limit: int) -> tuple[Any, bool]:
    """Returns a text, messages or None in plain types, cut to ``limit`` characters, and whether it was cut.

    Raises ValueError if ``value`` is none of these.
    """
    if value is None:
        return None, False
    if isinstance(value, str):
        return clip(value, limit)
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"the content must be a text, a list of messages or None, got {_named(value)}")
    messages, cut = [], False
    for message in value:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"a message must have the texts role and content, got the keys {sorted(map(str, message))}"
            )
        kept = {}
        for key, part in message.items():
            if not isinstance(key, str) or not isinstance(part, str):
                raise ValueError(f"a message must have texts only, got {_named(part)} for {key!r}")
            key = clip(key, len(key))[0]
            kept[key], was_cut = clip(part, limit)
            if key != "role":
                limit -= len(kept[key])
            cut |= was_cut
        messages.append(kept)
    return messages, cut


def _named(value: Any) -> str:
    """Returns a short description of any value: a number as it is, otherwise its type."""
    return repr(value) if isinstance(value, float) else f"a value of type {type(value).__name__}"
