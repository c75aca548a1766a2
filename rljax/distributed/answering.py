"""The side of a child process that answers the requests of its parent, one at a time."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from rljax.distributed.frames import Frames

GRACE_S = 5.0
"""The time past a request's limit after which a child ends itself (seconds). A living parent ends it earlier."""
_OWN = os.getpid()


def tell_ready(frames: Frames, complaint: str | None = None) -> None:
    """Tells the parent that this process can answer, or in one line why it cannot."""
    send(frames, 0, complaint)


def end_with_parent(frames: Frames) -> None:
    """Ends this process when its parent has ended or has closed the socket, even while it works."""
    ends = select.poll()
    ends.register(frames.fileno(), 0)  # the end of the other side is reported always

    def watch() -> None:
        ends.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer_requests(frames: Frames, answer: Callable[..., Any]) -> None:
    """Answers requests until the parent closes the socket.

    A request is the pickle of ``(arguments, limit in seconds)``. The reply has its number and the answer as msgpack.
    """
    tell_ready(frames)
    while True:
        try:
            number, body = frames.receive()
        except EOFError:
            return
        arguments, limit_s = pickle.loads(body)
        end_by_alarm(limit_s + GRACE_S)
        reply = answer(*arguments)
        end_by_alarm(0.0)
        send(frames, number, reply)


def send(frames: Frames, number: int, content: Any) -> None:
    """Sends ``content`` to the parent as msgpack, under a request's number. A fork of this process ends instead."""
    end_if_forked()
    frames.send(number, msgspec.msgpack.encode(content))


def end_if_forked() -> None:
    """Ends this process if it is a fork that a user's code left behind. A fork must not answer for its parent."""
    if os.getpid() != _OWN:
        os._exit(1)


def end_by_alarm(after_s: float) -> None:
    """Lets the system end this process in ``after_s`` seconds, even if it hangs then. 0 cancels this.

    A handler that a user's module has set stays, and is called instead.
    """
    if signal.getsignal(signal.SIGALRM) == signal.SIG_IGN:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, after_s)
