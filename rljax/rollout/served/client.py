"""HTTP to one or several vLLM servers, from an event loop on a thread of its own.

Rollouts go to the open server with the least outstanding work and come back as they land. A server is *held* until its
weights are verified, *open* while it may draw rollouts, and *lost* from a failure until somebody proves it current
again; a lost server's requests are drawn again elsewhere, or wait.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import httpx
import numpy as np

from rljax.errors import ReplyError, ServerGoneError, ServerRefusedError
from rljax.rollout.types import SamplingParams
from rljax.rollout.vllm.wire import COMPLETIONS, GENERATE, MODEL, Completion, Request, body, completion

log = logging.getLogger(__name__)

T = TypeVar("T")
_TICK_S = 0.25


@dataclass(frozen=True)
class ClientLimits:
    """How long and how much.

    Attributes:
      request_timeout_s: longest one response may take, queueing at the server included (seconds).
      connect_timeout_s: longest a connection may take to open (seconds).
      max_outstanding: requests at one server at a time; the others wait here, so a faster server draws more.
      max_attempts: times one response is tried before the run gives up.
      backoff_s, max_backoff_s: wait before the first retry, doubled for each further one, and its limit (seconds).
    """

    request_timeout_s: float = 3600.0
    connect_timeout_s: float = 10.0
    max_outstanding: int = 512
    max_attempts: int = 6
    backoff_s: float = 0.25
    max_backoff_s: float = 8.0

    def __post_init__(self) -> None:
        for name in ("request_timeout_s", "connect_timeout_s", "max_outstanding", "max_attempts", "max_backoff_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass
class _Server:
    url: str
    route: str = GENERATE
    model: str = MODEL
    state: Literal["held", "open", "lost"] = "held"
    outstanding: int = 0
    prefix: str = ""
    reason: str = ""


class VllmClient:
    """Thread-safe facade; every method blocks its caller, never the loop."""

    def __init__(self, urls: Sequence[str], limits: ClientLimits | None = None) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct and at least one, got {list(urls)}")
        self.limits = limits or ClientLimits()
        self._servers = {url.rstrip("/"): _Server(url.rstrip("/")) for url in urls}
        self._counts = {"requests": 0, "retries": 0, "server_losses": 0}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljax-vllm-client", daemon=True)
        self._thread.start()
        self._changed, self._http = self._await(self._open_transport())

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in the order given."""
        return tuple(self._servers)

    def take_counts(self) -> dict[str, int]:
        """Requests, retries and server losses since the last call."""
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken

    def call(
        self, url: str, method: str, path: str, *, params: Any = None, json: Any = None, timeout_s: float = 300.0
    ) -> dict[str, Any]:
        """One request of the control plane, not retried.

        Raises:
          ServerGoneError: no answer, or 5xx from a server that is not healthy any more.
          ServerRefusedError: any other status but 200; the message holds the server's.
        """
        return self._await(self._call(self._servers[url], method, path, params, json, timeout_s))

    def answers(self, url: str) -> bool:
        """Whether ``/health`` answers 200 within 5 seconds."""
        try:
            self.call(url, "GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    def set_route(self, url: str, route: str) -> None:
        """Which endpoint draws at ``url``."""
        self._servers[url].route = route

    def find_route(self, url: str) -> None:
        """Sets the endpoint that draws at ``url``: the first that is there. Raises as :meth:`call` when none is."""
        for route in (GENERATE, COMPLETIONS):
            self.set_route(url, route)
            try:
                self.sample(url, [Request(np.zeros(1, np.int32), SamplingParams(1))])
                return
            except ServerRefusedError as error:
                if error.status != 404:
                    raise
        raise ServerRefusedError(f"{url}: neither {GENERATE} nor {COMPLETIONS} is there", 404)

    def set_model(self, url: str, model: str) -> None:
        """What the server at ``url`` calls its model; ``launch/vllm_server.sh`` needs no such call."""
        self._servers[url].model = model

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Draws from one server, held or not; for probes. Raises as :meth:`call`."""

        async def run() -> list[Completion]:
            server = self._servers[url]
            return list(await asyncio.gather(*(self._draw(server, request) for request in requests)))

        return self._await(run())

    def hold(self) -> None:
        """No further rollout is sent until :meth:`open`; those under way go on."""

        async def run() -> None:
            for server in self._servers.values():
                if server.state == "open":
                    server.state = "held"

        self._await(run())

    def open(self, url: str, prefix: str) -> None:
        """Admits rollouts to ``url``; a reply drawn under a weight version without ``prefix`` loses the server."""

        async def run() -> None:
            async with self._changed:
                server = self._servers[url]
                server.state, server.prefix = "open", prefix
                self._changed.notify_all()

        self._await(run())

    def lose(self, url: str, reason: str) -> None:
        """Sends no further rollout to ``url`` until it is opened again."""

        async def run() -> None:
            self._lose(self._servers[url], reason)

        self._await(run())

    def lost(self) -> dict[str, str]:
        """Each lost server and why."""
        return {s.url: s.reason for s in self._servers.values() if s.state == "lost"}

    def opened(self) -> list[str]:
        """The servers that rollouts may go to."""
        return [s.url for s in self._servers.values() if s.state == "open"]

    def stream(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion] | None]:
        """Draws all ``requests`` from open servers and yields (index, completion) as they land.

        Yields None every quarter of a second while nothing lands, so that the caller can look after lost servers.
        Closing the iterator gives up what has not landed.

        Raises:
          RuntimeError: a response failed ``max_attempts`` times, or was refused.
        """
        landed: queue.SimpleQueue[tuple[int, Completion] | RuntimeError] = queue.SimpleQueue()

        async def start() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(self._land(i, request, landed)) for i, request in enumerate(requests)]

        async def stop() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        tasks = self._await(start())
        remaining = len(requests)
        try:
            while remaining:
                try:
                    item = landed.get(timeout=_TICK_S)
                except queue.Empty:
                    yield None
                    continue
                if isinstance(item, RuntimeError):
                    raise item
                remaining -= 1
                yield item
        finally:
            if not self._loop.is_closed():
                self._await(stop())

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

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open_transport(self) -> tuple[asyncio.Condition, httpx.AsyncClient]:
        connections = self.limits.max_outstanding * len(self._servers) + 16
        return asyncio.Condition(), httpx.AsyncClient(
            # A connection for each request: vLLM closes idle ones after 5 s and resets one on which it answered 500,
            # and a response takes so long that opening a connection costs nothing beside it.
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0),
            timeout=httpx.Timeout(self.limits.request_timeout_s, connect=self.limits.connect_timeout_s, pool=None),
            trust_env=False,
        )

    async def _call(
        self, server: _Server, method: str, path: str, params: Any, json: Any, timeout_s: float
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=self.limits.connect_timeout_s, pool=None)
        try:
            reply = await self._http.request(method, server.url + path, params=params, json=json, timeout=timeout)
        except httpx.TransportError as error:
            raise ServerGoneError(f"{server.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            if path == "/health":
                raise ServerGoneError(f"{server.url} is not healthy: {_reason(reply)}")
            await self._refuse(server, path, reply)
        return _object(reply) if reply.content else {}

    async def _draw(self, server: _Server, request: Request) -> Completion:
        """One completion. Raises ServerGoneError, ServerRefusedError or ReplyError."""
        try:
            reply = await self._http.post(server.url + server.route, json=body(server.route, request, server.model))
        except httpx.TransportError as error:
            raise ServerGoneError(f"{server.url}: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            await self._refuse(server, server.route, reply)
        return completion(server.route, _object(reply))

    async def _refuse(self, server: _Server, path: str, reply: httpx.Response) -> NoReturn:
        """Raises ServerGoneError for a 5xx of a server that is not healthy any more, ServerRefusedError otherwise."""
        if reply.status_code >= 500:
            await self._call(server, "GET", "/health", None, None, 10.0)
        raise ServerRefusedError(f"{server.url}{path} answered {_reason(reply)}", reply.status_code)

    async def _land(
        self, index: int, request: Request, landed: queue.SimpleQueue[tuple[int, Completion] | RuntimeError]
    ) -> None:
        failure = ""
        for attempt in range(self.limits.max_attempts):
            if attempt:
                self._counts["retries"] += 1
                await asyncio.sleep(_backoff(self.limits, attempt))
            server = await self._admit()
            self._counts["requests"] += 1
            try:
                drawn = await self._draw(server, request)
            except ServerGoneError as error:
                failure = str(error)
                self._lose(server, failure)
                continue
            except ServerRefusedError as error:
                if error.status < 500 and error.status not in (408, 429):
                    landed.put(error)
                    return
                failure = str(error)
                continue
            except ReplyError as error:
                landed.put(error)
                return
            finally:
                await self._leave(server)
            foreign = [tag for tag, _, _ in drawn.spans or () if not tag.startswith(server.prefix)]
            if foreign:
                failure = f"{server.url} draws from weights {foreign[0]!r}, not from this run's"
                self._lose(server, failure)
            elif drawn.finish_reason not in ("stop", "length"):
                failure = f"{server.url} ended a response with {drawn.finish_reason!r}"
            else:
                landed.put((index, drawn))
                return
        landed.put(RuntimeError(f"response {index} failed {self.limits.max_attempts} times; the last: {failure}"))

    async def _admit(self) -> _Server:
        """Waits for the open server with the least outstanding work that has room."""
        async with self._changed:
            while True:
                room = [
                    server
                    for server in self._servers.values()
                    if server.state == "open" and server.outstanding < self.limits.max_outstanding
                ]
                if room:
                    server = min(room, key=lambda s: s.outstanding)
                    server.outstanding += 1
                    return server
                await self._changed.wait()

    async def _leave(self, server: _Server) -> None:
        async with self._changed:
            server.outstanding -= 1
            self._changed.notify()

    def _lose(self, server: _Server, reason: str) -> None:
        if server.state != "lost":
            log.warning("lost a vLLM server: %s", reason)
            self._counts["server_losses"] += 1
            server.state, server.reason = "lost", reason


def _backoff(limits: ClientLimits, attempt: int) -> float:
    """Seconds before try number ``attempt`` (1 is the first retry), spread so that retries do not come in step."""
    return float(min(limits.max_backoff_s, limits.backoff_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0))


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError as error:
        raise ReplyError(f"{reply.url} answered no JSON: {reply.text[:200]!r}") from error
    return value if isinstance(value, dict) else {"value": value}


def _reason(reply: httpx.Response) -> str:
    """Status and the server's own words, in one line."""
    text = reply.text
    try:
        error = reply.json().get("error", text)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = reply.text
    return f"{reply.status_code}: {' '.join(text.split())[:500]}"
