"""The messages that process 0 sends to the other processes: the name of a method, and its packed arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jax.experimental import multihost_utils

SMALL_BYTES = 256 * 1024  # Larger messages travel over the devices, not through the key-value store.


class Announcement(NamedTuple):
    """The announcement of work that all processes do together."""

    name: str  # the name of the object that does the work
    method: str = ""  # the name of the object's method; empty if the object does one thing alone
    arguments: bytes = b""  # the arguments of the method, packed

    @property
    def place(self) -> str:
        """The name of the phase that a process is in while it does this work."""
        return self.method.strip("_") or self.name


def pack(value: Any) -> bytes:
    """Packs plain values, numpy arrays, paths, and tuples, lists, dictionaries and dataclasses of them into bytes."""
    contents, size = list[bytes](), 0

    def plain(value: Any) -> Any:
        nonlocal size
        if isinstance(value, np.ndarray):
            start, content = size, value.tobytes()
            contents.append(content)
            size += len(content)
            return value.dtype.str, value.shape, start
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"{type(value).__name__} cannot be sent to other processes")

    head = msgspec.msgpack.encode(value, enc_hook=plain)
    return b"".join([len(head).to_bytes(8, "little"), head, *contents])


def unpack(message: bytes, kind: Any) -> Any:
    """Returns the value that ``pack`` packed, of the type ``kind``. Its arrays are views of ``message``."""
    end = 8 + int.from_bytes(message[:8], "little")

    def typed(kind: type, told: Any) -> Any:
        if kind is np.ndarray:
            dtype, shape, start = told
            return np.frombuffer(message, dtype, int(np.prod(shape)), end + start).reshape(shape)
        return kind(told)  # a path

    return msgspec.msgpack.decode(message[8:end], type=kind, dec_hook=typed)


def broadcast(message: bytes, size: int) -> bytes:
    """Returns process 0's message of ``size`` bytes, which travels over the devices. All processes call it."""
    # The broadcast compiles once per length, so the message is padded to one of few lengths.
    step = 1 << max(size.bit_length() - 3, 12)
    words = np.zeros(-(-size // step) * step // 4, np.uint32)
    words.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(words)).tobytes()[:size]
