"""HTTP to one or several servers, from an event loop on a thread of its own.

Requests go to the open server with the least outstanding work and come back as they complete. A server is *paused*
until its weights are verified, *open* while it may sample rollouts, and *down* from a failure until somebody proves it
current again, at the start too; the requests of a server that is down are sent again to another, or wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerGoneError, ServerRefusedError
from rljax.rollout.served.wire import Completion, Request, Wire
from rljax.rollout.types import ClientLimits, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["paused", "open", "down"]
_TICK_S = 0.25


@dataclass
class _Server:
    url: str
    route: str
    model: str
    reason: str
    state: State = "down"
    outstanding: int = 0
    prefix: str = ""


class ServerClient:
    """Thread-safe facade; every method blocks its caller, never the loop."""

    def __init__(self, urls: Sequence[str], wire: Wire, limits: ClientLimits | None = None) -> None:
        """Sends nothing yet; every server is down until it is opened.

        Args:
          urls: of the servers, all of one kind, as ``http://host:port``.
          wire: how that kind is spoken to.
          limits: how long to wait, and how much to send.

        Raises:
          ValueError: ``urls`` are none, or one stands twice.
        """
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct and at least one, got {list(urls)}")
        self.limits = limits or ClientLimits()
        self._wire = wire
        self._servers = {
            url: _Server(url, wire.routes[0], wire.model, reason=f"{url}: /health does not answer 200")
            for url in (url.rstrip("/") for url in urls)
        }
        self._counts = {"requests": 0, "retries": 0, "server_losses": 0}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljax-server-client", daemon=True)
        self._thread.start()
        self._changed = asyncio.Condition()
        self._http = httpx.AsyncClient(
            # A connection for each request: vLLM closes idle ones after 5 s and resets one on which it answered 500,
            # and a response takes so long that opening a connection costs nothing beside it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in the order given."""
        return tuple(self._servers)

    def pop_counts(self) -> dict[str, int]:
        """Requests, retries and server losses since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    def call(self, url: str, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """One request of the control plane, not retried; ``content`` is ``params`` and ``json`` as httpx takes them.

        Raises:
          ServerGoneError: no answer, or 5xx from a server that is not healthy any more.
          ServerRefusedError: any other status but 200; the message holds the server's.
        """
        return self._await(self._call(self._servers[url], method, path, timeout_s, **content))

    def answers(self, url: str) -> bool:
        """Whether ``/health`` answers 200 within 5 seconds."""
        try:
            self.call(url, "GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    def set_route(self, url: str, route: str) -> None:
        """Which endpoint samples at ``url``."""
        self._servers[url].route = route

    def find_route(self, url: str) -> None:
        """Sets the endpoint that samples at ``url``: the first that is there.

        Raises:
          HandshakeError: none is there. Otherwise as :meth:`call`.
        """
        for route in self._wire.routes:
            self.set_route(url, route)
            try:
                self.sample(url, [Request(np.zeros(1, np.int32), SamplingParams(1))])
                return
            except ServerRefusedError as error:
                if error.status != 404:
                    raise
        raise HandshakeError(f"{url}: not there: {', '.join(self._wire.routes)}")

    def set_model(self, url: str, model: str) -> None:
        """What the server at ``url`` calls its model; those that rljax starts call it ``wire.model``."""
        self._servers[url].model = model

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Samples from one server, in whatever state; for probes. Raises as :meth:`call`."""
        sampled = [self._start(self._sample(self._servers[url], request)) for request in requests]
        return [future.result() for future in sampled]

    def pause(self, url: str) -> None:
        """Sends no further rollout to ``url`` until :meth:`open`; those under way go on."""
        self._await(self._set(self._servers[url], "paused"))

    def open(self, url: str, prefix: str) -> None:
        """Admits rollouts to ``url``; a reply sampled under a weight version without ``prefix`` marks it down."""
        self._servers[url].prefix = prefix
        self._await(self._set(self._servers[url], "open"))

    def mark_down(self, url: str, reason: str) -> None:
        """Sends no further rollout to ``url`` until it is opened again."""
        self._await(self._set(self._servers[url], "down", reason))

    def down(self) -> dict[str, str]:
        """Each server that is down, and why."""
        return {s.url: s.reason for s in self._servers.values() if s.state == "down"}

    def opened(self) -> list[str]:
        """The servers that rollouts may go to."""
        return [s.url for s in self._servers.values() if s.state == "open"]

    def stream(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion] | None]:
        """Samples all ``requests`` from open servers and yields (index, completion) as they complete.

        Yields None every quarter of a second while nothing completes, so that the caller can recover servers. Closing
        the iterator gives up what has not completed.

        Raises:
          RuntimeError: a response failed ``max_attempts`` times, or was refused.
        """
        completed: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
        index = {self._start(self._complete(i, request)): i for i, request in enumerate(requests)}
        for future in index:
            future.add_done_callback(completed.put)
        remaining = len(requests)
        try:
            while remaining:
                try:
                    future = completed.get(timeout=_TICK_S)
                except queue.Empty:
                    yield None
                else:
                    remaining -= 1
                    yield index[future], future.result()
        finally:
            for future in index:
                future.cancel()

    def close(self) -> None:
        """Closes connections and ends the thread; may be called twice."""
        if self._loop.is_closed():
            return

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._http.aclose()

        self._await(finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()

    async def _call(self, server: _Server, method: str, path: str, timeout_s: float, **content: Any) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=self.limits.connect_timeout_s, pool=None)
        try:
            reply = await self._http.request(method, server.url + path, timeout=timeout, **content)
        except httpx.TransportError as error:
            said = f"{type(error).__name__} {error}".rstrip()
            raise ServerGoneError(f"no answer from {server.url}{path}: {said}") from error
        if reply.status_code == 200:
            return _object(reply) if reply.content else {}
        if path == "/health":
            raise ServerGoneError(f"{server.url} is not healthy: {_reason(reply)}")
        if reply.status_code >= 500:
            await self._call(server, "GET", "/health", 10.0)  # raises where the server is gone
        raise ServerRefusedError(f"{server.url}{path} answered {_reason(reply)}", reply.status_code)

    async def _sample(self, server: _Server, request: Request) -> Completion:
        """One completion. Raises ServerGoneError, ServerRefusedError or ReplyError."""
        body = self._wire.body(server.route, request, server.model)
        reply = await self._call(server, "POST", server.route, self.limits.request_timeout_s, json=body)
        return self._wire.completion(server.route, reply)

    async def _complete(self, index: int, request: Request) -> Completion:
        """The completion of request ``index``. Raises RuntimeError when it is refused, or all attempts have failed."""
        failure = ""
        for attempt in range(self.limits.max_attempts):
            if attempt:
                self._counts["retries"] += 1
                longest = min(self.limits.max_backoff_s, self.limits.backoff_s * 2.0 ** (attempt - 1))
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # so that retries do not come in step
            server = await self._acquire()
            self._counts["requests"] += 1
            try:
                completion = await self._sample(server, request)
            except ServerGoneError as error:
                failure = str(error)
                await self._set(server, "down", failure)
                continue
            except ServerRefusedError as error:
                if error.status < 500 and error.status not in (408, 429):
                    raise
                failure = str(error)
                continue
            finally:
                await self._release(server)
            foreign = [tag for tag, _, _ in completion.spans or () if not tag.startswith(server.prefix)]
            if foreign:
                failure = f"{server.url} samples from weights {foreign[0]!r}, not from this run's"
                await self._set(server, "down", failure)
            elif completion.finish_reason not in ("stop", "length"):
                failure = f"{server.url} ended a response with {completion.finish_reason!r}"
            else:
                return completion
        raise RuntimeError(f"response {index} failed {self.limits.max_attempts} times; the last: {failure}")

    def _idlest(self) -> _Server | None:
        """The open server with the least outstanding work that has room."""
        open_servers = [server for server in self._servers.values() if server.state == "open"]
        idlest = min(open_servers, key=lambda server: server.outstanding, default=None)
        return idlest if idlest and idlest.outstanding < self.limits.max_outstanding else None

    async def _acquire(self) -> _Server:
        async with self._changed:
            server = await self._changed.wait_for(self._idlest)
            assert server is not None
            server.outstanding += 1
            return server

    async def _release(self, server: _Server) -> None:
        async with self._changed:
            server.outstanding -= 1
            self._changed.notify()

    async def _set(self, server: _Server, state: State, reason: str = "") -> None:
        async with self._changed:
            if state == "down" != server.state:
                log.warning("a %s server is down: %s", self._wire.name, reason)
                self._counts["server_losses"] += 1
            server.state, server.reason = state, reason
            self._changed.notify_all()


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError as error:
        raise ReplyError(f"{reply.url} answered no JSON: {reply.text[:200]!r}") from error
    return value if isinstance(value, dict) else {"value": value}


def _reason(reply: httpx.Response) -> str:
    """Status and the server's own words, in one line."""
    text = reply.text
    with contextlib.suppress(ValueError, AttributeError):
        error = reply.json().get("error", text)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    return f"{reply.status_code}: {' '.join(text.split())[:500]}"
