"""Requests that are sent to a server together, and their replies, each of which comes as soon as it is complete.

A request and a connection for each response cost both sides more processor time than a short response takes to sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx
import msgspec

from rljax.errors import ReplyError

_MOST = 64  # The most requests that share a connection. All of them are lost if it breaks.
_GATHER_S = 0.002  # The longest time that a request waits for others (seconds).
_GIVE_UP_S = 10.0  # The longest time that a server may take to give requests up (seconds).

_Reply = tuple[int, bytes]
"""The status and the content of a reply."""


class _Batch:
    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[asyncio.Future[_Reply]] = []
        self.given_up: list[int] = []  # the numbers of cancelled requests of which the server was not told yet
        self.is_known = asyncio.Event()  # set once the server has the requests, or the exchange has ended


class Batches:
    """The requests that are being gathered or answered. One event loop uses it.

    A reply has a line for each request: its number in the batch, the status, and the reply as JSON.
    """

    def __init__(self, http: httpx.AsyncClient, connect_timeout_s: float) -> None:
        """Sends nothing yet. ``connect_timeout_s``: The longest that a connection may take to open (seconds)."""
        self._http, self._timeout = http, httpx.Timeout(None, connect=connect_timeout_s)
        self._gathered: defaultdict[str, _Batch] = defaultdict(_Batch)  # by URL
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, url: str, body: dict[str, Any]) -> _Reply:
        """Returns the reply to ``body``, which is sent together with other requests to ``url`` of the same moment.

        It waits without a limit of time. If the caller is cancelled, the server gives the request up. Raises
        httpx.RequestError if the connection fails or breaks, and ReplyError if the reply cannot be read.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Reply] = loop.create_future()
        batch = self._gathered[url]
        batch.bodies.append(body)
        batch.answers.append(answer)
        if len(batch.answers) == 1:
            loop.call_later(_GATHER_S, self._send, url, batch)
        elif len(batch.answers) == _MOST:
            self._send(url, batch)
        return await answer

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts ``work`` as a task, and holds a reference to the task until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send(self, url: str, batch: _Batch) -> None:
        """Sends ``batch``, unless it was sent before because it was full."""
        if self._gathered.get(url) is not batch:
            return
        del self._gathered[url]
        exchange, left = self._start(self._exchange(url, batch)), len(batch.answers)

        def finished(number: int, answer: asyncio.Future[_Reply]) -> None:
            nonlocal left
            left -= 1
            if answer.cancelled():
                batch.given_up.append(number)
                if len(batch.given_up) == 1:
                    self._start(self._give_up(url, batch))
            if batch.given_up and not left:
                exchange.cancel()  # this closes the connection, so that the server gives up all that is left

        for number, answer in enumerate(batch.answers):
            answer.add_done_callback(functools.partial(finished, number))

    async def _give_up(self, url: str, batch: _Batch) -> None:
        """Makes the server give up the cancelled requests of ``batch``, unless all requests are answered."""
        await batch.is_known.wait()
        await asyncio.sleep(_GATHER_S)
        numbers, batch.given_up = batch.given_up, []
        if not all(answer.done() for answer in batch.answers):
            with contextlib.suppress(httpx.RequestError):  # the server is gone, and the other requests see that, too
                await self._http.delete(url, params={"batch": batch.name, "number": numbers}, timeout=_GIVE_UP_S)

    async def _exchange(self, url: str, batch: _Batch) -> None:
        """Sends ``batch`` and sets the reply of each request, or the error that ended the exchange."""
        try:
            content = msgspec.json.encode(batch.bodies)
            async with self._http.stream(
                "POST",
                url,
                params={"batch": batch.name},
                content=content,
                headers={"content-type": "application/json"},
                timeout=self._timeout,
            ) as reply:
                batch.is_known.set()
                if reply.status_code != 200:
                    refused = reply.status_code, await reply.aread()
                    for answer in batch.answers:
                        _give(answer, refused)
                    return
                async for line in _lines(reply):
                    try:
                        number, status, said = line.split(b" ", 2)
                        _give(batch.answers[int(number)], (int(status), said))
                    except (ValueError, IndexError) as error:
                        raise ReplyError(f"{url} sent an invalid line in a reply: {line[:200]!r}") from error
            raise httpx.RemoteProtocolError("the reply ended before all responses")
        except Exception as error:
            for answer in batch.answers:
                if not answer.done():
                    answer.set_exception(error)
        finally:
            batch.is_known.set()


def _give(answer: asyncio.Future[_Reply], reply: _Reply) -> None:
    if not answer.done():
        answer.set_result(reply)


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    parts: list[bytes] = []
    async for chunk in reply.aiter_bytes():
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield b"".join((*parts, line))
            parts.clear()
        parts.append(rest)
