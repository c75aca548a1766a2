"""Code in a child process that attacks its parent: it writes to the socket what the parent did not ask for."""

import contextlib
import os
import pickle
import socket
import stat
import struct
import sys
import threading
from pathlib import Path

import msgspec

HEAD = struct.Struct("<QQ")


class Trap:
    """An object that makes a file if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def sockets():
    """Returns the descriptors of this process's sockets, besides the first three."""
    found = []
    for descriptor in range(3, os.sysconf("SC_OPEN_MAX")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
    return found


def write(data):
    for descriptor in sockets():
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


def number():
    """Returns the number of the request that this process answers now, or 7."""
    frame = sys._getframe()
    while frame is not None:
        if "reply" in frame.f_code.co_varnames:
            return frame.f_locals["number"]
        if "call" in frame.f_locals and hasattr(frame.f_locals["call"], "number"):
            return frame.f_locals["call"].number
        frame = frame.f_back
    return 7


def attack(kind, path="", honest=None):
    """Sends something that nobody asked for. ``honest`` is the content of an honest message."""
    trap, said, n = pickle.dumps(Trap(path)), msgspec.msgpack.encode(honest), number()
    wrong = msgspec.msgpack.encode({"a": [1, "x" * 1000]})
    if kind == "late":
        threading.Timer(0.05, write, [HEAD.pack(7, len(said)) + said]).start()
        return
    data = {
        "pickle": struct.pack("!i", len(trap)) + trap,
        "framed pickle": HEAD.pack(n, len(trap)) + trap,
        "huge": HEAD.pack(n, 2 << 30) + b"x",
        "shift": HEAD.pack(n + 1, len(said)) + said,
        "twice": HEAD.pack(n, len(said)) + said,
        "garbage": b"\xff" * 64,
        "wrong form": HEAD.pack(n, len(wrong)) + wrong,
        "end of head": b"\0" * 15,
        "half": HEAD.pack(n, 1000),
    }
    write(data[kind])


def socket_pair_is_hidden():
    """Returns whether neither the arguments nor the environment of this process name the descriptor of its socket."""
    (descriptor,) = sockets()
    assert not os.get_inheritable(descriptor)
    assert socket.socket(fileno=os.dup(descriptor)).family == socket.AF_UNIX
    words = [word for name in ("cmdline", "environ") for word in Path("/proc/self", name).read_text().split("\0")]
    return str(descriptor) not in words
