"""The outcome of one call of an environment, the checks of the returned value, and the messages of a host process.

The parent of a host process decodes its messages into these types and executes none of them. Both share a few bytes of
memory, too: the running trajectory, and a count of progress.
"""

from __future__ import annotations

import mmap
import numbers
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rljax.errors import printable
from rljax.rewards.resolve import is_reward
from rljax.rollout.episodes.config import MAX_REPLY_CHARS
from rljax.rollout.episodes.environment import Content, Reply

UTF8_BYTES = 4
"""The most bytes of one character of a text (UTF-8)."""
LONGEST_MESSAGE = 500
"""The most characters of the message of a failure."""
Failure = Literal["raised", "timeout", "died", "bad_reply"]
ToolFailure = Literal["error", "timeout", "died"]
_FORM = struct.Struct("<qq")


class Outcome(msgspec.Struct, tag=True, frozen=True):
    """The result of one call of an environment: a value, or a failure.

    As a message of a host process it has the number of the call.
    """

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


def check_outcome(method: str, value: Any) -> Outcome:
    """Returns the outcome of a call of reset, step or reward: ``value`` in plain types, or the failure ``bad_reply``.

    A prompt of more than ``MAX_REPLY_CHARS`` is a failure. A reply of more is cut.
    """
    try:
        if method == "reward":
            if not isinstance(value, numbers.Real) or not is_reward(value):
                raise ValueError(f"reward must return a finite float32, got {_named(value)}")
            return Outcome(float(value))
        if method == "reset":
            prompt, cut = _content(value)
            if cut:
                raise ValueError(f"reset returned a prompt of more than {MAX_REPLY_CHARS} characters")
            return Outcome(prompt)
        if not isinstance(value, Reply) or not isinstance(value.done, bool):
            raise ValueError(f"step must return Reply(content, done), got {_named(value)}")
        content, cut = _content(value.content)
        return Outcome(Reply(content, value.done), cut=cut)
    except ValueError as error:
        return Outcome(failure="bad_reply", message=printable(str(error)[:LONGEST_MESSAGE]))


def _content(value: Any) -> tuple[Any, bool]:
    """Returns a text, messages or None in plain types, cut to ``MAX_REPLY_CHARS``, and whether it was cut.

    Raises ValueError if ``value`` is none of these.
    """
    if value is None:
        return None, False
    if isinstance(value, str):
        return clip(value, MAX_REPLY_CHARS)
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"the content must be a text, a list of messages or None, got {_named(value)}")
    messages, cut, limit = [], False, MAX_REPLY_CHARS
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


class ToolEnded(msgspec.Struct, tag=True):
    """The end of a call of a tool, for the counts. The number of the frame is 0.

    Attributes:
      path: The name of the tool, or "" for a call that was refused before it came to a tool.
      failure: The kind of failure, as ``ToolResult.failure``.
      cut: Whether the result was cut.
      text: The text of a failure.
    """

    path: str
    failure: ToolFailure | None
    cut: bool
    text: str


class ToolUnasked(msgspec.Struct, tag=True):
    """A report: a tool's process sent something unasked. ``said`` is the end of a sentence. The frame's number is 0."""

    said: str


HostMessage = Outcome | ToolEnded | ToolUnasked
HOST_MESSAGE: msgspec.msgpack.Decoder[HostMessage] = msgspec.msgpack.Decoder(HostMessage)


class ProgressBoard:
    """The shared memory in which a host process writes the running trajectory and a count, for its parent to read."""

    def __init__(self, descriptor: int | None = None):
        """Opens the memory of an inherited ``descriptor``, or makes a new one."""
        if descriptor is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the board
            self._file.truncate(mmap.PAGESIZE)
            descriptor = self._file.fileno()
        os.set_inheritable(descriptor, False)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._moves = 0

    def write(self, running: int) -> None:
        """Records which trajectory runs from now on; 0 means none."""
        self._moves += 1
        _FORM.pack_into(self._memory, 0, running, self._moves)

    def read(self) -> tuple[int, int]:
        """Returns the trajectory that runs now (0: none), and the number of writes, which grows with all progress."""
        running, moves = _FORM.unpack_from(self._memory)
        return running, moves
