"""The newest version of the weights in the memory of a server's machine, which all servers of the machine load.

A mirror is a dense version in a directory, one file a tensor, which deltas change in place. A lock keeps readers out
while it changes. Every bit is checked. Before a delta is applied, each file must still have the hash that was recorded
when it was last known to be right. After the delta each tensor must have the trainer's checksum.

The plugins load this module inside servers, where there is no jax. A worker loads versions from the mirror, or from
directories that a trainer has named in its handshake.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rljax.distributed.files import check_room, memory_directory, remove_abandoned
from rljax.distributed.ownership import claim
from rljax.weights.delta import decode_piece
from rljax.weights.format import (
    PROTOCOL,
    VERSION_FILE,
    Checksum,
    FileRecord,
    Piece,
    Region,
    Version,
    create_file,
    mapped,
    read_version,
    write_version,
    xxh3_of,
)
from rljax.weights.source import open_source
from rljax.weights.sums import changed_checksum, named_few, region_checksum

THREADS = min(8, os.cpu_count() or 1)
MIRROR_DIR = "RLJAX_MIRROR_DIR"
"""The environment variable that names a directory for mirrors; by default they are in memory."""

_PREFIX = "rljax-mirror-"
_USERS = "users"
_PROBE_S = 10.0  # the longest wait for a source that does not answer


class DamagedError(RuntimeError):
    """An error of weights whose bits are not as expected; the message names the first few tensors."""


class Mirror:
    """A directory with one dense version. It is changed under ``locked()`` and read under ``locked(shared=True)``.

    ``check_s`` counts the seconds spent on the hashes of files and the checksums of whole tensors. The checksums after
    a delta come from the changed elements, while the delta is applied, and are not counted.
    """

    def __init__(self, root: Path) -> None:
        """Makes the directory ``root``, for this user only, if there is none. Raises OSError."""
        self.root, self.check_s = root, 0.0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Locks the mirror in the block (flock): against everybody else, or with ``shared`` only against changes."""
        with open(self.root / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield

    @property
    def version(self) -> Version | None:
        """The version that the mirror holds; None if there is none, or if a change was not completed."""
        try:
            return read_version(self.root)
        except (OSError, ValueError):
            return None

    def holds(self, version: Version) -> bool:
        """Returns whether the mirror's ``version.json`` has the tag and the digest of ``version``."""
        own = self.version
        return own is not None and (own.tag, own.digest) == (version.tag, version.digest)

    def check(self) -> None:
        """Raises DamagedError if the mirror holds no version, or a file no longer has its recorded hash."""
        version = self.version
        if version is None:
            raise DamagedError(f"{self.root} holds no whole version")

        def differs(piece: Piece) -> bool:
            path = self.root / piece.file
            return not path.is_file() or xxh3_of(path) != version.files[piece.file].xxh3

        with self._timed(), ThreadPoolExecutor(THREADS) as pool:
            wrong = pool.map(differs, version.dense)
            changed = [piece.tensor for piece, found in zip(version.dense, wrong, strict=True) if found]
        _refuse(changed, "not as it came")

    def fill(self, version: Version, paths: Mapping[str, Path]) -> None:
        """Replaces the content of the mirror by a dense version.

        ``paths`` has the paths of the version's files by name. The caller has compared their hashes. Raises
        DamagedError if a tensor does not have the version's checksum, or a file cannot be used. The mirror then holds
        no version.
        """
        self.clear()
        sources = {file: mapped(paths[file]) for file in version.files_of(version.dense)}
        pieces = _by_tensor(version.dense)

        def take(number: int, name: str) -> str:
            record, file = version.tensors[name], f"{number:05d}.safetensors"
            whole = Region.whole(record.shape)
            if [piece.region for piece in pieces[name]] == [whole]:
                (piece,) = pieces[name]
                create_file(self.root / file, name, version.dtype, record.shape, sources[piece.file][piece.key])
                return file
            create_file(self.root / file, name, version.dtype, record.shape)
            matrix = mapped(self.root / file, writable=True)[name].reshape(whole.rows, whole.width)
            for piece in pieces[name]:
                region, bits = piece.region, sources[piece.file][piece.key]
                if bits.dtype != matrix.dtype or bits.size != region.size:
                    raise ValueError(f"{piece.file} has another {piece.key}")
                rows, columns = slice(region.row, region.row + region.rows), slice(region.column, None)
                matrix[rows, columns][:, : region.width] = bits.reshape(region.rows, region.width)
            return file

        def summed(name: str) -> Checksum:
            return region_checksum(mapped(self.root / files[name])[name], Region.whole(version.tensors[name].shape))

        with ThreadPoolExecutor(THREADS) as pool:
            with _damaged_if_unusable(version):
                files = dict(zip(version.tensors, pool.map(take, itertools.count(), version.tensors), strict=True))
            with self._timed():
                largest_first = sorted(files, key=lambda name: -version.tensors[name].sums.count)
                sums = dict(zip(largest_first, pool.map(summed, largest_first), strict=True))
        self._record(version, files, sums, None)

    def apply(self, version: Version, paths: Mapping[str, Path]) -> None:
        """Applies a delta to the version that the mirror holds, which must be the delta's base.

        ``paths`` has the paths of the delta's files by name. The caller has compared their hashes. Raises DamagedError
        if a tensor does not have the version's checksum, or a file cannot be used. The mirror then holds no version.
        """
        before = self.version
        assert before is not None
        assert version.base is not None
        assert before.digest == version.base.digest
        (self.root / VERSION_FILE).unlink()
        files = {piece.tensor: piece.file for piece in before.dense}
        sources = {file: mapped(paths[file]) for file in version.files_of(version.delta)}
        pieces = _by_tensor(version.delta)

        def take(name: str) -> Checksum:
            sums = before.tensors[name].sums
            changing = [piece for piece in pieces[name] if piece.changed]
            if not changing:
                return sums
            flat = mapped(self.root / files[name], writable=True)[name]
            for piece in changing:
                places, new = decode_piece(piece, sources[piece.file], flat.dtype)
                sums = changed_checksum(sums, flat[places], new, places)
                flat[places] = new
            return sums

        with ThreadPoolExecutor(THREADS) as pool, _damaged_if_unusable(version):
            sums = dict(zip(version.tensors, pool.map(take, version.tensors), strict=True))
        self._record(version, {name: files[name] for name in sums}, sums, before)

    def clear(self) -> None:
        """Removes the version that the mirror holds."""
        (self.root / VERSION_FILE).unlink(missing_ok=True)
        for path in self.root.glob("*.safetensors"):
            path.unlink()

    def _record(
        self, version: Version, files: Mapping[str, str], sums: Mapping[str, Checksum], before: Version | None
    ) -> None:
        """Compares the tensors' checksums with the version's, and writes ``version.json``.

        ``before`` is the version before a delta: files of unchanged tensors keep their records. Raises DamagedError.
        """
        _refuse([name for name in files if sums[name] != version.tensors[name].sums], f"other than in {version.tag}")

        def record(name: str) -> FileRecord:
            if before is not None and before.tensors[name] == version.tensors[name]:
                return before.files[files[name]]
            path = self.root / files[name]
            return FileRecord(path.stat().st_size, xxh3_of(path))

        with self._timed(), ThreadPoolExecutor(THREADS) as pool:
            records = dict(zip(files.values(), pool.map(record, files), strict=True))
        dense = tuple(Piece(name, Region.whole(version.tensors[name].shape), files[name], name) for name in files)
        tensors = {name: version.tensors[name] for name in files}
        write_version(self.root, Version(version.name, version.tag, version.dtype, tensors, records, dense))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.check_s += time.monotonic() - began


@contextlib.contextmanager
def _damaged_if_unusable(version: Version) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError) as error:
        raise DamagedError(f"{version.name} cannot be used: {error}") from error


