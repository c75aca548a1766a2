"""The messages that process 0 sends to the other processes: a line of JSON and one packed batch of numpy arrays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

_SMALL_BYTES = 256 * 1024  # Larger batches travel over the devices, not through the key-value store.


@dataclasses.dataclass(frozen=True)
class Request:
    """The announcement of work that all processes do together.

    Attributes:
      act: The name of the act.
      part: The name of the part of the act; "" where the act has only one.
      fields: The settings of the work, JSON values by name.
      arrays: The numpy arrays that the work needs, by name.
    """

    act: str
    part: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """The words that say where a process is while it does this work."""
        return self.part or self.act

    @property
    def num_bytes(self) -> int:
        """The size of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def is_small(self) -> bool:
        """Whether the arrays travel inside the message."""
        return self.num_bytes <= _SMALL_BYTES


def pack_request(request: Request) -> bytes:
    """Returns the message of a request: a line of JSON, then the bytes of the arrays if they are small."""
    forms = {name: [array.dtype.str, list(array.shape)] for name, array in request.arrays.items()}
    content = {"act": request.act, "part": request.part, "fields": dict(request.fields), "arrays": forms}
    head = json.dumps(content | {"inline": request.is_small}).encode()
    arrays = request.arrays.values() if request.is_small else ()
    return head + b"\n" + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpack_request(message: bytes) -> Request:
    """Returns the request of a message. Large arrays come over the devices, so process 0 calls ``send_large`` then."""
    head, _, body = message.partition(b"\n")
    content = json.loads(head)
    forms = {name: (np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in content["arrays"].items()}
    if not content["inline"]:
        size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in forms.values())
        body = np.asarray(multihost_utils.broadcast_one_to_all(_buffer(size, []))).tobytes()
    arrays, start = {}, 0
    for name, (dtype, shape) in forms.items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize
    return Request(content["act"], content["part"], content["fields"], arrays)


def send_large(request: Request) -> None:
    """Sends the arrays of a request over the devices, unless they are small and travel inside the message."""
    if not request.is_small:
        multihost_utils.broadcast_one_to_all(_buffer(request.num_bytes, request.arrays.values()))


def _buffer(size: int, arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns uint32 words that hold ``size`` bytes. The broadcast compiles once per length, so lengths are few."""
    step = 1 << max(size.bit_length() - 3, 12)
    words = np.zeros(-(-size // step) * step // 4, np.uint32)
    view, start = words.view(np.uint8), 0
    for array in arrays:
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += array.nbytes
    return words


def ragged(name: str, vectors: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns vectors of several lengths as two arrays: their elements, ``name``, and lengths, ``name/lengths``."""
    arrays = [np.asarray(vector) for vector in vectors]
    lengths = np.asarray([len(array) for array in arrays], np.int64)
    return {name: np.concatenate(arrays), f"{name}/lengths": lengths}


def vectors_of(name: str, arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Returns the vectors that ``ragged`` packed under ``name``."""
    return np.split(arrays[name], np.cumsum(arrays[f"{name}/lengths"])[:-1])
