"""Which servers there are while a run goes on: those that a file, a directory or a name in the DNS lists now."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_DNS = "dns"


def make_lookup(where: str) -> Callable[[], tuple[str, ...]]:
    """What lists the URLs of the servers, each time that it is called; it may raise OSError or ValueError.

    Args:
      where: a file with one URL in a line (what follows a # is a comment); a directory, whose files ``*.url`` have one
        each, as ``rljax serve vllm --url-file`` writes them; or ``dns://HOST:PORT``, a server at each address that
        HOST has, such as those of a headless Service of Kubernetes.

    Raises:
      ValueError: ``where`` is none of these.
    """
    if "://" not in where:
        if not where.strip():
            raise ValueError("rollout.discovery must be a file, a directory or dns://HOST:PORT, got nothing")
        return lambda: _listed(Path(where))
    expected = f"rollout.discovery must be a path or dns://HOST:PORT, got {where!r}"
    try:
        url = urlsplit(where)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from error
    if url.scheme != _DNS or not host or port is None or url.path not in ("", "/"):
        raise ValueError(expected)
    return lambda: _resolved(host, port)


class Discovery:
    """Looks up the servers on a thread of its own, so that a name server that hangs delays nothing.

    What cannot be read changes nothing, and a new list counts once two looks in a row have found it: a file may be read
    while somebody writes it.
    """

    def __init__(self, where: str, check: Callable[[str], None], *, every_s: float = LOOK_EVERY_S) -> None:
        """Begins to look.

        Args:
          where: as ``make_lookup`` takes it.
          check: raises ValueError for what is no URL of a server.
          every_s: from one look to the next (seconds).

        Raises:
          ValueError: ``where`` is none of what it may be.
        """
        self.where, self._check, self._every_s = where, check, every_s
        self._lookup = make_lookup(where)
        self._urls: tuple[str, ...] = ()
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="rljax-discovery", daemon=True).start()

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers' URLs as found last, without doubles; () before the first look."""
        return self._urls

    def close(self) -> None:
        """Ends the looking; may be called twice."""
        self._ended.set()

    def _look(self) -> None:
        before: tuple[str, ...] = ()
        said = ""
        while not self._ended.is_set():
            try:
                found = tuple(dict.fromkeys(url.rstrip("/") for url in self._lookup()))
                for url in found:
                    self._check(url)
            except (OSError, ValueError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("%s does not list servers, those known are kept: %s", self.where, said)
            else:
                said = ""
                if found == before or not self._urls:
                    self._urls = found
                before = found
            self._ended.wait(self._every_s)


def _listed(path: Path) -> tuple[str, ...]:
    """Those that a file lists, or the files of a directory."""
    files = sorted(path.glob("*.url")) if path.is_dir() else [path]
    lines = (line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines())
    return tuple(line for line in lines if line)


def _resolved(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for *_, address in found})
    return tuple(f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in addresses)
