"""Requests on their way to servers: each waits in line for a server with room, and is sent again if that fails.

The requests of a group, whose prompts begin alike, go to one server, so that its prefix cache serves them. The first
goes to the server with the least outstanding work. A request whose server is full waits. Other servers take it only
where nothing else waits for them. Responses come back as they complete. The requests of a server that goes down are
sent again to another one, or wait. A server may also give a response up for new weights.
Then its part is kept, and any server samples the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rljax.errors import OtherPromptError, ReplyError, ServerError, ServerGoneError, ServerRefusedError
from rljax.rollout.engine import TurnQueue
from rljax.rollout.servers.http import may_pass
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.requests import Ask, Completion, Group, TakeAsks, join_parts, remaining_request
from rljax.rollout.servers.server import Server
from rljax.rollout.types import ClientLimits

log = logging.getLogger(__name__)

T = TypeVar("T")
_ALIVE_S = 5.0  # The time between two checks that the event loop still runs (seconds).
_CLOSE_S = 10.0  # The longest time to end what still runs (seconds).
_TICK_S = 0.25  # The time between two calls of ``tend`` while responses are sampled (seconds).


class Dispatcher(ABC):
    """The requests that wait, in their order, and those under way. A subclass has the servers.

    An event loop sends them, from the start until :meth:`end`. Methods may be called from any other thread.
    """

    def __init__(self, kind: Backend, limits: ClientLimits) -> None:
        """Starts the thread of the event loop. Nothing is sent yet."""
        self.kind, self.limits = kind, limits
        self.most = limits.max_outstanding  # the most requests that a server gets at a time
        self.last_open = time.monotonic()  # the last time at which a server was open or a stream began
        self._waiting: deque[tuple[Group, asyncio.Future[Server]]] = deque()
        self._warned = False  # whether a line was logged about replies of other prompts
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rljax-servers", daemon=True)
        self._thread.start()

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """The servers that are listed now."""

    @abstractmethod
    def tend(self) -> None:
        """Follows the list of servers, and recovers those that are down. Called while responses are sampled."""

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins ``work``. Raises ServerError if the event loop has ended."""
        if not self._thread.is_alive():
            work.close()
        self.check_alive()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of work that ends by itself, as long as the event loop runs."""
        future = self.start(work)
        while not wait([future], timeout=_ALIVE_S).done:
            self.check_alive()
        return future.result()

    def on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function on the event loop, such as one that changes the state of a server."""

        async def call() -> T:
            return function(*arguments)

        return self.wait(call())

    def check_alive(self) -> None:
        """Raises ServerError if the event loop has ended, by itself or by :meth:`end`."""
        if not self._thread.is_alive():
            raise ServerError("the event loop of the HTTP client has ended")

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels all work, runs the coroutine function ``last``, and ends the thread. It may be called twice."""
        if self.loop.is_closed():
            return

        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()

        if self._thread.is_alive():
            wait([self.start(finish())], timeout=_CLOSE_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self.loop.close()

    def stream(
        self,
        take: TakeAsks,
        turns: TurnQueue | None = None,
        vocab_size: int | None = None,
        metrics: dict[str, float] | None = None,
    ) -> Generator[tuple[tuple[int, int], Completion]]:
        """Samples requests from open servers; yields (``Ask.place``, completion) as they complete.

        ``take`` is called once, and at each change of ``turns`` until these are over. Further requests are sent while
        the caller waits for the next item. Closing the iterator gives up the other responses. A token id of
        ``vocab_size`` or more makes a reply invalid; None allows any. ``metrics`` counts ``rollout/requests`` and
        ``rollout/retries``. It raises ServerError, in one line with the URL, if a response failed ``Backend.attempts``
        times or was refused, and the errors of :meth:`tend` and ``take``.
        """
        metrics = {} if metrics is None else metrics
        completed: queue.SimpleQueue[Future[Completion] | None] = queue.SimpleQueue()  # None: there may be new requests
        for name in ("rollout/requests", "rollout/retries"):
            metrics.setdefault(name, 0.0)
        running: dict[Future[Completion], tuple[int, int]] = {}
        if turns is not None:
            turns.watch(lambda: completed.put(None))
        completed.put(None)
        self.last_open = time.monotonic()
        tend_at = self.last_open + _TICK_S
        try:
            while running or not completed.empty() or not (turns is None or turns.is_over):
                self.check_alive()
                with contextlib.suppress(queue.Empty):
                    done = completed.get(timeout=max(tend_at - time.monotonic(), 0.0))
                    if done is not None:
                        yield running.pop(done), done.result()
                    else:
                        for ask in take():
                            work = self._answer(ask, vocab_size, metrics)
                            future = asyncio.run_coroutine_threadsafe(work, self.loop)
                            running[future] = ask.place
                            future.add_done_callback(completed.put)
                if time.monotonic() >= tend_at:
                    self.tend()
                    tend_at = time.monotonic() + _TICK_S
        finally:
            if turns is not None:
                turns.watch(lambda: None)
            for future in running:
                future.cancel()

    async def _answer(self, ask: Ask, vocab_size: int | None, metrics: dict[str, float]) -> Completion:
        """Returns the completion of a request. Raises ServerError if it is refused or all attempts failed."""
        failure, failures = "", 0
        parts: list[Completion] = []
        while failures < self.kind.attempts:
            if failure:
                metrics["rollout/retries"] += 1
                await asyncio.sleep(self.kind.wait_s(failures))
            server = await self._take(ask.group)
            metrics["rollout/requests"] += 1
            try:
                parts.append(await server.rollout(remaining_request(ask.request, parts), vocab_size))
                if parts[-1].finish_reason != "abort":
                    return join_parts(parts)
                failure = ""
                continue
            except ServerGoneError as error:
                failure = str(error)
                server.close(failure)
            except ReplyError as error:
                failure = str(error)
                if isinstance(error, OtherPromptError) and not self._warned:
                    self._warned = True
                    log.warning("%s; no such reply is taken, rollout/retries counts them", failure)
            except ServerRefusedError as error:
                if not may_pass(error):
                    raise
                failure = str(error)
            except Exception as error:
                said = " ".join(f"{type(error).__name__} {error}".split())
                raise ServerError(f"{ask.name} from {server.url} failed: {said}") from error
            finally:
                self._give_back(server)
            failures += 1
        raise ServerError(f"{ask.name} failed {self.kind.attempts} times; the last: {failure}")

    async def _take(self, group: Group) -> Server:
        """Waits for an open server with room for a request, counts the request there, and returns the server."""
        given: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, given))
        self.assign()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._give_back(given.result())
            raise

    def _give_back(self, server: Server) -> None:
        server.outstanding -= 1
        self.assign()

    def assign(self) -> None:
        """Gives servers to the requests that wait, as long as a server has room. Called at each change of a server."""
        while self._waiting:
            opened = [each for each in self.servers if each.state == "open"]
            free = [each for each in opened if each.outstanding < self.most]
            full = [each for each in opened if each not in free]
            if not free:
                return
            at = next((i for i, (group, _) in enumerate(self._waiting) if group.home not in full), 0)
            group, given = self._waiting[at]
            del self._waiting[at]
            if given.done():
                continue
            idlest = min(free, key=lambda each: each.outstanding)
            server = next((each for each in free if each is group.home), idlest)
            if group.home not in full:
                group.home = server
            server.outstanding += 1
            given.set_result(server)
