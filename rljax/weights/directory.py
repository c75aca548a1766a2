"""Directories of one run's weights: owned by one process, removed by it, cleaned up after owners that died."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljax.distributed.ownership import claim, provably_dead
from rljax.weights.checksum import Checksum

PROTOCOL = 3
_PREFIX = "rljax-weights-"
_OWNER = "owner.json"
PROBE = "probe.txt"


@dataclass(frozen=True)
class WeightVersion:
    """One version on disk.

    Attributes:
      path: its directory.
      tag: what the server calls it.
      dtype: of every tensor.
      num_bytes: that a server reads to come to it from the version before (bytes).
      changed_fraction: share of the elements that differ from the version before; NaN for the first.
      source: what the servers' machines pull it from (``source.open_source``); "" where servers read ``path`` itself.
    """

    path: Path
    tag: str
    dtype: str
    num_bytes: int
    changed_fraction: float
    source: str = ""


class OwnedDirectory:
    """A directory of one process for one run. Removed by :meth:`close`.

    Attributes:
      root: the directory.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        """Makes it under ``parent`` (None: in memory where there is one, else temporary files).

        Directories whose owner is provably dead (rljax.distributed.ownership) are removed first.

        Raises:
          RuntimeError: ``parent`` cannot be written.
        """
        self.parent = Path(parent) if parent is not None else memory()
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.parent)
            self.root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.parent))
            self._owner = claim(self.root / _OWNER)
        except OSError as error:
            raise RuntimeError(f"cannot write weights under {self.parent}: {error}") from error
        self.root.chmod(0o755)  # the server may run as another user

    def close(self) -> None:
        """Removes the directory; may be called twice."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._owner.release()


class WeightDirectory(OwnedDirectory):
    """One run's versions.

    Attributes:
      source: where servers' machines pull versions from; "" where servers read them in ``root``.
    """

    source = ""

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        """See OwnedDirectory."""
        super().__init__(parent)
        self.run_tag = self.root.name.removeprefix(_PREFIX) + "."
        self._count = 0

    def probe(self) -> tuple[Path, str]:
        """A file and its text; a server that reads the same text there sees the same directory."""
        path = self.root / PROBE
        path.write_text(self.run_tag)
        return path, self.run_tag

    def tag(self, policy_version: int) -> str:
        """What servers call ``policy_version`` of this run."""
        return f"{self.run_tag}{policy_version}"

    def policy_version(self, tag: str) -> int:
        """The inverse of :meth:`tag`."""
        return int(tag.removeprefix(self.run_tag))

    def write(
        self, named_tensors: Iterable[tuple[str, np.ndarray]], policy_version: int, sums: Mapping[str, Checksum]
    ) -> WeightVersion:
        """Writes one version.

        Args:
          named_tensors: (Hugging Face name, array), all of the rollout dtype already.
          policy_version: of these weights.
          sums: the checksum of each of them.

        Raises:
          ValueError: there are no tensors, or they have several dtypes.
          NotWrittenError: the directory has no room; nothing of this version is left, and the one before it is kept.
        """
        raise NotImplementedError

    def keep_only(self, version: WeightVersion) -> None:
        """Removes the versions that nobody needs any more once servers have ``version``."""
        raise NotImplementedError

    def _new_path(self, policy_version: int) -> Path:
        """Of a new version; never one used before, because vLLM has returned cached weights for such a path."""
        self._count += 1
        return self.root / f"v{policy_version:08d}-{self._count}"


def memory() -> Path:
    """A directory in this machine's memory; where there is none that can be written, that of temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def only_dtype(dtypes: Iterable[str]) -> str:
    """The one dtype of a version's tensors. Raises ValueError where there are none or several."""
    found = sorted(set(dtypes))
    if len(found) != 1:
        raise ValueError(f"tensors must have one dtype, got {found or 'no tensors'}")
    return found[0]


def _remove_abandoned(parent: Path) -> None:
    """Removes run directories whose owner is provably dead; one without a record of its owner stays."""
    for root in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone in the meantime
            if provably_dead(root / _OWNER):
                shutil.rmtree(root, ignore_errors=True)
