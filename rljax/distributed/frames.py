"""Frames over one end of a pair of sockets: a number, the length of a body, and the body.

The receiver bounds the length of a frame and its own waiting, also in the middle of a frame. This module needs no other
package, so that processes with a Python of their own can use it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import select
import socket
import struct
import threading
import time
from typing import Literal

_HEAD = struct.Struct("<QQ")
_CHUNK, _LARGEST_CHUNK = 1 << 16, 1 << 20


class FrameError(Exception):
    """An error of the other side, which sent something that is not the frame that it should send."""


class Frames:
    """One end of a pair of sockets. Any thread may send, and one thread at a time may receive."""

    def __init__(self, end: socket.socket, longest: int) -> None:
        """Takes over the socket. ``longest`` is the longest body to receive (bytes)."""
        self._end, self._longest = end, longest
        self._unread = bytearray()
        self._sending = threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable.register(end, select.POLLOUT)

    def send(self, number: int, body: bytes, limit_s: float | None = None) -> None:
        """Sends a frame. ``number`` is below 2**64.

        Raises:
          OSError: The other side has ended.
          TimeoutError: The other side did not take the frame within ``limit_s`` seconds.
        """
        deadline = _deadline(limit_s)
        with self._sending:
            rest = memoryview(_HEAD.pack(number, len(body)) + body)
            while rest:
                try:
                    rest = rest[self._end.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    _wait(self._writable, deadline)

    def receive(self, limit_s: float | None = None) -> tuple[int, bytes]:
        """Returns the number and the body of the next frame.

        Raises:
          EOFError: The other side has ended.
          FrameError: The frame is too long.
          TimeoutError: The frame is not complete within ``limit_s`` seconds. A later call goes on with it.
        """
        deadline = _deadline(limit_s)
        self._fill(_HEAD.size, deadline)
        number, length = _HEAD.unpack_from(self._unread)
        if length > self._longest:
            raise FrameError(f"a frame of {length} bytes, more than {self._longest}")
        end = _HEAD.size + length
        self._fill(end, deadline)
        body = bytes(memoryview(self._unread)[_HEAD.size : end])
        del self._unread[:end]
        return number, body

    def look(self) -> Literal["quiet", "unread", "ended"]:
        """Returns "quiet" if nothing has come, "unread" if something has, and "ended" if the other side has ended."""
        if self._unread:
            return "unread"
        if not self._readable.poll(0):
            return "quiet"
        try:
            return "unread" if self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else "ended"
        except OSError:
            return "ended"

    def fileno(self) -> int:
        """Returns the descriptor of the socket."""
        return self._end.fileno()

    def close(self) -> None:
        """Closes the socket."""
        self._end.close()

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._unread) < count:
            _wait(self._readable, deadline)
            missing = count - len(self._unread)
            try:
                got = self._end.recv(min(max(missing, _CHUNK), _LARGEST_CHUNK))
            except ConnectionError:  # It ended with something unread.
                got = b""
            if not got:
                raise EOFError("the other side has ended")
            self._unread += got


def _deadline(limit_s: float | None) -> float | None:
    return None if limit_s is None else time.monotonic() + limit_s


def _wait(poll: select.poll, deadline: float | None) -> None:
    left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
    if not poll.poll(left_ms):
        raise TimeoutError


def take_stdin() -> socket.socket:
    """Returns the socket that this process got as standard input, and makes standard input empty.

    The socket moves to a random descriptor that no process started from here inherits.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    place = 16 + secrets.randbelow(max(1, min(limit, 1 << 12) // 2))
    end = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, place))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return end
