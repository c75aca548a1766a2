"""The name that two sides give to equal weights: a hash over safetensors, however they are sharded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rljax.weights.safetensors_file import entries


def weights_hash(directory: str | os.PathLike[str]) -> str:
    """``sha256:...`` over names, dtypes, shapes and bytes of the safetensors in a directory, however they are sharded.

    Raises:
      ValueError: there is no safetensors file.
    """
    tensors = [entry for path in Path(directory).glob("*.safetensors") for entry in _tensors(path)]
    if not tensors:
        raise ValueError(f"no *.safetensors in {os.fspath(directory)}")
    digest = hashlib.sha256()
    for name, kind, content in sorted(tensors, key=lambda entry: entry[0]):
        digest.update(f"{name} {kind}\n".encode())
        digest.update(content.data)
    return f"sha256:{digest.hexdigest()}"


def _tensors(path: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype and shape, and bytes (mapped, not read) of each tensor."""
    for name, entry, content in entries(np.memmap(path, np.uint8, mode="r")):
        yield name, f"{entry['dtype']} {entry['shape']}", content
