"""The name that two sides give to equal weights: a hash over safetensors, however they are sharded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path


def weights_hash(directory: str | os.PathLike[str]) -> str:
    """``sha256:...`` over names, dtypes, shapes and bytes of the safetensors in a directory, however they are sharded.

    Raises:
      ValueError: there is no safetensors file.
    """
    tensors = sorted(
        (entry for path in Path(directory).glob("*.safetensors") for entry in _tensors(path)),
        key=lambda entry: entry[0],
    )
    if not tensors:
        raise ValueError(f"no *.safetensors in {os.fspath(directory)}")
    digest = hashlib.sha256()
    for name, kind, path, start, size in tensors:
        digest.update(f"{name} {kind}\n".encode())
        with path.open("rb") as file:
            file.seek(start)
            while size and (chunk := file.read(min(size, 1 << 24))):
                digest.update(chunk)
                size -= len(chunk)
    return f"sha256:{digest.hexdigest()}"


def _tensors(path: Path) -> Iterator[tuple[str, str, Path, int, int]]:
    """Name, dtype and shape, file, first byte and number of bytes of each tensor (the safetensors header is JSON)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", path, 8 + length + first, last - first
