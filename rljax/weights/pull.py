"""Brings a machine's mirror to a version: by the deltas since the version that it holds, or from a dense version.

The servers of one machine pull side by side; the first one does the work. This module needs no jax, torch or vLLM.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rljax.distributed.answering import answer_requests, end_with_parent
from rljax.distributed.frames import Frames
from rljax.weights.format import VERSION_FILE, Version, is_newer, parse_version, xxh3_of
from rljax.weights.mirror import THREADS, DamagedError, Mirror
from rljax.weights.source import PLACES, Source, open_source

_LONGEST_CHAIN = 1000  # no run has so many versions between two anchors


@dataclass
class Pulled:
    """The work and the time of a pull, or its failure."""

    tag: str = ""  # the tag of the version that the mirror holds now
    bytes: int = 0  # the size of the weight files that were read from the source
    seconds: float = 0.0  # the time of the whole pull
    fetch_s: float = 0.0  # the part of ``seconds`` for reading the files
    check_s: float = 0.0  # the part for checksums: of the files, and of the mirror before a delta and at the end
    deltas: int = 0  # the number of deltas that were applied
    dense: bool = False  # whether a dense version was taken
    repaired: str = ""  # the damage that was found, in the mirror or in a file, before the pull was repeated
    error: str = ""  # one line that says why the version could not be pulled


def pull(source: Source, name: str, mirror: Mirror) -> Pulled:
    """Brings a mirror to the version ``name``, and returns the work and the time of it.

    Raises:
      SourceError: The source cannot be read.
      DamagedError: Files of the source are damaged or do not fit each other.
      ValueError: The mirror holds a newer version already, which another server of this machine has asked for.
      OSError: The mirror cannot be written.
    """
    began, checks, done = time.monotonic(), mirror.check_s, Pulled()
    with mirror.locked():
        held, version = mirror.version, _read(source, name)
        if held is not None and is_newer(held, version):
            raise ValueError(f"{mirror.root} holds {held.name} already, which is newer than {name}")
        done.tag = version.tag
        if held is None or (held.tag, held.digest) != (version.tag, version.digest):
            try:
                _bring(source, version, mirror, done, held)
            except DamagedError as error:
                done.repaired = str(error)
                mirror.clear()
                _bring(source, version, mirror, done, None)
    done.seconds = time.monotonic() - began
    done.check_s += mirror.check_s - checks
    return done


def _bring(source: Source, version: Version, mirror: Mirror, done: Pulled, held: Version | None) -> None:
    """Brings the mirror to ``version`` from ``held``, or from a dense version. Adds the work to ``done``."""
    chain, from_dense = _chain(source, version, held)
    if not from_dense:
        mirror.check()
    for each in chain:
        dense = each is chain[0] and from_dense
        with _fetched(source, each, dense, mirror.root, done) as paths:
            if dense:
                mirror.fill(each, paths)
            else:
                mirror.apply(each, paths)
        done.dense |= dense
        done.deltas += not dense


def _chain(source: Source, version: Version, held: Version | None) -> tuple[list[Version], bool]:
    """Returns the versions to take, oldest first, and whether the first of them is taken whole.

    They go back from ``version`` to a version that is a delta to ``held``, or is dense. Raises SourceError if a version
    cannot be read, and DamagedError if the versions do not fit each other.
    """
    chain = [version]
    while len(chain) <= _LONGEST_CHAIN:
        oldest, base = chain[-1], chain[-1].base
        if held is not None and base is not None and base.digest == held.digest:
            return chain[::-1], False
        if oldest.dense or base is None:
            return chain[::-1], True
        chain.append(_read(source, base.name))
        if chain[-1].digest != base.digest:
            raise DamagedError(f"{oldest.name} is a delta to {base.name} with other checksums")
    raise DamagedError(f"{version.name} is {_LONGEST_CHAIN} deltas away from a dense version")


def _read(source: Source, name: str) -> Version:
    try:
        return parse_version(source.read(f"{name}/{VERSION_FILE}"), name)
    except ValueError as error:
        raise DamagedError(str(error)) from error


@contextlib.contextmanager
def _fetched(source: Source, version: Version, dense: bool, root: Path, done: Pulled) -> Iterator[dict[str, Path]]:
    """Fetches a version's dense files, or the files of its delta, and yields their paths by name.

    It compares the hashes first, and raises DamagedError if one is wrong. Copies under ``root`` are removed after the
    block.
    """
    began, folder = time.monotonic(), root / "incoming"
    pieces = version.dense if dense else version.delta
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        paths = _fetch(source, version, version.files_of(pieces), folder)
        done.bytes += version.num_bytes(pieces)
        fetched = time.monotonic()
        done.fetch_s += fetched - began
        with ThreadPoolExecutor(THREADS) as pool:
            for file, xxh3 in zip(paths, pool.map(xxh3_of, paths.values()), strict=True):
                if xxh3 != version.files[file].xxh3:
                    raise DamagedError(f"{version.name}/{file} does not have the recorded checksum")
        done.check_s += time.monotonic() - fetched
        yield paths
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(source: Source, version: Version, files: Sequence[str], folder: Path) -> dict[str, Path]:
    """Fetches files and returns their paths by name. Files of different servers are fetched at the same time.

    The servers are asked in random order, so that machines that pull side by side do not all begin at one server.
    """
    of_place: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        of_place[version.files[file].at].append(file)
    places = random.sample(list(of_place.values()), len(of_place))

    def fetch(names: Sequence[str]) -> dict[str, Path]:
        return {file: source.fetch(f"{version.name}/{file}", version.files[file], folder) for file in names}

    with ThreadPoolExecutor(PLACES) as pool:
        return {file: path for paths in pool.map(fetch, places) for file, path in paths.items()}


def answer(frames: Frames, source: str, mirror: Path) -> None:
    """Pulls the versions that the parent process names, and replies ``Pulled``. A child process runs this program."""

    def take(name: str) -> Pulled:
        try:
            with contextlib.closing(open_source(source)) as opened:
                return pull(opened, name, Mirror(mirror))
        except (DamagedError, OSError, ValueError) as error:
            return Pulled(error=" ".join(str(error).split()))

    end_with_parent(frames)
    answer_requests(frames, take)
