"""The difference between two versions of a part of a tensor: the changed elements and their new bits.

The new bits replace the old ones, so a delta may be applied twice. A changed element is found by its gap: the number of
unchanged elements before it since the last changed one, in the narrowest integers that hold all gaps of the part. The
arrays of gaps and of bits are laid out byte by byte, all lowest bytes first, and compressed by zstd. This helps because
the high bytes of neighboring gaps or weights hardly differ. Where more than a quarter of a part changed, all of its
bits are stored uncompressed, which takes far less time and little more room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import zstandard

from rljax.weights.format import Piece

_LEVEL = 1
_MOST = 0.25  # share of a part's elements above which all of its bits are stored
_GAP_TYPES = {f"uint{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Delta(NamedTuple):
    """The changes of one part of a tensor. Gaps and values are compressed."""

    changed: int  # the number of changed elements
    gap_type: str  # "uint8" to "uint64"; "": ``values`` has the bits of all elements of the part, not compressed
    gaps: bytes  # for each changed element the number of unchanged elements since the changed one before it
    values: bytes | memoryview  # the new bits of the changed elements


def encode(old: np.ndarray, new: np.ndarray) -> Delta:
    """Returns the delta from ``old`` to ``new``, bits of a part (uint16 or uint32 [n]); it may be a view of ``new``."""
    differs = old != new
    if (changed := int(np.count_nonzero(differs))) > _MOST * new.size:
        return Delta(changed, "", b"", np.ascontiguousarray(new).view(np.uint8).data)
    places = np.flatnonzero(differs)
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_type = next(name for name, kind in _GAP_TYPES.items() if widest <= np.iinfo(kind).max)
    return Delta(changed, gap_type, _compressed(gaps.astype(gap_type)), _compressed(new[places]))


def decode(delta: Delta, size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the changed elements in a part (int64, rising), and their new bits.

    The part has ``size`` elements, whose bits have the type ``dtype``: uint16 or uint32. Raises ValueError if ``delta``
    is damaged or does not fit such a part.
    """
    if not delta.gap_type:
        if len(delta.values) != size * dtype.itemsize:
            raise ValueError(f"{len(delta.values)} bytes are not those of all {size} elements")
        return np.arange(size), np.frombuffer(delta.values, dtype)
    if delta.gap_type not in _GAP_TYPES:
        raise ValueError(f"gaps of the type {delta.gap_type!r:.40}")
    gaps = _decompressed(delta.gaps, delta.changed, _GAP_TYPES[delta.gap_type])
    values = _decompressed(delta.values, delta.changed, dtype)
    if gaps.size and int(gaps.max()) >= size:
        raise ValueError("a gap is longer than the part")
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places.size and places[-1] >= size:
        raise ValueError(f"a place is {places[-1]}, the part has {size} elements")
    return places, values


def decode_piece(piece: Piece, file: Mapping[str, np.ndarray], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the elements that a piece changes: their flat indices in the whole tensor (int64), and their new bits.

    ``file`` has the bytes of each entry of the piece's file (``format.mapped``). Raises KeyError if an entry is
    missing, and ValueError if an entry does not fit the piece.
    """
    gaps, values = (file[f"{piece.key}.{kind}"].tobytes() for kind in ("gaps", "values"))
    places, new = decode(Delta(piece.changed, piece.gap_type, gaps, values), piece.region.size, dtype)
    if piece.region.width == piece.region.stride:
        return np.add(places, piece.region.first, out=places), new
    rows, columns = np.divmod(places, piece.region.width)
    return piece.region.first + rows * piece.region.stride + columns, new


def _compressed(array: np.ndarray) -> bytes:
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.dtype.itemsize).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())


def _decompressed(content: bytes | memoryview, count: int, dtype: np.dtype) -> np.ndarray:
    wanted = count * dtype.itemsize
    try:
        # The size that a frame states is checked first, so that no frame takes more memory than it should.
        if zstandard.get_frame_parameters(content).content_size != wanted:
            raise ValueError(f"compressed content is not of {wanted} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed content cannot be read: {error}") from error
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, count).T).view(dtype).reshape(-1)
