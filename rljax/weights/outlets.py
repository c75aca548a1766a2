"""The outlets from which a run's versions are read: a shared directory, an HTTP server, or an object store.

If several processes write a version, each process keeps, uploads or serves the files that it wrote.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from pathlib import Path
from typing import ClassVar

from rljax.distributed.answering import end_with_parent, tell_ready
from rljax.distributed.child import Child
from rljax.distributed.frames import Frames
from rljax.weights.access import KEY_FILE, listen, read_api_key, serving_key
from rljax.weights.format import VERSION_FILE
from rljax.weights.source import open_store

log = logging.getLogger(__name__)

_NAME = re.compile(r"(v\d+-\d+/)?[\w-]+\.(json|safetensors|txt)")


class Outlet:
    """The way in which files of a process reach the machines of the servers. This class is for a shared directory.

    ``url`` is the URL of the server that has the files, or "". ``takes_files`` says whether ``add`` moves them away.
    """

    url = ""
    takes_files: ClassVar[bool] = False

    def add(self, path: Path, run: str) -> None:
        """Offers ``path`` to the servers. Nothing is done for a shared directory; other outlets may raise OSError.

        ``path`` is the directory of a written version or the file ``store.PROBE``. ``run`` names process 0's directory.
        """

    def remove(self, run: str, version: str = "") -> None:
        """Withdraws the version of this name, or with "" all of a run. Files on the disk are left to their owner."""

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
        """Uploads a file, or all files of a version. Safetensors are then removed from this machine. Raises OSError."""
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
        """Deletes the folder of a version, or of the run. Errors of the store are raised as they are."""
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
            "server of weights", "rljax.weights.outlets:serve", settings, files=[self._listening.fileno()]
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
