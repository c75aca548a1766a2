"""The places that a version is read from: a directory that this machine sees, an HTTP server, or an object store."""

from __future__ import annotations

import contextlib
import os
import re
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rljax.weights.access import find_key_file, private_address, read_api_key
from rljax.weights.format import FileRecord

PLACES = 8  # the number of servers from which files of one version are fetched at the same time
_STREAMS = 4  # the number of connections to each server
RANGE_BYTES = 32 * 2**20
PATIENCE_S = 300.0


class SourceError(OSError):
    """An error of a source that cannot be read; the message is one line that names it."""


class Source(ABC):
    """A place from which files are read by name, such as ``VERSION/FILE``."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Returns the content of a small file. Raises SourceError."""

    @abstractmethod
    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """Returns the path of the file ``name`` on this machine: in ``folder`` if it has to be copied.

        ``record`` has the file's size and place. Several threads may call this method. Raises SourceError if the file
        cannot be read.
        """

    def close(self) -> None:  # noqa: B027 (most sources have no connection)
        """Ends the connections of this source; nothing is read after that."""


def open_source(url: str, patience_s: float = PATIENCE_S) -> Source:
    """Opens a source: the path of a directory, an ``http://`` URL, or any other URL that fsspec knows.

    A read over HTTP fails after ``patience_s`` seconds without a byte. Raises SourceError if fsspec cannot open such a
    URL, and ValueError if the key file for HTTP cannot be used.
    """
    if re.match(r"https?://", url):
        return HttpSource(url, patience_s)
    return StoreSource(url) if "://" in url else DirectorySource(Path(url))


def open_store(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the URL's path in it. It does not ask the store anything yet."""
    from fsspec.core import url_to_fs

    # Listings are not cached: another machine may have written since.
    store, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    if hasattr(store, "auto_mkdir"):
        store.auto_mkdir = True  # makes the folders of file:// URLs, because object stores have none
    return store, path


class DirectorySource(Source):
    """A directory that the trainer and this machine both see. Nothing is copied."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes:
        """Reads a small file."""
        with _source_errors(self._root / name):
            return (self._root / name).read_bytes()

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """Returns the path of the file itself. Raises SourceError if it cannot be read, or has another size."""
        with _source_errors(self._root / name):
            if (self._root / name).stat().st_size != record.bytes:
                raise OSError(f"it does not have {record.bytes} bytes")
        return self._root / name


class StoreSource(Source):
    """An object store. Its connections belong to fsspec, and other code in this process uses them, too."""

    def __init__(self, url: str) -> None:
        """Stores the place without reading from it. Raises SourceError if fsspec cannot open such a URL."""
        with _source_errors(url):
            self._fs, self._root = open_store(url)

    def read(self, name: str) -> bytes:
        """Downloads a small file."""
        with _source_errors(f"{self._root}/{name}"):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """Downloads a file into ``folder``."""
        path = folder / name.replace("/", "-")
        with _source_errors(f"{self._root}/{name}"):
            self._fs.get_file(f"{self._root}/{name}", str(path))
        return path


class HttpSource(Source):
    """An HTTP server of files with byte ranges, such as ``weights.server``. Requests without an answer are repeated.

    A file comes in ranges over several connections. A range that breaks off is continued from its last byte. A file
    whose record names another server comes from that server, with the same key. That server's address must be private.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """Reads the key that ``$RLJAX_API_KEY_FILE`` names, if any. Raises ValueError if the key cannot be used."""
        import httpx

        self._url, self._patience_s = url.rstrip("/"), patience_s
        key_file = find_key_file(None)
        headers = {"Authorization": f"Bearer {read_api_key(key_file)}"} if key_file else {}
        limits, timeout = httpx.Limits(max_connections=PLACES * _STREAMS), httpx.Timeout(20.0)
        self._client = httpx.Client(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        self._gone: type[Exception] = httpx.TransportError

    def read(self, name: str) -> bytes:
        """Downloads a small file."""
        url, contents = f"{self._url}/{name}", list[bytes]()

        def get() -> bool:
            reply = self._client.get(url)
            self._check(reply, url, 200)
            contents.append(reply.content)
            return True

        self._patiently(url, get)
        return contents[0]

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """Downloads a file into ``folder``, in ranges, from the server that its record names."""
        if record.at:
            try:
                private_address(urllib.parse.urlsplit(record.at).hostname or "")
            except ValueError as error:
                raise SourceError(f"files at {record.at:.80} are not read: {error}") from error
        path, url = folder / name.replace("/", "-"), f"{record.at or self._url}/{name}"
        with _source_errors(path), open(path, "wb") as file:
            file.truncate(record.bytes)
            number = file.fileno()
            with ThreadPoolExecutor(_STREAMS) as pool:
                ranges = range(0, record.bytes, RANGE_BYTES)
                ends = (min(first + RANGE_BYTES, record.bytes) for first in ranges)
                list(pool.map(lambda first, end: self._range(url, number, first, end), ranges, ends))
        return path

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def _range(self, url: str, number: int, first: int, end: int) -> None:
        """Reads the bytes ``first`` to ``end`` of a file into the same place of the open file ``number``."""
        place = first

        def get() -> bool:
            nonlocal place
            headers = {"Range": f"bytes={place}-{end - 1}", "Accept-Encoding": "identity"}
            before = place
            try:
                with self._client.stream("GET", url, headers=headers) as reply:
                    self._check(reply, url, 206)
                    for content in reply.iter_raw():
                        os.pwrite(number, content[: end - place], place)
                        place += min(len(content), end - place)
                if place == before:
                    raise self._gone("the connection was closed")
            except self._gone:
                if place == before:
                    raise
            return place == end

        self._patiently(url, get)

    def _check(self, reply: Any, url: str, wanted: int) -> None:
        if reply.status_code >= 500:
            raise self._gone(f"status {reply.status_code}")
        if reply.status_code != wanted:
            raise SourceError(f"{url} answered with status {reply.status_code} instead of {wanted}")

    def _patiently(self, url: str, get: Callable[[], bool]) -> None:
        """Calls ``get`` until it returns True. A False means that some bytes came.

        If no byte came, ``get`` raises a transport error and is called again after a longer pause. Raises SourceError
        after ``patience_s`` seconds without a byte.
        """
        moved, pause = time.monotonic(), 0.1
        while True:
            try:
                if get():
                    return
                moved, pause = time.monotonic(), 0.1
            except self._gone as error:
                if time.monotonic() - moved > self._patience_s:
                    reason = str(error) or type(error).__name__
                    raise SourceError(f"{url} sent no byte for {self._patience_s:g} s: {reason}") from error
            time.sleep(pause)
            pause = min(5.0, 2 * pause)


@contextlib.contextmanager
def _source_errors(name: str | Path) -> Iterator[None]:
    """Turns every exception of the block into a SourceError that names the file."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{name} cannot be read: {str(error) or type(error).__name__}") from error
