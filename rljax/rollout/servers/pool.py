"""The servers of one client: the state of each, and the choice of the next one.

A server is *paused* until its weights are verified. It is *open* while it may sample rollouts. It is *down* at the
start and after a failure, until it is verified again. Servers may join and leave at any time. A server that has left
still answers the requests that it has. Coroutines run on the event loop of the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rljax.errors import ServerGoneError
from rljax.rollout.servers.http import room_for
from rljax.rollout.servers.kind import Backend

log = logging.getLogger(__name__)

State = Literal["paused", "open", "down"]


@dataclass(eq=False)
class Server:
    """One server as the client knows it."""

    url: str
    route: str  # the path that samples a response
    model: str  # the name that the server gives its model
    reason: str  # the reason why the server is down
    state: State = "down"
    outstanding: int = 0  # the number of requests that it has not answered yet
    versions: list[str] = field(default_factory=list)  # the tags of the weights that it was opened with, newest last


@dataclass
class Group:
    """Requests with the same prompt. ``home`` is the server that got the last one, and so has computed the prompt."""

    home: Server | None = None


class ServerPool:
    """The servers of a client by URL. It chooses an open server for each request."""

    def __init__(self, kind: Backend, max_outstanding: int) -> None:
        """Makes an empty pool of servers that get at most ``max_outstanding`` requests at a time each."""
        self._kind = kind
        self._max_outstanding = self._most = max_outstanding
        self._servers: dict[str, Server] = {}
        self._changed = asyncio.Condition()
        self.losses = 0
        """The number of times that a server went down so far."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers, in the order in which they were given."""
        return tuple(self._servers)

    def get(self, url: str) -> Server:
        """Returns the server at ``url``. Raises ServerGoneError if it has left."""
        try:
            return self._servers[url]
        except KeyError:
            raise ServerGoneError(f"{url} has left the servers of this run") from None

    def has(self, server: Server) -> bool:
        """Returns whether this very object is still in the pool."""
        return self._servers.get(server.url) is server

    def all_in(self, state: State) -> list[Server]:
        """Returns the servers in ``state``."""
        return [server for server in self._servers.values() if server.state == state]

    def take(self, urls: Iterable[str]) -> None:
        """Replaces the pool by the servers at ``urls``. A server of the old pool keeps its state; a new one is down.

        The soft limit of file descriptors of this process is raised. If the hard limit does not allow
        ``max_outstanding`` requests to each server, fewer are sent at a time.
        """

        def new(url: str) -> Server:
            return Server(url, self._kind.route, self._kind.model, f"{url}: /health does not answer 200")

        self._servers = {url: self._servers.get(url) or new(url) for url in urls}
        count = max(1, len(self._servers))
        most = max(1, room_for(count * self._max_outstanding) // count)
        if most < min(self._most, self._max_outstanding):
            log.warning(
                "at most %d requests at a time go to each server, not %d: the hard limit of file descriptors "
                "(ulimit -Hn) allows no more",
                most,
                self._max_outstanding,
            )
        self._most = most

    async def replace(self, urls: Sequence[str]) -> None:
        """Replaces the pool as :meth:`take` does, while requests may be waiting for servers."""
        async with self._changed:
            self.take(urls)
            self._changed.notify_all()

    async def set_state(self, server: Server, state: State, reason: str = "") -> None:
        """Changes the state of a server. ``reason`` says why it is down."""
        async with self._changed:
            if state == "down" != server.state:
                log.warning("a %s server is down: %s", self._kind.name, reason)
                self.losses += 1
            server.state, server.reason = state, reason
            self._changed.notify_all()

    async def acquire(self, group: Group) -> Server:
        """Waits for an open server with room for a request, counts the request there, and returns the server."""
        async with self._changed:
            server = await self._changed.wait_for(lambda: self._next(group))
            assert server is not None
            group.home = server
            server.outstanding += 1
            return server

    async def release(self, server: Server) -> None:
        """Counts one request less at ``server``."""
        async with self._changed:
            server.outstanding -= 1
            self._changed.notify()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Waits until ``is_so()`` is true. It is called whenever a server changes."""
        async with self._changed:
            await self._changed.wait_for(is_so)

    def _next(self, group: Group) -> Server | None:
        """Returns the last server of ``group`` if it is open with room, else the idlest open one with room, or None."""
        home = group.home
        if home is not None and self.has(home) and home.state == "open" and home.outstanding < self._most:
            return home
        idlest = min(self.all_in("open"), key=lambda server: server.outstanding, default=None)
        return idlest if idlest and idlest.outstanding < self._most else None
