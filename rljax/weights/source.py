"""Where a version is read from: a directory that is seen here, HTTP, or an object store."""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rljax.weights.addresses import private_address
from rljax.weights.api_key import find_key_file, read_api_key
from rljax.weights.object_stores import open_store
from rljax.weights.version import FileRecord

PLACES = 8  # servers that files of one version come from at the same time
_STREAMS = 4  # connections to each of them
_RANGE_BYTES = 32 * 2**20
PATIENCE_S = 300.0


class SourceError(OSError):
    """A source cannot be read; the message is one line that names it."""


class Source(Protocol):
    """Files by name, as ``VERSION/FILE``."""

    def read(self, name: str) -> bytes:
        """A small file. Raises SourceError."""

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """A file of that size as a path here, under ``folder`` where it has to be copied. Raises SourceError.

        Several threads may call it.
        """

    def close(self) -> None:
        """Ends its connections; nothing is read after that."""


def open_source(url: str, patience_s: float = PATIENCE_S) -> Source:
    """The source at a directory's path, at ``http://``, or at any other URL that fsspec knows.

    Over HTTP it is given up when nothing has come for ``patience_s`` (seconds).
    """
    if re.match(r"https?://", url):
        return HttpSource(url, patience_s)
    return StoreSource(url) if "://" in url else DirectorySource(Path(url))


class DirectorySource:
    """A directory that the trainer and this machine both see."""

    def __init__(self, root: Path) -> None:
        """Reads nothing yet."""
        self._root = root

    def read(self, name: str) -> bytes:
        """See Source."""
        with _told(self._root / name):
            return (self._root / name).read_bytes()

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """See Source: the file itself."""
        with _told(self._root / name):
            if (self._root / name).stat().st_size != record.bytes:
                raise OSError(f"it has not {record.bytes} bytes")
        return self._root / name

    def close(self) -> None:
        """See Source: there is none."""


class StoreSource:
    """An object store."""

    def __init__(self, url: str) -> None:
        """Reads nothing yet. Raises SourceError where nothing is installed that knows such URLs."""
        with _told(url):
            self._fs, self._root = open_store(url)

    def read(self, name: str) -> bytes:
        """See Source."""
        with _told(f"{self._root}/{name}"):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """See Source."""
        path = folder / name.replace("/", "-")
        with _told(f"{self._root}/{name}"):
            self._fs.get_file(f"{self._root}/{name}", str(path))
        return path

    def close(self) -> None:
        """See Source: they are fsspec's own, which others of this process use too."""


class HttpSource:
    """A server of files with byte ranges, such as ``rollout/served/weight_server.py``; asked again while it is gone.

    A file comes in ranges over several connections. A range that breaks off goes on where it was. A file whose record
    says that another server has it comes from there, with the same key: that must be at a private address.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """The key is that of ``$RLJAX_API_KEY_FILE``, where there is one. Raises ValueError for one that is none."""
        import httpx

        self._url, self._patience_s = url.rstrip("/"), patience_s
        key_file = find_key_file(None)
        headers = {"Authorization": f"Bearer {read_api_key(key_file)}"} if key_file else {}
        limits, timeout = httpx.Limits(max_connections=PLACES * _STREAMS), httpx.Timeout(20.0)
        self._client = httpx.Client(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        self._gone: tuple[type[Exception], ...] = (httpx.TransportError,)

    def read(self, name: str) -> bytes:
        """See Source."""
        url, found = f"{self._url}/{name}", list[bytes]()

        def get() -> bool:
            reply = self._client.get(url)
            self._check(reply, url, 200)
            found.append(reply.content)
            return True

        self._patiently(url, get)
        return found[0]

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """See Source."""
        path, url = folder / name.replace("/", "-"), f"{_private(record.at) or self._url}/{name}"
        with _told(path), open(path, "wb") as file:
            file.truncate(record.bytes)
            number = file.fileno()
            with ThreadPoolExecutor(_STREAMS) as pool:
                ranges = range(0, record.bytes, _RANGE_BYTES)
                ends = (min(first + _RANGE_BYTES, record.bytes) for first in ranges)
                list(pool.map(lambda first, end: self._range(url, number, first, end), ranges, ends))
        return path

    def close(self) -> None:
        """See Source."""
        self._client.close()

    def _range(self, url: str, number: int, first: int, end: int) -> None:
        """Bytes ``first`` to ``end`` of a file into the same place of the open file ``number``."""
        place = first

        def get() -> bool:
            nonlocal place
            headers = {"Range": f"bytes={place}-{end - 1}", "Accept-Encoding": "identity"}
            before = place
            with self._client.stream("GET", url, headers=headers) as reply:
                self._check(reply, url, 206)
                try:
                    for content in reply.iter_raw():
                        os.pwrite(number, content[: end - place], place)
                        place += min(len(content), end - place)
                except self._gone:
                    if place == before:
                        raise
            return place == end

        self._patiently(url, get, lambda: place)

    def _check(self, reply: Any, url: str, wanted: int) -> None:
        if reply.status_code >= 500:
            raise self._gone[0](f"status {reply.status_code}")
        if reply.status_code != wanted:
            raise SourceError(f"{url} answered with status {reply.status_code} instead of {wanted}")

    def _patiently(self, url: str, get: Callable[[], bool], progress: Callable[[], int] = lambda: 0) -> None:
        """Calls ``get`` until it is done; while nothing moves, less and less often, and no longer than the patience."""
        moved, place, pause = time.monotonic(), progress(), 0.1
        while True:
            try:
                if get():
                    return
                reason = "the connection was closed"
            except self._gone as error:
                reason = str(error) or type(error).__name__
            now = time.monotonic()
            if progress() != place:
                moved, place, pause = now, progress(), 0.1
            elif now - moved > self._patience_s:
                raise SourceError(f"{url} gave nothing for {self._patience_s:g} s: {reason}")
            time.sleep(pause)
            pause = min(5.0, 2 * pause)


def _private(url: str) -> str:
    """``url``, which the key may be sent to. Raises SourceError where it is none of a loopback or private address."""
    if url:
        try:
            private_address(urllib.parse.urlsplit(url).hostname or "")
        except ValueError as error:
            raise SourceError(f"files at {url:.80} are not read: {error}") from error
    return url


@contextlib.contextmanager
def _told(name: str | Path) -> Iterator[None]:
    """Within it what a library raises becomes a SourceError that names the file."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{name} cannot be read: {str(error) or type(error).__name__}") from error
