"""The sources from which a version is read, and the outlets that offer the files of a process there.

Both are a directory that the machines see, an HTTP server, or an object store. If several processes write a version,
each process keeps, uploads or serves the files that it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from rljax.distributed.answering import end_with_parent, tell_ready
from rljax.distributed.child import Child
from rljax.distributed.frames import Frames
from rljax.weights.access import KEY_FILE, find_key_file, listen, private_address, read_api_key, serving_key
from rljax.weights.format import VERSION_FILE, FileRecord

log = logging.getLogger(__name__)

PLACES = 8  # the number of servers from which files of one version are fetched at the same time
_STREAMS = 4  # the number of connections to each server
RANGE_BYTES = 32 * 2**20
PATIENCE_S = 300.0
_NAME = re.compile(r"(v\d+-\d+/)?[\w-]+\.(json|safetensors|txt)")


class SourceError(OSError):
    """An error of a source that cannot be read; the message is one line that names it."""


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
    """An HTTP server of files with byte ranges, such as ``serve``. Requests without an answer are repeated.

    A file comes in ranges over several connections. A range that breaks off is continued from its last byte. If the
    record of a file names another server, the file comes from there, with the same key. Its address must be private.
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


class Outlet:
    """The way in which files of a process reach the machines of the servers. This class is for a shared directory.

    ``url`` is the URL of the server that has the files, or "". ``takes_files`` says whether files leave this machine.
    """

    url = ""
    takes_files: ClassVar[bool] = False

    def add(self, path: Path, run: str) -> None:
        """Offers ``path``, which is written: a version's directory, or the file of the probe. Raises OSError.

        ``run`` is the name of the directory of process 0.
        """

    def remove(self, run: str, version: str = "") -> None:
        """Withdraws a version, or all versions of a run. The owner of the files removes them. Raises OSError."""

    def close(self) -> None:
        """Releases everything at the end of the run; may be called twice."""


class StoreOutlet(Outlet):
    """A folder of an object store, with a folder for each run. A version's ``version.json`` is uploaded last."""

    takes_files = True

    def __init__(self, url: str) -> None:
        """Opens the folder at ``url``.

        Raises RuntimeError if the store cannot be opened, for example because no package for such URLs is installed.
        """
        try:
            self._fs, self._root = open_store(url.rstrip("/"))
        except Exception as error:
            raise RuntimeError(f"weights cannot be served from {url}: {error}") from error

    def add(self, path: Path, run: str) -> None:
        """Uploads a file, or moves the files of a version into the store. Raises OSError."""
        files = [path] if path.is_file() else sorted(path.iterdir(), key=lambda file: file.name == VERSION_FILE)
        for file in files:
            place = f"{self._root}/{run}/{file.relative_to(path.parent)}"
            try:
                self._fs.put_file(str(file), place)
            except Exception as error:
                raise OSError(f"{place} cannot be written: {error}") from error
            if file.suffix == ".safetensors":
                file.unlink()

    def remove(self, run: str, version: str = "") -> None:
        """Deletes the folder of a version, or of the run."""
        folder = f"{self._root}/{run}/{version}".rstrip("/")
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)


class HttpOutlet(Outlet):
    """An HTTP server of a directory: a child process that runs ``serve``, which is replaced whenever it ends.

    This process holds the socket, so requests wait until a new server answers them.
    """

    def __init__(self, root: Path, *, host: str, port: int, api_key_file: Path | None) -> None:
        """Starts the server of ``root`` at the address ``host`` and a port (0: a free one).

        Every request must bring the key in ``api_key_file``, if there is one. Raises RuntimeError if the server does
        not start.
        """
        try:
            key_file = serving_key(host, api_key_file, f"{KEY_FILE} must name a key file")
            self._listening, self.url = listen(host, port)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"weights cannot be served on {host}:{port}: {error}") from error
        self._failure: RuntimeError | None = None
        settings = root, host, self._listening.fileno(), key_file
        self._child = Child(
            "server of weights", "rljax.weights.source:serve", settings, files=[self._listening.fileno()]
        )
        try:
            self._child.wait_until_ready()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._keep, name="rljax-weight-server", daemon=True).start()

    def add(self, path: Path, run: str) -> None:
        """Copies nothing, because ``path`` is served directly. Raises OSError if no server can be started."""
        if self._failure is not None:
            raise OSError(str(self._failure))

    def close(self) -> None:
        """Ends the server; may be called twice."""
        self._child.stop()
        self._listening.close()

    def _keep(self) -> None:
        said = "the server of weights at %s %s; another one is started"
        try:
            self._child.keep(lambda end: log.warning(said, self.url, end))
        except RuntimeError as error:
            self._failure = error


def serve(frames: Frames, root: Path, host: str, listening: int, key_file: Path | None) -> None:
    """Serves the files in ``root``, in byte ranges, until the parent process ends. A child process runs this program.

    ``listening`` is the descriptor of the socket, which is bound to ``host``. Every request must bring the key in
    ``key_file``, if there is one.
    """
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from rljax.weights.http_limits import limited_server

    end_with_parent(frames)
    if key_file is not None:
        try:
            read_api_key(key_file)
        except ValueError as error:
            tell_ready(frames, str(error))
            return

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not _NAME.fullmatch(name) or not (root / name).is_file():
            return PlainTextResponse("no such file\n", 404)
        return FileResponse(root / name, media_type="application/octet-stream")

    server = limited_server([Route("/{name:path}", file)], host, key_file, keep_alive_s=60)
    tell_ready(frames)
    server.run(sockets=[socket.socket(fileno=listening)])
