"""HTTP to one or several servers, from an event loop on a thread of its own.

The requests of a group, which have one prompt, go to one open server while it has room, so that it computes the prompt
once. The first goes to the server with the least outstanding work. Responses come back as they complete. The requests
of a server that goes down are sent again to another one, or wait.

If new weights come while a response is sampled, its reply names several versions. The reply is handed on once the
server is open with the newest of them. A server may also give a response up for new weights. Then its part is kept, and
any server samples the rest. A request that a paused server refuses waits and is sent again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rljax.errors import (
    OtherPromptError,
    ReplyError,
    ServerError,
    ServerGoneError,
    ServerRefusedError,
)
from rljax.rollout.servers.http import Http, Pauses, check_url, json_object, may_pass
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.pool import Server, ServerPool
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Completion, Request, join_parts, remaining_request
from rljax.rollout.servers.sources import Ask, RequestSource
from rljax.rollout.types import ClientLimits
from rljax.weights.access import find_client_key_file, read_api_key

log = logging.getLogger(__name__)

T = TypeVar("T")
_TICK_S = 0.25  # The time between two yields to the caller of a stream (seconds).
_ALIVE_S = 5.0  # The time between two checks that the event loop still runs (seconds).
_CLOSE_S = 10.0  # The longest time to close connections (seconds).
_PROBE_S = 600.0  # The longest time of a probe: a few tokens, and the server's compilations for them (seconds).
_LONG_REPLY = 2**22  # A longer reply is read on a thread, so that the event loop goes on meanwhile (bytes).


class ServerClient:
    """A thread-safe client of servers of one kind. Every method blocks its caller, never the event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        kind: Backend,
        limits: ClientLimits | None = None,
        *,
        api_key_file: str | None = None,
    ) -> None:
        """Sends nothing yet. Every server is down until it is opened. The soft limit of file descriptors is raised.

        Args:
          urls: The addresses of the servers, ``http://host:port``. There may be none yet if servers join later.
          kind: The kind of the servers.
          limits: The limits on time and on outstanding requests. None: their defaults.
          api_key_file: The file with the key that the servers ask for. None: $RLJAX_API_KEY_FILE, or else ~/.rljax.key
            if that exists, or no key.

        Raises:
          ValueError: A URL stands twice, has another form or holds a password, or the key file cannot be used.
        """
        key_file = find_client_key_file(api_key_file)
        headers = {} if key_file is None else {"Authorization": f"Bearer {read_api_key(key_file)}"}
        for url in urls:
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct, got {list(urls)}")
        self.limits = limits or ClientLimits()
        self._kind = kind
        self._pool = ServerPool(kind, self.limits.max_outstanding)
        self._pool.take(url.rstrip("/") for url in urls)
        self._has_warned = False  # whether a line was logged about replies of other prompts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rljax-server-client", daemon=True)
        self._thread.start()
        self._reader = ThreadPoolExecutor(1, "rljax-reply-reader")  # one: a long reply takes many times its size
        self._http = Http(kind, headers)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the servers, in the order in which they were given."""
        return self._pool.urls

    @property
    def losses(self) -> int:
        """The number of times that a server went down so far."""
        return self._pool.losses

    def down(self) -> dict[str, str]:
        """Returns the reason of each server that is down, by its URL."""
        return {server.url: server.reason for server in self._pool.all_in("down")}

    def opened(self) -> list[str]:
        """Returns the URLs of the servers that rollouts may go to."""
        return [server.url for server in self._pool.all_in("open")]

    def set_urls(self, urls: Sequence[str]) -> tuple[list[str], list[str]]:
        """Makes ``urls`` the list of servers. Returns the new URLs, whose servers are down, and the dropped ones."""
        before = self.urls
        if set(before) != set(urls):
            self._await(self._pool.replace(urls))
        return [url for url in urls if url not in before], [url for url in before if url not in urls]

    def pause(self, url: str) -> None:
        """Sends no further rollout to ``url`` until :meth:`open`. The rollouts under way go on."""
        self._await(self._pool.set_state(self._pool.get(url), "paused"))

    def open(self, url: str, version: str | None) -> None:
        """Admits rollouts to ``url``, whose replies must name weight ``version``; None allows any version.

        A reply may also name a version that the server was opened with since the request was sent, or no version.
        Another version marks the server down.
        """
        server = self._pool.get(url)
        if version is not None and server.versions[-1:] != [version]:
            server.versions.append(version)
        self._await(self._pool.set_state(server, "open"))

    def mark_down(self, url: str, reason: str) -> None:
        """Sends no further rollout to ``url`` until it is opened again."""
        self._await(self._pool.set_state(self._pool.get(url), "down", reason))

    def set_route(self, url: str, route: str) -> None:
        """Sets the path at which the server at ``url`` samples."""
        self._pool.get(url).route = route

    def set_model(self, url: str, model: str) -> None:
        """Sets the name that the server at ``url`` gives its model, in place of ``Backend.model``."""
        self._pool.get(url).model = model

    def call(self, url: str, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """Sends one request of the control plane, without a retry, and returns the reply's JSON object.

        ``content`` is ``params`` and ``json`` as httpx takes them. The whole reply may take ``timeout_s`` seconds. It
        raises ServerGoneError if no answer comes or the server is not healthy, ReplyError if the answer is no JSON, and
        ServerRefusedError, with the server's message, for any other status than 200.
        """
        reply = self._await(self._http.exchange(self._pool.get(url).url, method, path, timeout_s, **content))
        return json_object(reply) if reply.content and path != "/health" else {}

    def answers(self, url: str) -> bool:
        """Returns whether ``/health`` answers 200 within 5 seconds."""
        try:
            self.call(url, "GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Samples probes from one server, in any state. Raises the errors of :meth:`call`."""
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

        Later requests of ``source`` are sent while the caller waits for the next item. Each quarter of a second it
        yields None, so that the caller can recover servers. Closing the iterator gives up the other responses. A token
        id of ``vocab_size`` or more makes a reply invalid; None allows any. ``metrics`` counts ``rollout/requests`` and
        ``rollout/retries``. It raises ServerError, in one line with the URL, if a response failed ``Retries.attempts``
        times or was refused. Errors of ``source`` pass through.
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
        while failures < self._kind.retries.attempts:
            if failure:
                metrics["rollout/retries"] += 1
                await asyncio.sleep(self._kind.retries.wait_s(failures))
            elif pauses.count:
                await asyncio.sleep(self._kind.retries.wait_s(pauses.count))
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
                await self._pool.set_state(server, "down", failure)
            except ReplyError as error:
                failure = str(error)
                if isinstance(error, OtherPromptError) and not self._has_warned:
                    self._has_warned = True
                    log.warning("%s; no such reply is taken, rollout/retries counts them", failure)
            except ServerRefusedError as error:
                if pauses.may_end(error):
                    failure = ""
                    continue
                if not may_pass(error):
                    raise
                failure = str(error)
            except Exception as error:
                said = " ".join(f"{type(error).__name__} {error}".split())
                raise ServerError(f"{ask.name} from {server.url} failed: {said}") from error
            finally:
                await self._pool.release(server)
            failures += 1
        raise ServerError(f"{ask.name} failed {self._kind.retries.attempts} times; the last: {failure}")

    async def _rollout(self, server: Server, request: Request, vocab_size: int | None) -> Completion:
        """Returns a completion that may be trained on, or a part of one if new weights came meanwhile."""
        url, first = server.url, max(0, len(server.versions) - 1)
        completion = await self._sample(server, request, self.limits.request_timeout_s)
        is_updated = server.state == "paused" or len(server.versions) - 1 > first
        check_completion(url, completion, request, vocab_size, may_be_part=is_updated)
        tags = [tag for tag, _, _ in completion.spans or ()]

        def foreign() -> set[str]:
            return set(tags).difference(server.versions[first:]) if server.versions else set()

        await self._pool.wait_for(lambda: not foreign() or server.state != "paused" or not self._pool.has(server))
        if others := foreign():
            raise ServerGoneError(f"{url} samples from weights {min(others)!r}, not from {server.versions[-1]!r}")
        return completion

    async def _probe(self, server: Server, request: Request) -> Completion:
        """Returns a completion of ``server``. Asks again if the reply cannot be read or the refusal may pass."""
        timeout_s = min(_PROBE_S, self.limits.request_timeout_s)
        failures, pauses = 0, Pauses(timeout_s)
        while True:
            try:
                return await self._sample(server, request, timeout_s)
            except (ReplyError, ServerRefusedError) as error:
                if not pauses.may_end(error):
                    failures += 1
                    if failures >= self._kind.retries.attempts or not may_pass(error):
                        raise
            await asyncio.sleep(self._kind.retries.wait_s(failures + pauses.count))

    async def _sample(self, server: Server, request: Request, timeout_s: float) -> Completion:
        """Returns one completion of ``server``."""
        url, body = server.url, self._kind.body(server.route, request, server.model)
        if server.route == self._kind.own_route:
            reply = await self._http.ask(url, server.route, timeout_s, body)
        else:
            reply = (await self._http.exchange(url, "POST", server.route, timeout_s, json=body)).content
        read = functools.partial(self._kind.completion, server.route, reply, request)
        try:
            return await self._loop.run_in_executor(self._reader, read) if len(reply) > _LONG_REPLY else read()
        except ReplyError as error:
            raise type(error)(f"{url}{error}") from error
