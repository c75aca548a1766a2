"""Brings a machine's mirror to a version: by the deltas since the one that it holds, else from the newest dense one.

    python -m rljax.weights.pull SOURCE VERSION MIRROR [--keep-delta]

Servers of one machine call it side by side; the first does the work. It needs neither jax nor torch nor vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rljax.weights import safetensors_file
from rljax.weights.mirror import THREADS, DamagedError, Mirror, State
from rljax.weights.source import PLACES, Source, SourceError, open_source
from rljax.weights.version import VERSION_FILE, Piece, Version, is_newer, parse_version

_LONGEST_CHAIN = 1000


@dataclass
class Pulled:
    """What a pull did.

    Attributes:
      tag: of the version that the mirror holds now.
      bytes: that were read from the source (bytes).
      seconds: all of it (seconds).
      fetch_s: of them, for reading the files.
      check_s: of them, for checksums: of the files, of the mirror before a delta, and of what it holds then.
      deltas: that were applied.
      dense: whether a dense version was taken.
      repaired: what was wrong with the mirror before, or with a delta; "" where nothing was.
    """

    tag: str = ""
    bytes: int = 0
    seconds: float = 0.0
    fetch_s: float = 0.0
    check_s: float = 0.0
    deltas: int = 0
    dense: bool = False
    repaired: str = ""


def pull(source: Source, name: str, mirror: Mirror, *, keep_delta: bool = False) -> Pulled:
    """Brings ``mirror`` to the version in directory ``name`` of ``source``.

    ``keep_delta``: where one delta does it, that is kept beside the mirror (``weights.kept_delta``).

    Raises:
      SourceError: the source cannot be read.
      DamagedError: what it has does not have the checksums that it must have.
      ValueError: the mirror holds a newer version, for another server of this machine.
      OSError: the mirror cannot be written.
    """
    began, checks, done = time.monotonic(), mirror.check_s, Pulled()
    with mirror.locked():
        state, version = mirror.state, _read(source, name)
        if state is not None and is_newer(state, version):
            raise ValueError(f"{mirror.root} holds {state.name} already, which is newer than {name}")
        done.tag = version.tag
        if not mirror.holds(version):
            try:
                _bring(source, version, mirror, done, state, keep_delta)
            except DamagedError as error:
                done.repaired = str(error)
                mirror.clear()
                _bring(source, version, mirror, done, None, keep_delta)
    done.seconds = time.monotonic() - began
    done.check_s += mirror.check_s - checks
    return done


def _bring(
    source: Source, version: Version, mirror: Mirror, done: Pulled, state: State | None, keep_delta: bool = False
) -> None:
    """From ``state``, or from a dense version."""
    chain, from_dense = _chain(source, version, state)
    if not from_dense:
        mirror.check()
    for each in chain:
        dense = each is chain[0] and from_dense
        with _fetched(source, each, each.dense if dense else each.delta, mirror.root, done) as paths:
            if dense:
                mirror.fill(each, paths.__getitem__)
            else:
                mirror.apply(each, paths.__getitem__, keep=keep_delta and len(chain) == 1)
        done.dense |= dense
        done.deltas += not dense


def _chain(source: Source, version: Version, state: State | None) -> tuple[list[Version], bool]:
    """The versions to take, oldest first, and whether they begin with a dense one instead of what the mirror holds.

    Of the two ways the one with fewer bytes.
    """
    chain, dense = [version], 0  # of the chain's first ones, the last is dense
    while True:
        oldest = chain[-1]
        base = oldest.base
        if not dense and oldest.dense:
            dense = len(chain)
        if state is not None and base is not None and base.digest == state.digest:
            anchor = chain[max(0, dense - 1)]
            from_anchor = anchor.num_bytes(anchor.dense) + _delta_bytes(chain[: dense - 1])
            if not dense or _delta_bytes(chain) <= from_anchor:
                return chain[::-1], False
            return chain[:dense][::-1], True
        if dense and (state is None or base is None or len(chain) == _LONGEST_CHAIN):
            return chain[:dense][::-1], True
        if base is None:
            raise DamagedError(f"there is no dense version from which {version.name} could be reached")
        try:
            before = _read(source, base.name)
        except SourceError:  # versions before an anchor are removed
            if dense:
                return chain[:dense][::-1], True
            raise
        if before.digest != base.digest:
            raise DamagedError(f"{oldest.name} is against a {before.name} with other checksums than that has")
        chain.append(before)


def _delta_bytes(versions: Sequence[Version]) -> int:
    return sum(version.num_bytes(version.delta) for version in versions)


def _read(source: Source, name: str) -> Version:
    try:
        return parse_version(source.read(f"{name}/{VERSION_FILE}"), name)
    except ValueError as error:
        raise DamagedError(str(error)) from error


@contextlib.contextmanager
def _fetched(
    source: Source, version: Version, pieces: Sequence[Piece], root: Path, done: Pulled
) -> Iterator[dict[str, Path]]:
    """The files that have ``pieces``, by name, with the checksums that they must have; copies are gone at the end."""
    began, folder = time.monotonic(), root / "incoming"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        paths = _fetch(source, version, version.files_of(pieces), folder)
        done.bytes += version.num_bytes(pieces)
        fetched = time.monotonic()
        done.fetch_s += fetched - began
        with ThreadPoolExecutor(THREADS) as pool:
            for file, xxh3 in zip(paths, pool.map(safetensors_file.xxh3_of, paths.values()), strict=True):
                if xxh3 != version.files[file].xxh3:
                    raise DamagedError(f"{version.name}/{file} has not the checksum that its version says")
        done.check_s += time.monotonic() - fetched
        yield paths
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(source: Source, version: Version, files: Sequence[str], folder: Path) -> dict[str, Path]:
    """The files by name, from all places that have some at the same time.

    In an order of this pull's own, so that machines that pull side by side do not all begin at one place.
    """
    of_place: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        of_place[version.files[file].at].append(file)
    places = random.sample(list(of_place.values()), len(of_place))
    failed = threading.Event()

    def fetch(names: Sequence[str]) -> dict[str, Path]:
        paths = {}
        for file in names:
            if failed.is_set():
                break
            try:
                paths[file] = source.fetch(f"{version.name}/{file}", version.files[file], folder)
            except BaseException:
                failed.set()
                raise
        return paths

    with ThreadPoolExecutor(PLACES) as pool:
        return {file: path for paths in pool.map(fetch, places) for file, path in paths.items()}


def main(argv: Sequence[str]) -> int:
    """The program: prints what was done as one line of JSON; 1 and one line on stderr where it could not be done."""
    parser = argparse.ArgumentParser(prog="python -m rljax.weights.pull", description=__doc__)
    parser.add_argument("source", help="directory, http:// URL, or URL of an object store")
    parser.add_argument("version", help="name of the version's directory there")
    parser.add_argument("mirror", type=Path, help="directory of this machine; made where there is none")
    parser.add_argument("--keep-delta", action="store_true", help="keep a single delta for servers that load it alone")
    wanted = parser.parse_args(argv)
    try:
        with contextlib.closing(open_source(wanted.source)) as source:
            done = pull(source, wanted.version, Mirror(wanted.mirror), keep_delta=wanted.keep_delta)
        print(json.dumps(asdict(done)))
    except (DamagedError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
