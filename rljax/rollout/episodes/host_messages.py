"""The messages of a host process to its parent, which decodes them into these types and executes none of them."""

from __future__ import annotations

import msgspec

from rljax.rollout.episodes.outcomes import Outcome


class CallEnded(msgspec.Struct, tag=True):
    """The end of a call of an environment. The number of the frame is the number of the call."""

    outcome: Outcome


class ToolAsked(msgspec.Struct, tag=True):
    """A tool that is to be run. The number of the frame is the number that its result shall have.

    Attributes:
      arguments: The pickle of the arguments, which only the process of the tool reads.
    """

    path: str
    arguments: bytes
    counted: bool


class ToolDropped(msgspec.Struct, tag=True):
    """A tool whose result is not needed any more. The number of the frame is the number of its result."""


class ToolRefused(msgspec.Struct, tag=True):
    """A call of a tool that was refused before it came to the parent, which counts it. The number is 0."""


HostMessage = CallEnded | ToolAsked | ToolDropped | ToolRefused
HOST_MESSAGE: msgspec.msgpack.Decoder[HostMessage] = msgspec.msgpack.Decoder(HostMessage)
