"""The difference between two versions of a tensor's part: the places that changed, and their new bits.

The new bits replace the old ones, so that a delta may be applied twice. A place is given as its gap: the number of
unchanged elements since the changed element before it, in the narrowest integers that hold all gaps of the part. The
arrays of gaps and of bits are laid out byte by byte, all lowest bytes first, and compressed by zstd. This helps because
the high bytes of neighboring gaps or weights hardly differ. Where more than a quarter of a part changed, all of its
bits are stored uncompressed, which takes far less time and little more room.

A delta that a mirror has applied can be kept beside it, for servers that write it into their weights in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from rljax.weights.format import Piece, Version, mapped, read_version, write_version

_LEVEL = 1
_MOST = 0.25  # share of a part's elements above which all of its bits are stored
_GAP_TYPES = {f"uint{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

MOST_KEPT = 0.25
"""Share of all elements above which a delta is not kept: writing it in place would spare little."""
_KEPT_DIRECTORY = "last_delta"


class Delta(NamedTuple):
    """The changes of one part of a tensor. Gaps and values are compressed."""

    changed: int  # the number of changed elements
    gap_type: str  # "uint8" to "uint64"; "": ``values`` has the bits of all elements of the part, not compressed
    gaps: bytes  # for each changed element the number of unchanged elements since the changed one before it
    values: bytes  # the new bits of the changed elements


def encode(old: np.ndarray, new: np.ndarray) -> Delta:
    """Returns the delta between the bits of a part, from ``old`` to ``new`` (uint16 or uint32 [n])."""
    places = np.flatnonzero(old != new)
    if len(places) > _MOST * new.size:
        return Delta(len(places), "", b"", new.tobytes())
    gaps = np.diff(places, prepend=-1) - 1
    widest = int(gaps.max(initial=0))
    gap_type = next(name for name, kind in _GAP_TYPES.items() if widest <= np.iinfo(kind).max)
    return Delta(len(places), gap_type, _compressed(gaps.astype(gap_type)), _compressed(new[places]))


def decode(delta: Delta, size: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the changed elements in a part (int64, rising), and their new bits.

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
    rows, columns = np.divmod(places, piece.region.width)
    return piece.region.first + rows * piece.region.stride + columns, new


def _compressed(array: np.ndarray) -> bytes:
    planes = np.ascontiguousarray(array.view(np.uint8).reshape(-1, array.dtype.itemsize).T)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())


def _decompressed(content: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    wanted = count * dtype.itemsize
    try:
        # The size that a frame states is checked first, so that no frame takes more memory than it should.
        if zstandard.get_frame_parameters(content).content_size != wanted:
            raise ValueError(f"compressed content is not of {wanted} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed content cannot be read: {error}") from error
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, count).T).view(dtype).reshape(-1)


@dataclass(frozen=True)
class KeptDelta:
    """The delta that a mirror has applied last. Its files change only under the mirror's lock."""

    version: Version  # the version after the delta
    base_digest: str  # the digest of the version before the delta
    directory: Path  # the delta's files

    def patches(self) -> Iterator[tuple[str, tuple[int, ...], np.ndarray, np.ndarray]]:
        """Yields the changes of each piece that has any. Only one piece's changes are in memory at a time.

        An item has four parts: the tensor's Hugging Face name, its shape, the flat indices of the changed elements
        (int64, each once), and their new bits (uint16 or uint32). Raises OSError if a file cannot be read, and
        ValueError or KeyError if its content does not fit the piece.
        """
        changed = [piece for piece in self.version.delta if piece.changed]
        files = {file: mapped(self.directory / file) for file in self.version.files_of(changed)}
        dtype = np.dtype("uint32" if self.version.dtype == "float32" else "uint16")
        for piece in changed:
            shape = self.version.tensors[piece.tensor].shape
            yield piece.tensor, shape, *decode_piece(piece, files[piece.file], dtype)


def keep(root: Path, version: Version, paths: Mapping[str, Path]) -> None:
    """Keeps the delta that was applied to the mirror in ``root``, and removes the delta that was kept before.

    A delta is not kept if it changes more than ``MOST_KEPT`` of the elements, or if there is no room for it. Servers
    load the whole mirror then. ``paths`` has the paths of the delta's files by name.
    """
    forget(root)
    changed = sum(piece.changed for piece in version.delta)
    if changed > MOST_KEPT * sum(record.sums.count for record in version.tensors.values()):
        return
    directory = root / _KEPT_DIRECTORY
    try:
        directory.mkdir()
        for file in version.files_of(version.delta):
            shutil.copyfile(paths[file], directory / file)
        write_version(directory, msgspec.structs.replace(version, dense=()))
    except OSError:
        forget(root)


def forget(root: Path) -> None:
    """Removes the delta that is kept for the mirror in ``root``."""
    shutil.rmtree(root / _KEPT_DIRECTORY, ignore_errors=True)


def kept(root: Path, name: str) -> KeptDelta | None:
    """Returns the delta to the version ``name`` that is kept for the mirror in ``root``; None if there is none."""
    directory = root / _KEPT_DIRECTORY
    try:
        version = read_version(directory, name)
    except (OSError, ValueError):
        return None
    return KeptDelta(version, version.base.digest, directory) if version.base is not None else None