def _by_tensor(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.tensor].append(piece)
    return found


def _refuse(names: list[str], how: str) -> None:
    if names:
        count = "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
        raise DamagedError(f"{count} {how}: {named_few(names)}")


class WorkerWeights:
    """The versions that one worker may load."""

    def __init__(self) -> None:
        self._roots: frozenset[Path] = frozenset()
        self._pulls: Pulls | None = None

    @property
    def pulls(self) -> Pulls:
        """The pulls from the source that the last handshake named. Raises ValueError if none has named a source."""
        if self._pulls is None:
            raise ValueError("no trainer has shown from where weights are pulled")
        return self._pulls

    def show(self, probe_path: str, probe_text: str, protocol: int, source: str = "", version_bytes: int = 0) -> None:
        """Stores where a trainer's versions are, after a proof that this process sees the same place.

        The proof is that this process reads ``probe_text`` in the trainer's file ``probe_path``. If ``source`` is
        empty, weights are read in the directory of that file. Otherwise they are pulled from ``source``, where the file
        is read by its name.

        Raises:
          ValueError: The protocols differ, or this process does not read ``probe_text``.
          RuntimeError: The mirror is empty and has no room for two versions of ``version_bytes``: a version and the
            files from which it is made.
          OSError: The source cannot be read, or the mirror cannot be written.
        """
        if protocol != PROTOCOL:
            raise ValueError(
                f"rljax protocol: the trainer speaks {protocol}, this server {PROTOCOL}; install the same rljax on both"
            )
        probe = Path(probe_path)
        if source:
            with contextlib.closing(open_source(source, _PROBE_S)) as opened:
                text = opened.read(probe.name).decode()
            if text != probe_text:
                raise ValueError(f"{source} is not where this trainer's weights are")
            if self._pulls is None or self._pulls.source != source:
                if self._pulls is not None:
                    self._pulls.close()
                self._pulls = Pulls(source, probe_text)
            if self._pulls.mirror.version is None:
                check_room(self._pulls.mirror.root, version_bytes, MIRROR_DIR)
            return
        if not probe.is_file() or probe.read_text() != probe_text:
            raise ValueError(f"this server does not see the trainer's file {probe}: one shared directory is needed")
        self._roots |= {probe.resolve().parent}

    @contextlib.contextmanager
    def version(self, path: str, tag: str) -> Iterator[tuple[Path, list[str]]]:
        """Yields a version's directory and the names of its safetensors files.

        An empty ``path`` means this machine's own mirror, which must hold the version already. The mirror does not
        change during the block.

        Raises:
          ValueError: The version has another tag than ``tag``, cannot be loaded from its files, or lies in no directory
            that a trainer has named in its handshake.
        """
        if not path:
            mirror = self.pulls.mirror
            with mirror.locked(shared=True):
                yield mirror.root, _loadable_files(mirror.root, tag)
            return
        directory = Path(path).resolve()
        if directory.parent not in self._roots:
            raise ValueError(f"{directory} lies in no directory that a trainer has shown at its handshake")
        yield directory, _loadable_files(directory, tag)


