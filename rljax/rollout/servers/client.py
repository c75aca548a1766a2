"""HTTP to one or several servers, from an event loop on a thread of its own.

The requests of a group, which have one prompt, go to one open server while it has room, so that it computes the prompt
once; the first of a group goes to the server with the least outstanding work. Responses come back as they complete. A
server is *paused* until its weights are verified, *open* while it may sample rollouts, and *down* from a failure until
somebody proves it current again, at the start too; the requests of a server that is down are sent again to another, or
wait. Servers may join and leave; one that left answers what it was asked, or its requests are sent again.

With a router rollouts go to it, and it knows the open servers alone; everything else goes to each server itself.

A reply may be of several weight versions where new weights come while it is sampled. It is handed on once the server
that sampled it is open with the newest of them; a part of a response that the server gave up for the new weights is
kept, and the rest is asked of any server.

Every exchange has a deadline, from the connection to the last byte; whoever waits for the event loop's thread looks
whether it still runs. A wait for a server to open is the caller's to bound: :meth:`ServerClient.stream` yields to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import httpx

from rljax.errors import HandshakeError, ReplyError, ServerError, ServerGoneError, ServerRefusedError
from rljax.rollout.servers.descriptors import room_for
from rljax.rollout.servers.wire import Completion, Request, Wire, check_completion, continued, joined
from rljax.rollout.types import ClientLimits
from rljax.weights.api_key import find_key_file, read_api_key

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["paused", "open", "down"]
_TICK_S = 0.25
_ALIVE_S = 5.0  # how often a wait looks whether the event loop still runs (seconds)
_CLOSE_S = 10.0  # that closing connections may take (seconds)
_ROUTER_S = 30.0  # that a router may take to add or remove a server (seconds)
_PROBE_S = 600.0  # that a probe may take: a few tokens, and what the server compiles for them (seconds)


@dataclass
class _Server:
    url: str
    route: str
    model: str
    reason: str
    state: State = "down"
    outstanding: int = 0
    versions: list[str] = field(default_factory=list)  # of weights that it was opened with, the newest last


@dataclass
class _Group:
    """Requests of one prompt, and the server that was given the last of them."""

    home: _Server | None = None


class ServerClient:
    """Thread-safe facade; every method blocks its caller, never the loop."""

    def __init__(
        self,
        urls: Sequence[str],
        wire: Wire,
        limits: ClientLimits | None = None,
        *,
        api_key_file: str | None = None,
        router: str | None = None,
    ) -> None:
        """Sends nothing yet; every server is down until it is opened. Raises the soft limit of file descriptors.

        Args:
          urls: of the servers, all of one kind, as ``http://host:port``; none where they join later.
          wire: how that kind is spoken to.
          limits: how long to wait, and how much to send.
          api_key_file: as ``RolloutConfig.api_key_file``.
          router: as ``RolloutConfig.router``.

        Raises:
          ValueError: of ``urls`` one stands twice, is no URL, or holds a password; or the key file is not one.
        """
        key_file = find_key_file(api_key_file)
        headers = {} if key_file is None else {"Authorization": f"Bearer {read_api_key(key_file)}"}
        for url in (*urls, *([router] if router else [])):
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct, got {list(urls)}")
        self.limits = limits or ClientLimits()
        self._wire, self._router = wire, router and router.rstrip("/")
        self._servers: dict[str, _Server] = {}
        self._most = self.limits.max_outstanding  # requests at one server
        self._take(url.rstrip("/") for url in urls)
        self._losses = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljax-server-client", daemon=True)
        self._thread.start()
        self._changed, self._telling = asyncio.Condition(), asyncio.Lock()
        self._http = httpx.AsyncClient(
            # A connection for each request: vLLM closes idle ones after 5 s and resets one on which it answered 500,
            # and a response takes so long that opening a connection costs nothing beside it.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            headers=headers,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in the order given."""
        return tuple(self._servers)

    @property
    def has_router(self) -> bool:
        """Whether rollouts go through a router, so that nobody sees which server is gone."""
        return self._router is not None

    def set_urls(self, urls: Sequence[str]) -> tuple[list[str], list[str]]:
        """Takes in the servers of ``urls`` that are new, down as yet, and leaves those that are not among them.

        Returns:
          The URLs that joined, and those that left.
        """

        async def take() -> None:
            async with self._changed:
                self._take(urls)
                self._changed.notify_all()

        before = self.urls
        if set(before) != set(urls):
            self._await(take())
            self._await(self._tell_router())
        return [url for url in urls if url not in before], [url for url in before if url not in urls]

    def _take(self, urls: Iterable[str]) -> None:
        def made(url: str) -> _Server:
            reason = f"{url}: /health does not answer 200"
            return _Server(url, self._wire.routes[0], self._wire.model, reason=reason)

        self._servers = {url: self._servers.get(url) or made(url) for url in urls}
        count = max(1, len(self._servers))
        most = max(1, room_for(count * self.limits.max_outstanding) // count)
        if most < min(self._most, self.limits.max_outstanding):
            log.warning(
                "at most %d requests at a time go to each server, not %d: the hard limit of file descriptors "
                "(ulimit -Hn) allows no more",
                most,
                self.limits.max_outstanding,
            )
        self._most = most

    def _server(self, url: str) -> _Server:
        try:
            return self._servers[url]
        except KeyError:
            raise ServerGoneError(f"{url} is no server of this run any more") from None

    @property
    def losses(self) -> int:
        """How many times a server went down so far."""
        return self._losses

    def call(self, url: str, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """One request of the control plane, not retried; ``content`` is ``params`` and ``json`` as httpx takes them.

        Raises:
          ServerGoneError: no answer, or 5xx from a server that is not healthy any more.
          ServerRefusedError: any other status but 200; the message holds the server's.
        """
        return self._await(self._call(self._server(url).url, method, path, timeout_s, **content))

    def answers(self, url: str) -> bool:
        """Whether ``/health`` answers 200 within 5 seconds."""
        try:
            self.call(url, "GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    def set_route(self, url: str, route: str) -> None:
        """Which endpoint samples at ``url``."""
        self._server(url).route = route

    def find_route(self, url: str) -> None:
        """Sets the endpoint that samples at ``url``, the first that is there; nothing is sampled.

        Raises:
          HandshakeError: none is there. Otherwise as :meth:`call`.
        """
        for route in self._wire.routes:
            self.set_route(url, route)
            try:
                self.call(url, "GET", route)
                return
            except ServerRefusedError as error:
                if error.status == HTTPStatus.METHOD_NOT_ALLOWED:  # it is there, and takes POST alone
                    return
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        raise HandshakeError(f"{url}: not there: {', '.join(self._wire.routes)}")

    def set_model(self, url: str, model: str) -> None:
        """What the server at ``url`` calls its model; those that rljax starts call it ``wire.model``."""
        self._server(url).model = model

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Samples from one server, in whatever state; for probes. Raises as :meth:`call`."""
        sampled = [self._start(self._probe(self._server(url), request)) for request in requests]
        try:
            return [self._result(future) for future in sampled]
        finally:
            for future in sampled:
                future.cancel()

    def pause(self, url: str) -> None:
        """Sends no further rollout to ``url`` until :meth:`open`; those under way go on."""
        self._await(self._set(self._server(url), "paused"))

    def open(self, url: str, version: str | None) -> None:
        """Admits rollouts to ``url``; a reply sampled under another weight ``version`` marks it down (None: under any).

        A reply may be of the versions before, too, that the server was opened with since it was asked for. One that
        does not name its version is handed on.
        """
        server = self._server(url)
        if version is not None and server.versions[-1:] != [version]:
            server.versions.append(version)
        self._await(self._set(server, "open"))

    def mark_down(self, url: str, reason: str) -> None:
        """Sends no further rollout to ``url`` until it is opened again."""
        self._await(self._set(self._server(url), "down", reason))

    def down(self) -> dict[str, str]:
        """Each server that is down, and why."""
        return {s.url: s.reason for s in self._servers.values() if s.state == "down"}

    def opened(self) -> list[str]:
        """The servers that rollouts may go to."""
        return [s.url for s in self._servers.values() if s.state == "open"]

    def stream(
        self,
        requests: Sequence[Request],
        vocab_size: int | None = None,
        *,
        group_size: int = 1,
        metrics: dict[str, float] | None = None,
    ) -> Generator[tuple[int, Completion] | None]:
        """Samples all ``requests`` from open servers and yields (index, completion) as they complete.

        Yields None every quarter of a second, whatever completes, so that the caller can recover servers. Closing the
        iterator gives up what has not completed.

        Args:
          requests: what to sample; each is answered once.
          vocab_size: token ids of a reply are below it; None: not known.
          group_size: so many of ``requests``, one after the other, have one prompt.
          metrics: The mapping in which ``rollout/requests`` and ``rollout/retries`` are counted up meanwhile, or None.

        Raises:
          ServerError: a response failed ``max_attempts`` times, or was refused; one line, with the server's URL.
        """
        completed: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
        groups = [_Group() for _ in range(0, len(requests), group_size)]
        metrics = {} if metrics is None else metrics
        for name in ("rollout/requests", "rollout/retries"):
            metrics.setdefault(name, 0.0)
        index = {
            self._start(self._complete(i, request, vocab_size, groups[i // group_size], metrics)): i
            for i, request in enumerate(requests)
        }
        for future in index:
            future.add_done_callback(completed.put)
        remaining = len(requests)
        look = time.monotonic() + _TICK_S
        try:
            while remaining:
                try:
                    future = completed.get(timeout=max(look - time.monotonic(), 0.0))
                except queue.Empty:
                    self._check_loop()
                else:
                    remaining -= 1
                    yield index[future], future.result()
                if time.monotonic() >= look:
                    yield None
                    look = time.monotonic() + _TICK_S
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

        if self._thread.is_alive():
            wait([self._start(finish())], timeout=_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise ServerError("the HTTP client is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return self._result(self._start(work))

    def _result(self, future: Future[T]) -> T:
        """The result of work that ends by itself, as long as the event loop runs."""
        while not wait([future], timeout=_ALIVE_S).done:
            self._check_loop()
        return future.result()

    def _check_loop(self) -> None:
        if not self._thread.is_alive():
            raise ServerError("the event loop of the HTTP client has ended")

    async def _call(self, url: str, method: str, path: str, timeout_s: float, **content: Any) -> dict[str, Any]:
        reply = await self._exchange(url, method, path, timeout_s, **content)
        return _object(reply) if reply.content and path != "/health" else {}

    async def _exchange(self, url: str, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        """An answer of status 200. Raises as :meth:`call`."""
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self.limits.connect_timeout_s), pool=None)
        try:
            # httpx's timeouts are of each read: a server that sends a byte now and then never exceeds them.
            async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
                reply = await self._http.request(method, url + path, timeout=timeout, **content)
        except (httpx.TransportError, TimeoutError) as error:
            said = f"{type(error).__name__} {error}".rstrip()
            late = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else ""
            raise ServerGoneError(f"no answer from {url}{path}{late}: {said}") from error
        except httpx.RequestError as error:  # a body that cannot be decoded
            raise ReplyError(f"{url}{path} answered what is no HTTP reply: {error}") from error
        if reply.status_code == 200:
            return reply
        if path == "/health":
            raise ServerGoneError(f"{url} is not healthy: {_reason(reply)}")
        if reply.status_code >= 500:
            await self._call(url, "GET", "/health", 10.0)  # raises where the server is gone
        hint = "; name the server's key file in rollout.api_key_file or RLJAX_API_KEY_FILE"
        wanted = hint if reply.status_code == 401 else ""
        raise ServerRefusedError(f"{url}{path} answered {_reason(reply)}{wanted}", reply.status_code)

    async def _sample(self, server: _Server, request: Request, timeout_s: float, through: str = "") -> Completion:
        """One completion. Raises ServerGoneError, ServerRefusedError or ReplyError."""
        body, url = self._wire.body(server.route, request, server.model), through or server.url
        reply = await self._exchange(url, "POST", server.route, timeout_s, json=body)
        try:
            return self._wire.completion(server.route, reply.content, request)
        except ReplyError as error:
            raise ReplyError(f"{url}{error}") from error

    async def _probe(self, server: _Server, request: Request) -> Completion:
        """As :meth:`_sample`; what is no completion, or fails by itself, is asked for again."""
        timeout_s = min(_PROBE_S, self.limits.request_timeout_s)
        for attempt in range(1, self.limits.max_attempts):
            try:
                return await self._sample(server, request, timeout_s)
            except ReplyError:
                pass
            except ServerRefusedError as error:
                if not _may_pass(error):
                    raise
            await self._back_off(attempt)
        return await self._sample(server, request, timeout_s)

    async def _rollout(self, server: _Server, request: Request, vocab_size: int | None) -> Completion:
        """As :meth:`_sample`, and what it gave may be trained on; a part of it where new weights came meanwhile."""
        url, first = self._router or server.url, max(0, len(server.versions) - 1)
        completion = await self._sample(server, request, self.limits.request_timeout_s, url)
        is_updated = server.state == "paused" or len(server.versions) - 1 > first
        check_completion(url, completion, request, vocab_size, may_be_part=is_updated)
        tags = [tag for tag, _, _ in completion.spans or ()]

        def foreign() -> set[str]:
            return set(tags).difference(server.versions[first:]) if server.versions else set()

        def is_settled() -> bool:
            return not foreign() or server.state != "paused" or self._servers.get(server.url) is not server

        async with self._changed:
            await self._changed.wait_for(is_settled)
        if others := foreign():
            said = f"{url} samples from weights {min(others)!r}, not from {server.versions[-1]!r}"
            raise ReplyError(said) if self._router else ServerGoneError(said)
        return completion

    async def _complete(
        self, index: int, request: Request, vocab_size: int | None, group: _Group, metrics: dict[str, float]
    ) -> Completion:
        """The completion of request ``index``, which is one of ``group``.

        Raises:
          ServerError: it is refused, all attempts have failed, or something went wrong that nobody thought of.
        """
        failure, failures = "", 0
        parts: list[Completion] = []
        while failures < self.limits.max_attempts:
            if failure:
                metrics["rollout/retries"] += 1
                await self._back_off(failures)
            server = await self._acquire(group)
            metrics["rollout/requests"] += 1
            try:
                parts.append(await self._rollout(server, continued(request, parts), vocab_size))
                if parts[-1].finish_reason != "abort":
                    return joined(parts)
                failure = ""
                continue
            except ServerGoneError as error:
                failure = str(error)
                for each in self._servers.values() if self._router else (server,):
                    await self._set(each, "down", failure)
            except ReplyError as error:
                failure = str(error)
            except ServerRefusedError as error:
                if not _may_pass(error):
                    raise
                failure = str(error)
            except Exception as error:
                said = " ".join(f"{type(error).__name__} {error}".split())
                raise ServerError(f"response {index} from {self._router or server.url} failed: {said}") from error
            finally:
                await self._release(server)
            failures += 1
        raise ServerError(f"response {index} failed {self.limits.max_attempts} times; the last: {failure}")

    async def _back_off(self, attempt: int) -> None:
        """Waits before retry number ``attempt``, which is at least 1."""
        longest = min(self.limits.max_backoff_s, self.limits.backoff_s * 2.0 ** (attempt - 1))
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # so that retries do not come in step

    def _idlest(self) -> _Server | None:
        """The open server with the least outstanding work that has room."""
        open_servers = [server for server in self._servers.values() if server.state == "open"]
        idlest = min(open_servers, key=lambda server: server.outstanding, default=None)
        return idlest if idlest and idlest.outstanding < self._most else None

    def _next(self, group: _Group) -> _Server | None:
        """The server that takes another request of ``group``: the last one if it is open and has room."""
        home = group.home
        known = home is not None and self._servers.get(home.url) is home
        if home is not None and known and home.state == "open" and home.outstanding < self._most:
            return home
        return self._idlest()

    async def _acquire(self, group: _Group) -> _Server:
        async with self._changed:
            server = await self._changed.wait_for(lambda: self._next(group))
            assert server is not None
            group.home = server
            server.outstanding += 1
            return server

    async def _release(self, server: _Server) -> None:
        async with self._changed:
            server.outstanding -= 1
            self._changed.notify()

    async def _set(self, server: _Server, state: State, reason: str = "") -> None:
        if state == "open":
            await self._tell_router(server)
        changed = state != server.state
        async with self._changed:
            if state == "down" != server.state:
                log.warning("a %s server is down: %s", self._wire.name, reason)
                self._losses += 1
            server.state, server.reason = state, reason
            self._changed.notify_all()
        if changed and state != "open":
            await self._tell_router()

    async def _tell_router(self, more: _Server | None = None) -> None:
        """Has the router know the open servers and ``more``, and no others, whoever told it of them.

        Raises:
          ServerGoneError: it does not take ``more``. Without ``more`` a router that is gone sends nothing anywhere.
        """
        if self._router is None:
            return
        async with self._telling:
            try:
                wanted = {server.url for server in self._servers.values() if server.state == "open"}
                wanted |= {more.url} if more else set()
                known = set((await self._call(self._router, "GET", "/list_workers", _ROUTER_S)).get("urls", ()))
                changes = [("/remove_worker", url) for url in known - wanted]
                changes += [("/add_worker", url) for url in wanted - known]
                for path, url in changes:
                    await self._exchange(self._router, "POST", path, _ROUTER_S, params={"url": url})
            except ServerError as error:
                if more is not None:
                    raise ServerGoneError(f"the router does not take {more.url}: {error}") from error
                log.warning("the router cannot be told which servers are open: %s", error)


def check_url(url: str) -> None:
    """Raises ValueError unless ``url`` is a server's, and fit to be logged."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}: {error}") from error
    if parsed.userinfo:
        raise ValueError(f"a URL of {parsed.host} holds a user or a password; URLs are logged")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}")


def _may_pass(refusal: ServerRefusedError) -> bool:
    """Whether the same request may be answered later."""
    return refusal.status >= 500 or refusal.status in (408, 429)


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except (ValueError, RecursionError) as error:
        raise ReplyError(f"{reply.url} answered no JSON: {reply.text[:200]!r}") from error
    return value if isinstance(value, dict) else {"value": value}


def _reason(reply: httpx.Response) -> str:
    """Status and the server's own words, in one line."""
    text = reply.text
    with contextlib.suppress(ValueError, AttributeError):
        error = reply.json().get("error", text)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    return f"{reply.status_code}: {' '.join(text.split())[:500]}"
