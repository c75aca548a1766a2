"""The sources from which a version is read: a directory that this machine sees, an HTTP server, or an object store."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import urllib.parse
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
    """An error of a source that cannot be read. The message names the file or the URL."""


class Source:
    """A source of files by name, such as ``VERSION/FILE``. This class reads a directory.

    The trainer and this machine both see the directory, so nothing is copied.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")

    def read(self, name: str) -> bytes:
        """Returns the content of a small file. Raises SourceError."""
        with _source_errors(f"{self._root}/{name}"):
            return self._read(f"{self._root}/{name}")

    def fetch(self, name: str, record: FileRecord, folder: Path) -> Path:
        """Returns the path of the file ``name`` on this machine: in ``folder`` if it has to be copied.

        ``record`` has the file's size and server. Several threads may call this method. Raises SourceError if the file
        cannot be read.
        """
        with _source_errors(f"{self._root}/{name}"):
            return self._fetch(name, record, folder / name.replace("/", "-"))

    def close(self) -> None:
        """Ends the connections of this source; nothing is read after that."""

    def _read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def _fetch(self, name: str, record: FileRecord, copy: Path) -> Path:
        path = Path(self._root, name)
        if path.stat().st_size != record.bytes:
            raise OSError(f"it does not have {record.bytes} bytes")
        return path


def open_source(url: str, patience_s: float = PATIENCE_S) -> Source:
    """Opens a source: the path of a directory, an ``http://`` URL, or any other URL that fsspec knows.

    A read over HTTP fails after ``patience_s`` seconds without a byte. Raises SourceError if fsspec cannot open such a
    URL, and ValueError if the key file for HTTP cannot be used.
    """
    if re.match(r"https?://", url):
        return HttpSource(url, patience_s)
    return StoreSource(url) if "://" in url else Source(url)


def open_store(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the URL's path in it. It does not ask the store anything yet."""
    from fsspec.core import url_to_fs

    # Listings are not cached: another machine may have written since.
    store, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    if hasattr(store, "auto_mkdir"):
        store.auto_mkdir = True  # makes the folders of file:// URLs, because object stores have none
    return store, path


class StoreSource(Source):
    """An object store. Its connections belong to fsspec, and other code in this process uses them, too."""

    def __init__(self, url: str) -> None:
        """Stores the URL without reading from it. Raises SourceError if fsspec cannot open such a URL."""
        with _source_errors(url):
            self._fs, root = open_store(url)
        super().__init__(root)

    def _read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(path))

    def _fetch(self, name: str, record: FileRecord, copy: Path) -> Path:
        self._fs.get_file(f"{self._root}/{name}", str(copy))
        return copy


class HttpSource(Source):
    """An HTTP server of files with byte ranges, such as ``outlets.serve``. Requests without an answer are repeated.

    A file comes in ranges over several connections. A range that breaks off is continued from its last byte. If the
    record of a file names another server, that server gives the file, with the same key. Its address must be private.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """Reads the key that ``$RLJAX_API_KEY_FILE`` names, if any. Raises ValueError if the key cannot be used."""
        import httpx

        super().__init__(url)
        key_file = find_key_file(None)
        headers = {"Authorization": f"Bearer {read_api_key(key_file)}"} if key_file else {}
        limits, timeout = httpx.Limits(max_connections=PLACES * _STREAMS), httpx.Timeout(20.0)
        self._client = httpx.Client(headers=headers, limits=limits, timeout=timeout, trust_env=False)
        self._patience_s, self._gone = patience_s, httpx.TransportError

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def _read(self, path: str) -> bytes:
        content = bytearray()
        self._get(path, 0, None, lambda part, place: content.extend(part))
        return bytes(content)

    def _fetch(self, name: str, record: FileRecord, copy: Path) -> Path:
        if record.at:
            try:
                private_address(urllib.parse.urlsplit(record.at).hostname or "")
            except ValueError as error:
                raise SourceError(f"files at {record.at:.80} are not read: {error}") from error
        firsts = range(0, record.bytes, RANGE_BYTES)
        ends = [min(first + RANGE_BYTES, record.bytes) for first in firsts]
        with open(copy, "wb") as file, ThreadPoolExecutor(_STREAMS) as pool:
            file.truncate(record.bytes)
            get = functools.partial(self._get, f"{record.at or self._root}/{name}")
            write = functools.partial(os.pwrite, file.fileno())
            list(pool.map(lambda first, end: get(first, end, write), firsts, ends))
        return copy

    def _get(self, url: str, place: int, end: int | None, take: Callable[[bytes, int], Any]) -> None:
        """Calls ``take`` with the bytes of a file from ``place`` to ``end`` (None: to its end), and with their places.

        Raises SourceError if the server refuses, or after ``patience_s`` seconds without a byte.
        """
        moved, pause = time.monotonic(), 0.1
        while end is None or place < end:
            headers = {"Range": f"bytes={place}-{'' if end is None else end - 1}", "Accept-Encoding": "identity"}
            try:
                with self._client.stream("GET", url, headers=headers) as reply:
                    if reply.status_code >= 500:
                        raise self._gone(f"status {reply.status_code}")
                    if reply.status_code != 206:
                        raise SourceError(f"{url} answered with status {reply.status_code} instead of 206")
                    for content in reply.iter_raw():
                        take(content, place)
                        place += len(content)
                        moved, pause = time.monotonic(), 0.1
                if end not in (None, place):
                    raise SourceError(f"{url} ends at byte {place} instead of {end}")
                return
            except self._gone as error:
                if time.monotonic() - moved > self._patience_s:
                    reason = str(error) or type(error).__name__
                    raise SourceError(f"{url} sent no byte for {self._patience_s:g} s: {reason}") from error
            time.sleep(pause)
            pause = min(5.0, 2 * pause)


@contextlib.contextmanager
def _source_errors(name: str) -> Iterator[None]:
    """Turns every exception of the block into a SourceError that names the file."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{name} cannot be read: {str(error) or type(error).__name__}") from error
