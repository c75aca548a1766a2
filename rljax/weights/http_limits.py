"""The limits of our own HTTP servers on their clients: who may ask, how many may connect, and for how long.

Connections are accepted before any key is asked for. Without limits a stranger could take all file descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from rljax.weights.access import RefuseWebPages, RequireKey

WAIT_S = 5.0
"""The longest time that a connection may keep the server waiting for the head of a request (seconds)."""
_FILES = 320  # the most file descriptors of a server; two fifths are for connections that wait to be accepted
_UNREAD_S = 60.0  # the longest time that a client may leave a reply unread (seconds)


def limited_server(
    routes: Sequence[Route], host: str, key_file: Path | None, *, keep_alive_s: int = 5
) -> uvicorn.Server:
    """Returns a server of ``routes`` and ``/health``, which is to be bound to ``host`` and does not run yet.

    Every request must bring the key in ``key_file``, if there is one. Requests that web pages make are refused. An idle
    connection is kept for ``keep_alive_s`` seconds.
    """
    guards = [Middleware(RefuseWebPages, host=None if key_file else host)]
    guards += [Middleware(RequireKey, key_file=key_file)] if key_file else []
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Three quarters of the file descriptors stay for the rest of the process.
    files = _FILES if limit == resource.RLIM_INFINITY else max(10, min(_FILES, limit // 4))
    config = uvicorn.Config(
        Starlette(routes=[Route("/health", _health), *routes], middleware=guards),
        http=LimitedConnection,
        ws="none",
        log_level="error",
        access_log=False,
        limit_concurrency=files * 3 // 5,
        backlog=files * 2 // 5,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


class LimitedConnection(H11Protocol):
    """A connection that is closed if its client keeps the server waiting.

    The head of a request must come within ``WAIT_S`` seconds, and so must the unread rest of a body after its answer.
    If there are too many connections, a new one replaces another that waits for its client: the one that has waited
    longest since its start, its last answer or its last byte of a body. If none waits, the new one is closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Prepares a connection without a time limit; ``connection_made`` sets the first one."""
        super().__init__(*args, **options)
        self._since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a new connection. If there are too many, this connection or another one is closed."""
        super().connection_made(transport)
        self._close_in(WAIT_S)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = (each for each in self.connections if isinstance(each, LimitedConnection) and each is not self)
            incomplete = (each for each in others if each.conn.their_state in (h11.IDLE, h11.SEND_BODY))
            min(incomplete, key=lambda each: each._since, default=self).close()

    def data_received(self, data: bytes) -> None:
        """Takes bytes that the client sent, and begins or ends the limited wait for further ones."""
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            self._since = self.loop.time()
        is_answered = self.cycle is not None and self.cycle.response_complete
        # The server waits for the client, while the application does not wait.
        waits = self.conn.their_state is h11.IDLE or (is_answered and self.conn.their_state is h11.SEND_BODY)
        if not waits:
            self._close_in(None)
        elif self._timer is None:
            self._close_in(WAIT_S)

    def on_response_complete(self) -> None:
        """Limits the wait for the unread rest of a request's body. uvicorn limits the wait for the next request."""
        super().on_response_complete()
        self._since = self.loop.time()
        self._close_in(WAIT_S if self.conn.their_state is h11.SEND_BODY else None)

    def pause_writing(self) -> None:
        """Begins to wait for the client to read its reply. The connection is closed after ``_UNREAD_S`` seconds."""
        super().pause_writing()
        self._close_in(_UNREAD_S)

    def resume_writing(self) -> None:
        """Ends the wait of ``pause_writing``, because the client has read a part of its reply."""
        super().resume_writing()
        self._close_in(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the time limit of a connection that is closed already."""
        self._close_in(None)
        super().connection_lost(exc)

    def close(self) -> None:
        """Closes the connection at once, and takes it out of the number of connections."""
        self.connections.discard(self)
        self.transport.abort()

    def _close_in(self, seconds: float | None) -> None:
        """Closes the connection after ``seconds``, in place of any earlier time; None: it is not closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.close)


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok\n")
