"""Code in a child process that attacks its parent: it writes to the socket what the parent did not ask for."""

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


def write(data):
    """Writes into every socket of this process."""
    for descriptor in range(3, os.sysconf("SC_OPEN_MAX")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, data)
        except OSError:
            pass


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
    trap = pickle.dumps(Trap(path))
    said = msgspec.msgpack.encode(honest)
    if kind == "pickle":
        write(struct.pack("!i", len(trap)) + trap)
    elif kind == "framed pickle":
        write(HEAD.pack(number(), len(trap)) + trap)
    elif kind == "huge":
        write(HEAD.pack(number(), 2 << 30) + b"x")
    elif kind == "shift":
        write(HEAD.pack(number() + 1, len(said)) + said)
    elif kind == "twice":
        write(HEAD.pack(number(), len(said)) + said)
    elif kind == "garbage":
        write(b"\xff" * 64)
    elif kind == "wrong form":
        body = msgspec.msgpack.encode({"a": [1, "x" * 1000]})
        write(HEAD.pack(number(), len(body)) + body)
    elif kind == "end of head":
        write(b"\0" * 15)
    elif kind == "half":
        write(HEAD.pack(number(), 1000))
    elif kind == "late":
        threading.Timer(0.05, write, [HEAD.pack(7, len(said)) + said]).start()


def socket_pair_is_hidden():
    """Returns whether neither the arguments nor the environment of this process name the descriptor of its socket."""
    found = []
    for descriptor in range(0, os.sysconf("SC_OPEN_MAX")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
        except OSError:
            pass
    (descriptor,) = found
    assert not os.get_inheritable(descriptor)
    assert socket.socket(fileno=os.dup(descriptor)).family == socket.AF_UNIX
    words = [word for name in ("cmdline", "environ") for word in Path("/proc/self", name).read_text().split("\0")]
    return str(descriptor) not in words
