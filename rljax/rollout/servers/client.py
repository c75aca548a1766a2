"""HTTP to one or several servers, from an event loop on a thread of its own.

The requests of a group, which have one prompt, go to one open server while it has room, so that it computes the prompt
once. The first goes to the server with the least outstanding work. Responses come back as they complete. The requests
of a server that goes down are sent again to another one, or wait. A router gets rollouts and nothing else.

A reply may hold several weight versions where new weights come while it is sampled. It is handed on once the server
that sampled it is open with the newest of them. A part of a response that the server gave up for the new weights is
kept, and the rest is asked of any server. A request that a paused server refuses waits and is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn, TypeVar

import httpx

from rljax.errors import ReplyError, ServerError, ServerGoneError, ServerPausedError, ServerRefusedError
from rljax.rollout.servers.batches import Batches
from rljax.rollout.servers.pool import Server, ServerPool, json_object, refusal_text
from rljax.rollout.servers.retries import Pauses, may_pass
from rljax.rollout.servers.sources import Ask, RequestSource
from rljax.rollout.servers.wire import Completion, Request, Wire, check_completion, join_parts, remaining_request
from rljax.rollout.types import ClientLimits
from rljax.weights.access import find_key_file, read_api_key

T = TypeVar("T")
_TICK_S = 0.25  # The time between two yields to the caller of a stream (seconds).
_ALIVE_S = 5.0  # The time between two checks that the event loop still runs (seconds).
_CLOSE_S = 10.0  # The longest that closing connections may take (seconds).
_PROBE_S = 600.0  # The longest that a probe may take: a few tokens, and what the server compiles for them (seconds).
_LONG_REPLY = 2**22  # A longer reply is read on a thread, so that the event loop goes on meanwhile (bytes).


class ServerClient:
    """A thread-safe client of servers of one kind. Every method blocks its caller, never the event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        wire: Wire,
        limits: ClientLimits | None = None,
        *,
        api_key_file: str | None = None,
        router: str | None = None,
    ) -> None:
        """Sends nothing yet. Every server is down until it is opened. Raises the soft limit of file descriptors.

        ``urls`` are as ``http://host:port``, and empty where servers join later. ``api_key_file`` and ``router`` are as
        in ``RolloutConfig``. It raises ValueError where one of ``urls`` stands twice, is no URL or holds a
        password, or where the key file cannot be used.
        """
        key_file = find_key_file(api_key_file)
        headers = {} if key_file is None else {"Authorization": f"Bearer {read_api_key(key_file)}"}
        for url in (*urls, *([router] if router else [])):
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct, got {list(urls)}")
        self.limits = limits or ClientLimits()
        self._wire, self._router = wire, router and router.rstrip("/")
        self._pool = ServerPool(wire, self.limits.max_outstanding, self._exchange, self._router)
        self._pool.take(url.rstrip("/") for url in urls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljax-server-client", daemon=True)
        self._thread.start()
        self._reader = ThreadPoolExecutor(1, "rljax-reply-reader")  # one: a long reply takes many times its size
        self._http = httpx.AsyncClient(
            # A connection for each request: vLLM closes idle ones after 5 s and resets one on which it answered 500.
            # Requests for rollouts share one where the server has rljax's endpoint (``Batches``).
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            headers=headers,
        )
        self._batches = Batches(self._http, self.limits.connect_timeout_s)

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, in the order in which they were given."""
        return self._pool.urls

    @property
    def has_router(self) -> bool:
        """Whether rollouts go through a router, so that a failed rollout does not show which server is gone."""
        return self._router is not None

    @property
    def losses(self) -> int:
        """The number of times that a server went down so far."""
        return self._pool.losses

    def down(self) -> dict[str, str]:
        """Returns each server that is down, and the reason."""
        return {server.url: server.reason for server in self._pool.all_in("down")}

    def opened(self) -> list[str]:
        """Returns the servers that rollouts may go to."""
        return [server.url for server in self._pool.all_in("open")]

    def set_urls(self, urls: Sequence[str]) -> tuple[list[str], list[str]]:
        """Takes in the new ones of ``urls``, which are down as yet, and drops all others. Returns both lists."""
        before = self.urls
        if set(before) != set(urls):
            self._await(self._pool.replace(urls))
        return [url for url in urls if url not in before], [url for url in before if url not in urls]

    def pause(self, url: str) -> None:
        """Sends no further rollout to ``url`` until :meth:`open`. Those under way go on."""
        self._await(self._pool.set_state(self._pool.get(url), "paused"))

    def open(self, url: str, version: str | None) -> None:
        """Admits rollouts to ``url``; a reply that another weight ``version`` sampled marks it down (None: any may).

        A reply may also name the versions that the server was opened with since the request was sent. A reply that
        names no version is handed on.
        """
        server = self._pool.get(url)
        if version is not None and server.versions[-1:] != [version]:
            server.versions.append(version)
        self._await(self._pool.set_state(server, "open"))

    def mark_down(self, url: str, reason: str) -> None:
        """Sends no further rollout to ``url`` until it is opened again."""
        self._await(self._pool.set_state(self._pool.get(url), "down", reason))

    def set_route(self, url: str, route: str) -> None:
        """Sets the path that samples at ``url``."""
        self._pool.get(url).route = route

    def set_model(self, url: str, model: str) -> None:
        """Sets the name that the server at ``url`` gives its model, in place of ``wire.model``."""
        self._pool.get(url).model = model

    def call(self, url: str, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """Sends one request of the control plane, which is not tried again, and returns the reply's JSON object.

        ``content`` is ``params`` and ``json`` as httpx takes them. The whole reply may take ``timeout_s`` seconds. It
        raises ServerGoneError for no answer, or status 5xx from a server that is not healthy any more, and
        ServerRefusedError, with the server's message, for any other status but 200.
        """
        reply = self._await(self._exchange(self._pool.get(url).url, method, path, timeout_s, **content))
        return json_object(reply) if reply.content and path != "/health" else {}

    def answers(self, url: str) -> bool:
        """Returns whether ``/health`` answers 200 within 5 seconds."""
        try:
            self.call(url, "GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Samples from one server, in whatever state it is. This is for probes. Raises as :meth:`call`."""
        server = self._pool.get(url)
        sampled = [self._start(self._probe(server, request)) for request in requests]
        try:
            return [self._result(future) for future in sampled]
        finally:
            for future in sampled:
                future.cancel()

    def stream(
        self, source: RequestSource, vocab_size: int | None = None, *, metrics: dict[str, float] | None = None
    ) -> Generator[tuple[tuple[int, int], Completion] | None]:
        """Samples the requests of ``source`` from open servers; yields (``Ask.place``, completion) as they complete.

        A request is sent as soon as it comes, whatever the caller does with the completions before. Yields None every
        quarter of a second, whatever completes, so that the caller can recover servers. Closing the iterator gives up
        what has not completed. Token ids of a reply are below ``vocab_size``, if that is known. ``rollout/requests``
        and ``rollout/retries`` are counted up in ``metrics``. It raises ServerError, in one line with the URL, where a
        response failed ``max_attempts`` times or was refused, and what ``source`` raises.
        """
        completed: queue.SimpleQueue[Future[Completion] | None] = queue.SimpleQueue()
        metrics = {} if metrics is None else metrics
        for name in ("rollout/requests", "rollout/retries"):
            metrics.setdefault(name, 0.0)
        running: dict[Future[Completion], tuple[int, int]] = {}
        has_news = threading.Event()

        def wake() -> None:
            if not has_news.is_set():
                has_news.set()
                completed.put(None)

        source.watch(wake)
        has_news.set()
        look = time.monotonic() + _TICK_S
        try:
            while True:
                if has_news.is_set():
                    has_news.clear()
                    for ask in source.take():
                        future = self._start(self._complete(ask, vocab_size, metrics))
                        running[future] = ask.place
                        future.add_done_callback(completed.put)
                if not running and source.is_over:
                    return
                try:
                    done = completed.get(timeout=max(look - time.monotonic(), 0.0))
                except queue.Empty:
                    self._check_loop()
                else:
                    if done is not None:
                        yield running.pop(done), done.result()
                if time.monotonic() >= look:
                    yield None
                    look = time.monotonic() + _TICK_S
        finally:
            source.watch(lambda: None)
            for future in running:
                future.cancel()

    def close(self) -> None:
        """Closes connections and ends the thread. It may be called twice."""
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
        self._reader.shutdown(wait=False, cancel_futures=True)
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
        """Returns the result of work that ends by itself, as long as the event loop runs."""
        while not wait([future], timeout=_ALIVE_S).done:
            self._check_loop()
        return future.result()

    def _check_loop(self) -> None:
        if not self._thread.is_alive():
            raise ServerError("the event loop of the HTTP client has ended")

    async def _complete(self, ask: Ask, vocab_size: int | None, metrics: dict[str, float]) -> Completion:
        """Returns the completion of a request. Raises ServerError if it is refused or all attempts failed."""
        failure, failures, pauses = "", 0, Pauses(self.limits.request_timeout_s)
        parts: list[Completion] = []
        while failures < self.limits.max_attempts:
            if failure:
                metrics["rollout/retries"] += 1
                await self._back_off(failures)
            elif pauses.count:
                await self._back_off(pauses.count)
            server = await self._pool.acquire(ask.group)
            metrics["rollout/requests"] += 1
            try:
                parts.append(await self._rollout(server, remaining_request(ask.request, parts), vocab_size))
                if parts[-1].finish_reason != "abort":
                    return join_parts(parts)
                failure, pauses.count = "", 0
                continue
            except ServerGoneError as error:
                failure = str(error)
                for each in self._pool.servers if self._router else (server,):
                    await self._pool.set_state(each, "down", failure)
            except ReplyError as error:
                failure = str(error)
            except ServerRefusedError as error:
                if pauses.may_end(error):
                    failure = ""
                    continue
                if not may_pass(error):
                    raise
                failure = str(error)
            except Exception as error:
                said = " ".join(f"{type(error).__name__} {error}".split())
                raise ServerError(f"{ask.name} from {self._router or server.url} failed: {said}") from error
            finally:
                await self._pool.release(server)
            failures += 1
        raise ServerError(f"{ask.name} failed {self.limits.max_attempts} times; the last: {failure}")

    async def _rollout(self, server: Server, request: Request, vocab_size: int | None) -> Completion:
        """Returns a completion that may be trained on, or a part of one where new weights came meanwhile."""
        url, first = self._router or server.url, max(0, len(server.versions) - 1)
        completion = await self._sample(server, request, self.limits.request_timeout_s, url)
        is_updated = server.state == "paused" or len(server.versions) - 1 > first
        check_completion(url, completion, request, vocab_size, may_be_part=is_updated)
        tags = [tag for tag, _, _ in completion.spans or ()]

        def foreign() -> set[str]:
            return set(tags).difference(server.versions[first:]) if server.versions else set()

        await self._pool.wait_for(lambda: not foreign() or server.state != "paused" or not self._pool.has(server))
        if others := foreign():
            said = f"{url} samples from weights {min(others)!r}, not from {server.versions[-1]!r}"
            raise ReplyError(said) if self._router else ServerGoneError(said)
        return completion

    async def _probe(self, server: Server, request: Request) -> Completion:
        """Returns a completion of ``server``, and asks again where the reply is none or a failure may pass."""
        timeout_s = min(_PROBE_S, self.limits.request_timeout_s)
        failures, pauses = 0, Pauses(timeout_s)
        while True:
            try:
                return await self._sample(server, request, timeout_s)
            except (ReplyError, ServerRefusedError) as error:
                if not pauses.may_end(error):
                    failures += 1
                    if failures >= self.limits.max_attempts or not may_pass(error):
                        raise
            await self._back_off(failures + pauses.count)

    async def _sample(self, server: Server, request: Request, timeout_s: float, url: str = "") -> Completion:
        """Returns one completion of ``server``, through the router at ``url`` if there is one."""
        url = url or server.url
        body = self._wire.body(server.route, request, server.model)
        if server.route in self._wire.own_routes:
            reply = await self._ask(url, server.route, timeout_s, body)
        else:
            reply = (await self._exchange(url, "POST", server.route, timeout_s, json=body)).content
        read = functools.partial(self._wire.completion, server.route, reply, request)
        try:
            return await self._loop.run_in_executor(self._reader, read) if len(reply) > _LONG_REPLY else read()
        except ReplyError as error:
            raise ReplyError(f"{url}{error}") from error

    async def _ask(self, url: str, path: str, timeout_s: float, body: dict[str, Any]) -> bytes:
        """Returns the reply to one request, which is sent with others. Raises as :meth:`call`."""
        async with _answering(url + path, timeout_s):
            status, content = await self._batches.ask(url + path, body)
        if status != 200:
            await self._refuse(url, path, httpx.Response(status, content=content))
        return content

    async def _exchange(self, url: str, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        """Returns a reply of status 200. Raises as :meth:`call`."""
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self.limits.connect_timeout_s), pool=None)
        async with _answering(url + path, timeout_s):
            reply = await self._http.request(method, url + path, timeout=timeout, **content)
        if reply.status_code != 200:
            await self._refuse(url, path, reply)
        return reply

    async def _refuse(self, url: str, path: str, reply: httpx.Response) -> NoReturn:
        """Raises what a reply of another status than 200 means."""
        if path == "/health":
            raise ServerGoneError(f"{url} is not healthy: {refusal_text(reply)}")
        if reply.status_code >= 500:
            await self._exchange(url, "GET", "/health", 10.0)  # raises where the server is gone
        hint = "; name the server's key file in rollout.api_key_file or RLJAX_API_KEY_FILE"
        wanted = hint if reply.status_code == 401 else ""
        said = f"{url}{path} answered {refusal_text(reply)}{wanted}"
        samples = path in (*self._wire.own_routes, *self._wire.routes)
        if reply.status_code == 503 and samples and await self._is_paused(url):
            raise ServerPausedError(said, reply.status_code)
        raise ServerRefusedError(said, reply.status_code)

    async def _is_paused(self, url: str) -> bool:
        """Returns whether the server at ``url`` says that it is paused, or any server behind the router there."""
        for each in (self._pool.urls if url == self._router else (url,)) if self._wire.paused_route else ():
            with contextlib.suppress(ServerError):
                if json_object(await self._exchange(each, "GET", self._wire.paused_route, 10.0)).get("is_paused"):
                    return True
        return False

    async def _back_off(self, attempt: int) -> None:
        """Waits before retry number ``attempt``, which is at least 1."""
        longest = min(self.limits.max_backoff_s, self.limits.backoff_s * 2.0 ** (attempt - 1))
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # so that retries do not come in step


@contextlib.asynccontextmanager
async def _answering(address: str, timeout_s: float) -> AsyncIterator[None]:
    """Bounds the time that a reply may take, and raises ServerGoneError or ReplyError where there is none."""
    try:
        # httpx's timeouts bound each read: a server that sends a byte now and then never exceeds them.
        async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
            yield
    except (httpx.TransportError, TimeoutError) as error:
        said = f"{type(error).__name__} {error}".rstrip()
        late = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        raise ServerGoneError(f"no answer from {address}{late}: {said}") from error
    except httpx.RequestError as error:  # a body that cannot be decoded
        raise ReplyError(f"{address} answered what is no HTTP reply: {error}") from error


def check_url(url: str) -> None:
    """Raises ValueError unless ``url`` is the address of a server and can be logged."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}: {error}") from error
    if parsed.userinfo:
        raise ValueError(f"a URL of {parsed.host} holds a user or a password; URLs are logged")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}")
