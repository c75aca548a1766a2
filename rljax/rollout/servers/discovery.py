"""The list of servers while a run goes on, from a file, a directory or a name in the DNS."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rljax.weights.access import http_url

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""The time from one look at the list to the next (seconds)."""


def make_lookup(where: str) -> Callable[[], tuple[str, ...]]:
    """Returns a function that reads the URLs of the servers in ``where``. The function may raise OSError or ValueError.

    A file has one URL in each line, and may have comments after a #. A directory has files ``*.url`` with one URL each,
    as ``rljax serve --url-file`` writes them. ``dns://HOST:PORT`` stands for a server at each address of HOST, such as
    a headless Service of Kubernetes.

    Raises:
      ValueError: ``where`` is empty, or a URL of another form.
    """
    if "://" not in where:
        if not where.strip():
            raise ValueError("rollout.discovery must be a file, a directory or dns://HOST:PORT, got nothing")
        return lambda: _read_urls(Path(where))
    expected = f"rollout.discovery must be a path or dns://HOST:PORT, got {where!r}"
    try:
        url = urlsplit(where)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from error
    if url.scheme != "dns" or not host or port is None or url.path not in ("", "/"):
        raise ValueError(expected)
    return lambda: _resolve(host, port)


class Discovery:
    """The URLs of the servers. A thread of its own looks them up, so that a slow name server delays nothing.

    A list that cannot be read changes nothing. While no server is known, a list counts at once. Later a new one counts
    only if it was read twice in succession, because a file may be read when only half of it is written.
    """

    def __init__(self, where: str, check: Callable[[str], None]) -> None:
        """Starts the thread, which reads the list in ``where`` every ``LOOK_EVERY_S`` seconds.

        ``check`` is a function that raises ValueError if its argument is not the URL of a server. Raises ValueError if
        ``where`` has none of the forms of :func:`make_lookup`.
        """
        self.where, self._check = where, check
        self._lookup = make_lookup(where)
        self.urls: tuple[str, ...] = ()  # the URLs of the last list that counts, each once; () before the first
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="rljax-discovery", daemon=True).start()

    def close(self) -> None:
        """Ends the thread. It may be called twice."""
        self._ended.set()

    def _look(self) -> None:
        before: tuple[str, ...] = ()
        said = ""
        while not self._ended.is_set():
            try:
                listed = tuple(dict.fromkeys(url.rstrip("/") for url in self._lookup()))
                for url in listed:
                    self._check(url)
            except (OSError, ValueError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("%s does not list servers, those known are kept: %s", self.where, said)
            else:
                said = ""
                if listed == before or not self.urls:
                    self.urls = listed
                before = listed
            self._ended.wait(LOOK_EVERY_S)


def _read_urls(path: Path) -> tuple[str, ...]:
    """Returns the URLs in a file, or in the files ``*.url`` of a directory."""
    files = sorted(path.glob("*.url")) if path.is_dir() else [path]
    lines = (line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines())
    return tuple(line for line in lines if line)


def _resolve(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    return tuple(http_url(each, port) for each in addresses)
