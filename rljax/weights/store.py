"""The versions of one run on the trainer's side: written, offered to servers, and removed when no server needs them."""

from __future__ import annotations

import grp
import logging
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljax.distributed.files import OwnedDirectory, check_room
from rljax.errors import NotWrittenError
from rljax.weights.format import PREFIX, Base, Checksum, TensorRecord, Version, write_version
from rljax.weights.outlets import HttpOutlet, Outlet, StoreOutlet
from rljax.weights.publish_config import PublishConfig
from rljax.weights.writer import PartWriter, StreamWriter, Writer, WrittenFiles, whole_parts

log = logging.getLogger(__name__)

PROBE = "probe.txt"
ANCHOR_EVERY = 16
"""The most versions from one that is written whole to the next one. The versions between them are deltas."""
_MODES = {"owner": 0o700, "group": 0o750, "all": 0o755}  # the modes of a directory, by ``PublishConfig.readable_by``


@dataclass(frozen=True)
class WeightVersion:
    """One version on disk."""

    path: Path  # the directory of the version
    tag: str  # the name by which servers call the version
    dtype: str  # the dtype of all tensors
    num_bytes: int  # the bytes that a server with the version before must read to load this one
    changed_fraction: float  # the share of elements that differ from the version before; NaN for the first version
    source: str = ""  # the ``WeightDirectory.source`` of the place that has the version