class Pulls:
    """The pulls of one server process. Each pull is a program of its own, so that the server is not delayed.

    ``mirror`` is the mirror of ``source`` that all server processes of this machine share.
    """

    def __init__(self, source: str, run_tag: str) -> None:
        """Joins the users of the mirror of the run ``run_tag``, and removes mirrors whose users are all dead.

        Raises OSError if the mirror cannot be written.
        """
        parent = Path(os.environ.get(MIRROR_DIR) or memory_directory())
        remove_abandoned(parent, _PREFIX, f"{_USERS}/*")
        self.source = source
        self.mirror = Mirror(parent / f"{_PREFIX}{hashlib.sha256(run_tag.encode()).hexdigest()[:16]}")
        users = self.mirror.root / _USERS
        users.mkdir(exist_ok=True)
        self._user = claim(users / f"{os.getpid()}.json")
        self._name = ""
        self._running: subprocess.Popen[str] | None = None
        self._result: dict[str, Any] = {}  # the result of the pull of ``_name``, once it has ended

    def begin(self, name: str) -> None:
        """Starts to pull the version ``name`` (``pull.pull``), unless this pull already runs. Ends any other pull."""
        if self._name != name or self._running is None:
            self._stop()
            words = [sys.executable, "-m", "rljax.weights.pull", self.source, name, str(self.mirror.root)]
            self._running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self._name, self._result = name, {}

    def result(self, name: str) -> dict[str, Any] | None:
        """Returns the result of the pull of ``name``, or None while it runs. May be called several times.

        After success these are the fields of ``pull.Pulled`` and an empty ``error``. After a failure, or if ``name`` is
        not being pulled, ``error`` has the message, and ``seconds`` is 0.
        """
        if self._name != name:
            return {"error": f"{name} is not being pulled", "seconds": 0.0}
        if self._running is not None:
            if self._running.poll() is None:
                return None
            printed, messages = self._running.communicate()
            status, self._running = self._running.returncode, None
            failed = {"error": messages.strip()[-500:] or f"the pull ended with status {status}", "seconds": 0.0}
            self._result = failed if status else {**json.loads(printed), "error": ""}
        return self._result

    def close(self) -> None:
        """Ends a running pull and leaves the mirror, which its last user removes. May be called twice."""
        self._stop()
        self._user.release()
        with contextlib.suppress(FileNotFoundError):  # another user that left has removed it
            if not any((self.mirror.root / _USERS).iterdir()):
                shutil.rmtree(self.mirror.root, ignore_errors=True)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def _loadable_files(directory: Path, tag: str) -> list[str]:
    """Returns the names of the files of a dense version in which each tensor is whole and has its own name as key.

    Raises ValueError if the version has another tag than ``tag`` or is not of this form.
    """
    try:
        version = read_version(directory)
    except OSError as error:
        raise ValueError(f"{directory / VERSION_FILE} cannot be read: {error.strerror}") from error
    if version.tag != tag:
        raise ValueError(f"{directory} holds {version.tag}, the update is for {tag}")
    for piece in version.dense:
        whole = piece.region == Region.whole(version.tensors[piece.tensor].shape)
        if not whole or piece.key != piece.tensor or version.files[piece.file].at:
            raise ValueError(f"{directory} does not have {piece.tensor} whole, under its name, in a file of its own")
    if not version.dense:
        raise ValueError(f"{directory} is a delta, and must be pulled")
    return version.files_of(version.dense)
