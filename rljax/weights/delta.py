"""What changed between two versions of a tensor's part: where, and to which bits.

The new bits replace the old ones, so that a delta which is applied twice does no harm. Places are told by the numbers
of unchanged elements between them, in the narrowest integers that hold them. Both arrays are laid out byte by byte, all
lowest bytes first, and compressed by zstd: high bytes of gaps and of weights hardly differ from each other. Of a part
of which more than a quarter changed all bits are told, as they are: that takes far less time, and little more room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import zstandard

_LEVEL = 1
_MOST = 0.25
_UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


class Delta(NamedTuple):
    """Of one part of a tensor.

    Attributes:
      changed: number of elements that changed.
      gap_type: of the gaps: "uint8" to "uint64"; "": ``values`` has all elements of the part, not compressed.
      gaps: compressed: of each changed element, how many unchanged ones lie between it and the one before.
      values: compressed: the new bits of each changed element.
    """

    changed: int
    gap_type: str
    gaps: bytes
    values: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes to store it (bytes)."""
        return len(self.gaps) + len(self.values)


def encode(old: np.ndarray, new: np.ndarray) -> Delta:
    """The delta from ``old`` to ``new``: bit patterns (uint16 or uint32), vectors of one length."""
    places = np.flatnonzero(old != new)
    if len(places) > _MOST * new.size:
        return Delta(len(places), "", b"", new.tobytes())
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_type = next(np.dtype(kind) for kind in _UNSIGNED if widest <= np.iinfo(kind).max)
    return Delta(len(places), gap_type.name, _compressed(gaps.astype(gap_type)), _compressed(new[places]))


def decode(delta: Delta, size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The places of what changed (int64, rising) in a part of ``size`` elements, and their new bits of ``dtype``.

    Raises:
      ValueError: it is no delta of such a part.
    """
    if not delta.gap_type:
        if len(delta.values) != size * dtype.itemsize:
            raise ValueError(f"{len(delta.values)} bytes are not those of all {size} elements")
        return np.arange(size), np.frombuffer(delta.values, dtype)
    if delta.gap_type not in {np.dtype(kind).name for kind in _UNSIGNED}:
        raise ValueError(f"gaps of the type {delta.gap_type!r:.40}")
    gaps = _decompressed(delta.gaps, delta.changed, np.dtype(delta.gap_type))
    values = _decompressed(delta.values, delta.changed, dtype)
    if gaps.size and int(gaps.max()) >= size:
        raise ValueError("a gap is longer than the part")
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places.size and places[-1] >= size:
        raise ValueError(f"a place is {places[-1]}, the part has {size} elements")
    return places, values


def _compressed(array: np.ndarray) -> bytes:
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.dtype.itemsize).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())


def _decompressed(content: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    wanted = count * dtype.itemsize
    try:
        # What a frame says of itself is looked at first, so that none takes more memory than it should.
        if zstandard.get_frame_parameters(content).content_size != wanted:
            raise ValueError(f"compressed content is not of {wanted} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed content cannot be read: {error}") from error
    if planes.size != wanted:
        raise ValueError(f"compressed content has {planes.size} bytes instead of {wanted}")
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, count).T).view(dtype).reshape(-1)
