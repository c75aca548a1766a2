"""The messages that process 0 sends to the other processes: a line of JSON and one packed batch of numpy arrays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

SMALL_BYTES = 256 * 1024  # Larger messages travel over the devices, not through the key-value store.


@dataclasses.dataclass(frozen=True)
class Request:
    """The announcement of work that all processes do together."""

    act: str  # the name of the act
    part: str = ""  # the part of the act; empty if the act has only one
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON values by name
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """The name of the place of a process that does this work: the part, or else the act."""
        return self.part or self.act


def pack_request(request: Request) -> bytes:
    """Packs a request into a message: a line of JSON, then the bytes of the arrays."""
    forms = {name: [array.dtype.str, list(array.shape)] for name, array in request.arrays.items()}
    content = {"act": request.act, "part": request.part, "fields": dict(request.fields), "arrays": forms}
    arrays = (np.ascontiguousarray(array).tobytes() for array in request.arrays.values())
    return b"".join([json.dumps(content).encode(), b"\n", *arrays])


def unpack_request(message: bytes) -> Request:
    """Reads the request from a message of ``pack_request``."""
    head, _, body = message.partition(b"\n")
    content = json.loads(head)
    arrays, start = {}, 0
    for name, (dtype, shape) in content["arrays"].items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += arrays[name].nbytes
    return Request(content["act"], content["part"], content["fields"], arrays)


def broadcast(message: bytes, size: int) -> bytes:
    """Returns process 0's message of ``size`` bytes, which travels over the devices. All processes call it."""
    # The broadcast compiles once per length, so the message is padded to one of few lengths.
    step = 1 << max(size.bit_length() - 3, 12)
    words = np.zeros(-(-size // step) * step // 4, np.uint32)
    words.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(words)).tobytes()[:size]


def ragged(name: str, vectors: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Packs vectors of several lengths into two arrays: ``name`` has their elements, ``name/lengths`` their lengths."""
    arrays = [np.asarray(vector) for vector in vectors]
    lengths = np.asarray([len(array) for array in arrays], np.int64)
    return {name: np.concatenate(arrays), f"{name}/lengths": lengths}


def vectors_of(name: str, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Returns the vectors that ``ragged`` packed under ``name``."""
    return np.split(arrays[name], np.cumsum(arrays[f"{name}/lengths"])[:-1])
