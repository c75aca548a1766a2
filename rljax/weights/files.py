"""Weights as a new directory of safetensors for each version, which servers that see it read themselves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rljax.errors import NotWrittenError
from rljax.weights.checksum import Checksum
from rljax.weights.directory import WeightDirectory, WeightVersion, only_dtype

_SAMPLE = 65_536  # elements of a tensor compared between versions


class WeightFiles(WeightDirectory):
    """The versions of one run, the current one alone kept.

    ``changed_fraction`` is a sample's: tensors of more than 65,536 elements count by that many, evenly spaced.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        """See WeightDirectory."""
        super().__init__(parent)
        self._samples: dict[str, np.ndarray] = {}

    def write(
        self, named_tensors: Iterable[tuple[str, np.ndarray]], policy_version: int, sums: Mapping[str, Checksum]
    ) -> WeightVersion:
        """See WeightDirectory: tensor by tensor, never more than one in memory besides what the iterable holds."""
        del sums
        directory, tag = self._new_path(policy_version), self.tag(policy_version)
        files: list[str] = []
        dtypes: set[str] = set()
        num_bytes, elements, changed = 0, 0, 0.0
        first = not self._samples
        try:
            directory.mkdir()
            for name, array in named_tensors:
                changed += self._changed(name, array) * array.size
                files.append(f"{len(files):05d}.safetensors")
                save_file({name: np.ascontiguousarray(array)}, directory / files[-1])
                dtypes.add(array.dtype.name)
                num_bytes += array.nbytes
                elements += array.size
            (directory / "manifest.json").write_text(json.dumps({"tag": tag, "files": files}))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise NotWrittenError(f"cannot write weights to {directory}: {error}") from error
        dtype, fraction = only_dtype(dtypes), np.nan if first else changed / elements
        return WeightVersion(directory, tag, dtype, num_bytes, fraction)

    def keep_only(self, version: WeightVersion) -> None:
        """See WeightDirectory: every other version."""
        for path in self.root.glob("v*"):
            if path != version.path:
                shutil.rmtree(path)

    def _changed(self, name: str, array: np.ndarray) -> float:
        """Share of ``array`` that differs from the last version, and remembers it for the next."""
        flat = array.reshape(-1)
        sample = flat[:: -(-flat.size // _SAMPLE)].copy() if flat.size else flat
        before, self._samples[name] = self._samples.get(name), sample
        if before is None or before.shape != sample.shape:
            return 1.0
        bits = np.dtype(f"u{sample.dtype.itemsize}")
        return float(np.mean(before.view(bits) != sample.view(bits))) if sample.size else 0.0
