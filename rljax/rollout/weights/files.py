"""Weights to a vLLM server: a new directory of safetensors for each version, then the update in its order.

The directory is one that trainer and server both see; in memory (``/dev/shm``) where there is one. vLLM has returned
cached weights for a path it had seen, so each version has a new path.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rljax.errors import NotWrittenError
from rljax.ownership import claim, provably_dead

PROTOCOL = 2
_MEMORY = Path("/dev/shm")
_PREFIX = "rljax-weights-"
_OWNER = "owner.json"
_SAMPLE = 65_536  # elements of a tensor compared between versions


@dataclass(frozen=True)
class WeightVersion:
    """One version on disk.

    Attributes:
      path: its directory.
      tag: what the server calls it.
      dtype: of every tensor.
      num_bytes: of all tensors (bytes).
      changed_fraction: share of the elements that differ from the version before; NaN for the first. Tensors of more
        than 65,536 elements count by an evenly spaced sample of that many.
    """

    path: Path
    tag: str
    dtype: str
    num_bytes: int
    changed_fraction: float


class WeightFiles:
    """The versions of one run, the current one alone kept. Owned by one process; removed by :meth:`close`."""

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        """Makes the run's directory under ``parent`` (None: in memory where there is one, else temporary files).

        Directories whose owner is provably dead (rljax.ownership) are removed first.

        Raises:
          RuntimeError: ``parent`` cannot be written.
        """
        default = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.parent = Path(parent) if parent is not None else default
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.parent)
            self.root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.parent))
            self._owner = claim(self.root / _OWNER)
        except OSError as error:
            raise RuntimeError(f"cannot write weights under {self.parent}: {error}") from error
        self.root.chmod(0o755)  # the server may run as another user
        self.run_tag = self.root.name.removeprefix(_PREFIX) + "."
        self._samples: dict[str, np.ndarray] = {}
        self._count = 0

    def probe(self) -> tuple[Path, str]:
        """A file and its text; a server that reads the same text there sees the same directory."""
        path = self.root / "probe.txt"
        path.write_text(self.run_tag)
        return path, self.run_tag

    def tag(self, policy_version: int) -> str:
        """What servers call ``policy_version`` of this run."""
        return f"{self.run_tag}{policy_version}"

    def policy_version(self, tag: str) -> int:
        """The inverse of :meth:`tag`."""
        return int(tag.removeprefix(self.run_tag))

    def write(self, named_tensors: Iterable[tuple[str, np.ndarray]], policy_version: int) -> WeightVersion:
        """Writes one version, tensor by tensor, never more than one in memory besides what the iterable holds.

        Args:
          named_tensors: (Hugging Face name, array), all of the rollout dtype already.
          policy_version: of these weights.

        Raises:
          ValueError: there are no tensors, or they have several dtypes.
          NotWrittenError: the directory has no room; nothing of this version is left, and the one before it is kept.
        """
        self._count += 1
        directory, tag = self.root / f"v{policy_version:08d}-{self._count}", self.tag(policy_version)
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
        if len(dtypes) != 1:
            raise ValueError(f"tensors must have one dtype, got {sorted(dtypes) or 'no tensors'}")
        return WeightVersion(directory, tag, dtypes.pop(), num_bytes, np.nan if first else changed / elements)

    def keep_only(self, version: WeightVersion) -> None:
        """Removes every other version."""
        for path in self.root.glob("v*"):
            if path != version.path:
                shutil.rmtree(path)

    def close(self) -> None:
        """Removes the run's directory; may be called twice."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._owner.release()

    def _changed(self, name: str, array: np.ndarray) -> float:
        """Share of ``array`` that differs from the last version, and remembers it for the next."""
        flat = array.reshape(-1)
        sample = flat[:: -(-flat.size // _SAMPLE)].copy() if flat.size else flat
        before, self._samples[name] = self._samples.get(name), sample
        if before is None or before.shape != sample.shape:
            return 1.0
        bits = np.dtype(f"u{sample.dtype.itemsize}")
        return float(np.mean(before.view(bits) != sample.view(bits))) if sample.size else 0.0


def _remove_abandoned(parent: Path) -> None:
    """Removes run directories whose owner is provably dead; one without a record of its owner stays."""
    for root in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone in the meantime
            if provably_dead(root / _OWNER):
                shutil.rmtree(root, ignore_errors=True)
