"""HTTP exchanges with servers, one at a time or several on one connection, and the errors that they raise.

A request and a connection for each response cost both sides more processor time than a short response takes to sample.
So requests of the same moment are sent to a server together, and their replies come as each is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import httpx
import msgspec

from rljax.errors import ReplyError, ServerError, ServerGoneError, ServerRefusedError

CONNECT_S = 10.0
"""The longest that a connection may take to open (seconds)."""
_MOST = 64  # The most requests that share a connection. All of them are lost if it breaks.
_GATHER_S = 0.002  # The longest time that a request waits for others (seconds).
_SPARE_FILES = 512  # The file descriptors left to JAX, checkpoints, rows, reward workers and the device driver.

_Reply = tuple[int, bytes]
"""The status and the content of a reply."""
_Batch = list[tuple[dict[str, Any], asyncio.Future[list[_Reply]]]]
"""Requests that share a connection, each with the future of its reply. The waiting coroutine pops the reply."""


class Http:
    """The client of HTTP exchanges with servers. Only one event loop may use it."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Opens nothing yet. Each request has ``headers``."""
        self._http = httpx.AsyncClient(
            # A connection for each request: vLLM closes idle ones after 5 s and resets one on which it answered 500.
            # Requests for rollouts share one where the server has rljax's endpoint (``ask``).
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            headers=headers,
        )
        self._timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._gathered: defaultdict[str, _Batch] = defaultdict(list)  # by URL
        self._exchanges: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def exchange(self, url: str, method: str, path: str, timeout_s: float, **content: Any) -> bytes:
        """Sends a request with httpx's arguments ``content``. Returns the reply's content within ``timeout_s`` seconds.

        Raises:
          ServerGoneError: No whole HTTP answer comes, or the server is not healthy.
          ReplyError: The body of the answer cannot be decoded.
          ServerRefusedError: The answer has another status than 200. The error has the server's message.
        """
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), pool=None)
        async with _answering(url + path, timeout_s):
            reply = await self._http.request(method, url + path, timeout=timeout, **content)
        if reply.status_code != 200:
            await self._refuse(url, path, reply)
        return reply.content

    async def ask(self, url: str, path: str, timeout_s: float, body: dict[str, Any]) -> bytes:
        """Returns the reply to a request with the JSON ``body``. Requests of the same moment to a path go together.

        Once nobody waits for a reply to any of them, the server gives them up. Raises the errors of :meth:`exchange`.
        """
        address, loop = url + path, asyncio.get_running_loop()
        answer: asyncio.Future[list[_Reply]] = loop.create_future()
        batch = self._gathered[address]
        batch.append((body, answer))
        if len(batch) == 1:
            loop.call_later(_GATHER_S, self._send, address, batch)
        elif len(batch) == _MOST:
            self._send(address, batch)
        async with _answering(address, timeout_s):
            status, content = (await answer).pop()
        if status != 200:
            await self._refuse(url, path, httpx.Response(status, content=content))
        return content

    async def _refuse(self, url: str, path: str, reply: httpx.Response) -> NoReturn:
        """Raises the error that a reply of another status than 200 stands for."""
        if path == "/health":
            raise ServerGoneError(f"{url} is not healthy: {refusal_text(reply)}")
        if reply.status_code >= 500:
            await self.exchange(url, "GET", "/health", 10.0)  # raises where the server is gone
        hint = "; name the server's key file in rollout.api_key_file or RLJAX_API_KEY_FILE"
        wanted = hint if reply.status_code == 401 else ""
        said = f"{url}{path} answered {refusal_text(reply)}{wanted}"
        raise ServerRefusedError(said, reply.status_code)

    def _send(self, url: str, batch: _Batch) -> None:
        """Sends ``batch``, unless it was sent before because it was full."""
        if self._gathered.get(url) is not batch:
            return
        del self._gathered[url]
        exchange = asyncio.create_task(self._exchange_all(url, batch))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)

        def finished(_: asyncio.Future[list[_Reply]]) -> None:
            if all(answer.done() for _, answer in batch) and any(answer.cancelled() for _, answer in batch):
                exchange.cancel()  # this closes the connection, so that the server gives up all that is left

        for _, answer in batch:
            answer.add_done_callback(finished)

    async def _exchange_all(self, url: str, batch: _Batch) -> None:
        """Sends ``batch``, and sets the reply of each request, or the error that ended the exchange."""
        try:
            content = msgspec.json.encode([body for body, _ in batch])
            async with self._http.stream(
                "POST", url, content=content, headers={"content-type": "application/json"}, timeout=self._timeout
            ) as reply:
                if reply.status_code != 200:
                    refused = reply.status_code, await reply.aread()
                    for _, answer in batch:
                        _give(answer, refused)
                    return
                async for line in reply.aiter_lines():
                    try:
                        number, status, said = line.split(" ", 2)
                        _give(batch[int(number)][1], (int(status), said.encode()))
                    except (ValueError, IndexError) as error:
                        raise ReplyError(f"{url} sent an invalid line in a reply: {line[:200]!r}") from error
            raise httpx.RemoteProtocolError("the reply ended before all responses")
        except Exception as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)


def _give(answer: asyncio.Future[list[_Reply]], reply: _Reply) -> None:
    if not answer.done():
        answer.set_result([reply])


@contextlib.asynccontextmanager
async def _answering(address: str, timeout_s: float) -> AsyncIterator[None]:
    """Limits the time of a reply. Raises ServerGoneError if none comes in time, ReplyError if its body is invalid."""
    try:
        # httpx's timeouts bound each read: a server that sends a byte now and then never exceeds them.
        async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
            yield
    except (httpx.TransportError, TimeoutError) as error:
        said = f"{type(error).__name__} {error}".rstrip()
        late = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        raise ServerGoneError(f"no answer from {address}{late}: {said}") from error
    except httpx.RequestError as error:  # a body that cannot be decoded
        raise ReplyError(f"{address} sent no valid HTTP reply: {error}") from error


def may_pass(error: ServerError) -> bool:
    """Returns whether a request that failed with ``error`` may succeed if it is sent again."""
    return not isinstance(error, ServerRefusedError) or error.status >= 500 or error.status in (408, 429)


def json_object(address: str, content: bytes) -> dict[str, Any]:
    """Returns the JSON object of a reply from ``address``. Any other JSON value comes under the key ``value``.

    Raises ReplyError if the reply is not JSON.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        said = content[:200].decode(errors="replace")
        raise ReplyError(f"{address} sent no valid JSON: {said!r}") from error
    return value if isinstance(value, dict) else {"value": value}


def refusal_text(reply: Any) -> str:
    """Returns the status of an httpx reply and the server's own words, in one line."""
    text = reply.text
    with contextlib.suppress(ValueError, AttributeError):
        error = reply.json().get("error", text)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    return f"{reply.status_code}: {' '.join(text.split())[:500]}"


def room_for(connections: int) -> int:
    """Returns how many of ``connections`` can be open at a time, at least 1. Each takes a file descriptor.

    The soft limit of file descriptors of this process is raised as far as needed. Shells commonly set it to 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = connections + 8 * _SPARE_FILES  # many may be open already
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a kernel that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, min(connections, soft - _SPARE_FILES))


def check_url(url: str) -> None:
    """Raises ValueError unless ``url`` is an http or https URL without user and password. Logs show URLs."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}: {error}") from error
    if parsed.userinfo:
        raise ValueError(f"a URL of {parsed.host} holds a user or a password; URLs are logged")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"expected URLs such as http://host:port, got {url!r}")
