"""The delta that a mirror took last, kept beside it: for servers that write it into their weights in place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rljax.weights import safetensors_file
from rljax.weights.delta import Delta, decode
from rljax.weights.version import VERSION_FILE, Piece, Version, parse_version, write_version

_DIRECTORY = "last_delta"
MOST = 0.25
"""Share of the elements above which a delta is not kept: writing it in place would spare little."""


class Patch(NamedTuple):
    """What changed in one tensor.

    Attributes:
      tensor: Hugging Face name.
      shape: of the whole tensor.
      places: flat indices of the changed elements, int64, each once.
      bits: their new bit patterns, uint16 or uint32.
    """

    tensor: str
    shape: tuple[int, ...]
    places: np.ndarray
    bits: np.ndarray


class KeptDelta:
    """A version that is a delta, and the directory with its files. It is changed under the mirror's lock alone."""

    def __init__(self, version: Version, directory: Path) -> None:
        self.version, self._directory = version, directory

    @property
    def base_digest(self) -> str:
        """Digest of the version that it is against."""
        assert self.version.base is not None
        return self.version.base.digest

    def patches(self) -> Iterator[Patch]:
        """One for each piece with a change, one in memory at a time.

        Raises:
          ValueError, KeyError, OSError: the files are not what the version says.
        """
        sources: dict[str, Mapping[str, np.ndarray]] = {}
        dtype = np.dtype("uint32" if self.version.dtype == "float32" else "uint16")
        for piece in self.version.delta:
            if piece.changed:
                source = sources.setdefault(piece.file, safetensors_file.mapped(self._directory / piece.file))
                yield Patch(piece.tensor, self.version.tensors[piece.tensor].shape, *places_of(piece, source, dtype))


def places_of(piece: Piece, source: Mapping[str, np.ndarray], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices in the whole tensor, and bits of ``dtype``, of what a delta's piece changes.

    Raises:
      ValueError, KeyError: ``source``, its file, is not what the piece says.
    """
    gaps, values = (source[f"{piece.key}.{kind}"].tobytes() for kind in ("gaps", "values"))
    places, new = decode(Delta(piece.changed, piece.gap_type, gaps, values), piece.region.size, dtype)
    rows, columns = np.divmod(places, piece.region.width)
    return piece.region.first + rows * piece.region.stride + columns, new


def keep(root: Path, version: Version, paths: Mapping[str, Path]) -> None:
    """Keeps a delta that was applied, where it is small enough and there is room; whatever was kept is gone."""
    forget(root)
    changed = sum(piece.changed for piece in version.delta)
    if changed > MOST * sum(record.sums.count for record in version.tensors.values()):
        return
    directory = root / _DIRECTORY
    try:
        directory.mkdir()
        for file in version.files_of(version.delta):
            shutil.copyfile(paths[file], directory / file)
        write_version(directory, msgspec.structs.replace(version, dense=()))
    except OSError:  # servers load the whole mirror then
        forget(root)


def forget(root: Path) -> None:
    """Removes what is kept."""
    shutil.rmtree(root / _DIRECTORY, ignore_errors=True)


def kept(root: Path, name: str) -> KeptDelta | None:
    """The delta to the version ``name``, where it is kept."""
    directory = root / _DIRECTORY
    try:
        version = parse_version((directory / VERSION_FILE).read_bytes(), name)
    except (OSError, ValueError):
        return None
    return KeptDelta(version, directory) if version.base is not None else None