class WeightDirectory(OwnedDirectory):
    """The directory of a run's versions: the newest one that is written whole (the anchor), and all later ones.

    If the writer writes deltas, each version has one unless it is the first, or its delta would take half of the whole
    or more. ``source`` is the argument of ``open_source`` on a server's machine. It is empty where servers read the
    directory themselves. ``run_tag`` is the beginning of every version's tag.
    """

    def __init__(
        self,
        publish: PublishConfig,
        parent: str | os.PathLike[str] | None = None,
        *,
        api_key_file: Path | None = None,
        writer: Writer | None = None,
        anchor_every: int = ANCHOR_EVERY,
    ) -> None:
        """Makes the directory in ``parent``, or in this machine's memory, and opens the outlet for the servers.

        ``api_key_file`` has the key of every HTTP request. ``writer`` gets the tensors of :meth:`write`; None means one
        for whole tensors of this process. If it writes deltas, each ``anchor_every``-th version is also written whole,
        or an earlier one if deltas crowd a disk. The store "shared" ignores ``writer`` and writes each version whole.

        Raises:
          RuntimeError: The directory cannot be written or given to its readers, the HTTP server does not start, or the
            store cannot be opened.
          ValueError: This machine has no group of the name in ``publish.readable_by``.
        """
        super().__init__(PREFIX, parent)
        self.run_tag = self.root.name.removeprefix(PREFIX) + "."
        self._writer = StreamWriter() if publish.store == "shared" else writer or PartWriter(whole_parts)
        self._anchor_every, readable_by = anchor_every, publish.readable_by
        self._chain: list[Version] = []  # from an anchor on, which is dense
        self._count, self._taken, self._readable_by = 0, 0, readable_by  # ``_taken``: bytes of deltas since the anchor
        self._outlet, self.source = Outlet(), str(self.root) if publish.store == "directory" else ""
        try:
            if publish.store == "http":
                self._outlet = HttpOutlet(self.root, host=publish.host, port=publish.port, api_key_file=api_key_file)
                self.source = self._outlet.url
            elif "://" in publish.store:
                self._outlet = StoreOutlet(publish.store)
                self.source = f"{publish.store.rstrip('/')}/{self.root.name}"
            let_read(self.root, readable_by)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RuntimeError(f"publish.readable_by {readable_by}: {self.root}: {error.strerror}") from error
            raise

    def probe(self) -> tuple[Path, str]:
        """Writes a file into the directory, if it is not there, and returns its path and text.

        A server that reads the same text sees the same directory. Raises OSError.
        """
        path = self.root / PROBE
        if not path.exists():  # a server may be reading it
            path.write_text(self.run_tag)
            let_read(path, self._readable_by)
            self._outlet.add(path, self.root.name)
        return path, self.run_tag

    def tag(self, policy_version: int) -> str:
        """Returns the name by which servers call ``policy_version`` of this run."""
        return f"{self.run_tag}{policy_version}"

    def policy_version(self, tag: str) -> int:
        """Returns the policy version whose tag is ``tag``. This is the inverse of :meth:`tag`."""
        return int(tag.removeprefix(self.run_tag))

    def write(self, tensors: Any, policy_version: int, sums: Mapping[str, Checksum]) -> WeightVersion:
        """Writes one version and offers it to the servers.

        ``tensors`` is what the writer takes: for the default writer, pairs (Hugging Face name, array).
        ``sums`` has the checksum of each tensor by Hugging Face name.

        Raises:
          ValueError: There are no tensors, they have several dtypes, or their names are not the names in ``sums``.
          NotWrittenError: The version cannot be written or offered. Its directory is removed, and the version before
            it is kept.
        """
        # A path is never used twice: vLLM has returned the cached weights of such a path.
        self._count += 1
        directory, tag = self.root / f"v{policy_version:08d}-{self._count}", self.tag(policy_version)
        try:
            directory.mkdir(0o700)
            summary = self._writer.collect(tensors, directory)
            if len(summary.dtypes) != 1:
                raise ValueError(f"tensors must have one dtype, got {list(summary.dtypes) or 'no tensors'}")
            if unlike := sums.keys() ^ summary.shapes.keys():
                raise ValueError(f"tensors without a checksum, or checksums without a tensor: {sorted(unlike)[:4]}")
            dense, delta = WrittenFiles(), WrittenFiles()
            own, half = summary.delta_bytes or 0, summary.dense_bytes / 2
            has_delta = summary.delta_bytes is not None and own < half
            if has_delta:
                delta = self._writer.write("delta", directory)
            crowds = self._taken + own > half and not self._outlet.takes_files
            if not has_delta or crowds or len(self._chain) - self._anchor() >= self._anchor_every:
                dense = self._writer.write("dense", directory)
            version = Version(
                directory.name,
                tag,
                summary.dtypes[0],
                {name: TensorRecord(summary.shapes[name], sums[name]) for name in sums},
                delta.files | dense.files,
                dense.pieces,
                delta.pieces,
                Base(self._chain[-1].name, self._chain[-1].digest) if delta.pieces else None,
            )
            write_version(directory, version)
            let_read(directory, self._readable_by)
            self._outlet.add(directory, self.root.name)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            self._writer.keep_only({each.name for each in self._chain})
            if isinstance(error, OSError):
                raise NotWrittenError(f"cannot write weights to {directory}: {error}") from error
            raise
        self._chain.append(version)
        self._taken = own * has_delta + self._taken * (not dense.pieces)
        fraction = math.nan if summary.changed is None else summary.changed / summary.elements
        pulled_bytes = version.num_bytes(version.delta or version.dense)
        num_bytes = pulled_bytes if self.source else summary.dense_bytes
        return WeightVersion(directory, tag, version.dtype, num_bytes, fraction, self.source)

    def drop_old(self) -> None:
        """Removes the versions before the newest anchor. Call it once the servers have the last version."""
        self._chain = self._chain[self._anchor() :]
        kept = {each.name for each in self._chain}
        old = [path for path in self.root.glob("v*") if path.name not in kept]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)  # NFS keeps a file that a process still maps; the next call goes on
            self._withdraw(path.name)
        if old:
            self._writer.keep_only(kept)

    def close(self) -> None:
        """Closes the outlet and removes the directory; may be called twice."""
        self._withdraw()
        self._outlet.close()
        super().close()

    def _withdraw(self, version: str = "") -> None:
        """Withdraws a version, or all versions. What a store does not delete stays there, and a line says so."""
        try:
            self._outlet.remove(self.root.name, version)
        except Exception as error:
            place = f"{self.source}/{version}".rstrip("/")
            log.warning("%s is not needed any more, and could not be deleted: %s; delete it yourself", place, error)

    def _anchor(self) -> int:
        return max(index for index, each in enumerate(self._chain) if each.dense)


def let_read(path: Path, readable_by: str) -> None:
    """Gives a file, or a directory and all in it, the permissions that ``readable_by`` asks for, whatever the umask.

    ``readable_by`` is ``PublishConfig.readable_by``. Raises ValueError if this machine has no such group, and OSError
    if the owner is not in it.
    """
    kind, _, name = readable_by.partition(":")
    try:
        group = grp.getgrnam(name).gr_gid if kind == "group" else -1
    except KeyError:
        raise ValueError(f"publish.readable_by: this machine has no group {name!r}") from None
    for each in (*path.rglob("*"), path):
        if kind == "group":
            os.chown(each, -1, group)
        each.chmod(_MODES[kind] & (0o777 if each.is_dir() else 0o666))


def check_weight_room(parent: str | os.PathLike[str] | None, needed: int) -> None:
    """Raises RuntimeError if ``parent`` cannot be written, or has no room for ``needed`` bytes.

    None for ``parent`` means this machine's memory. Directories that dead runs left in ``parent`` are removed first.
    """
    directory = OwnedDirectory(PREFIX, parent)
    directory.close()
    check_room(directory.parent, needed, "rollout.transfer_dir")
