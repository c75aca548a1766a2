"""Requests on their way to servers: each waits in line for a server with room, and is sent again if that fails.

The requests of a group, whose prompts begin alike, go to one server, so that its prefix cache serves them. The first
goes to the server with the least outstanding work. A request whose server is full waits. Another server takes it only
if all waiting requests are for full servers. Responses come back as they complete. The requests of a server that goes
down are sent to another, or wait. If a server gives a response up for new weights, any server samples the rest.
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
    """The client that sends requests for responses to servers. A subclass has the list of the servers.

    It has a thread with an event loop, until :meth:`end`. Other threads may call its methods, except :meth:`assign`.
    """

    def __init__(self, kind: Backend, limits: ClientLimits) -> None:
        """Starts the thread of the event loop. Nothing is sent yet."""
        self.kind, self.limits = kind, limits
        self.most = limits.max_outstanding  # the most requests that a server gets at a time
        self.last_open = time.monotonic()  # the last time at which a server was open or a stream began
        self._waiting: deque[tuple[Group, asyncio.Future[Server]]] = deque()
        self._warned = False  # whether a line was logged about replies to other prompts
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rljax-servers", daemon=True)
        self._thread.start()

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """The servers that are listed now."""

    @abstractmethod
    def tend(self) -> None:
        """Follows the list of servers, and recovers servers that are down. Called often while responses are sampled."""

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins ``work`` on the event loop, and returns its future. Raises ServerError if the loop has ended."""
        if not self._thread.is_alive():
            work.close()
        self.check_alive()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` on the event loop and returns its result. Raises ServerError if the loop ends before."""
        future = self.start(work)
        while not wait([future], timeout=_ALIVE_S).done:
            self.check_alive()
        return future.result()

    def on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a function called on the event loop, such as one that changes a server's state."""

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
        """Samples responses from open servers. Yields (``Ask.place``, completion) of each as it completes.

        ``take`` returns requests. It is called once, and at each change of ``turns`` until all trajectories have ended,
        while the caller waits for the next item. Closing the iterator gives up the responses under way. A token id of
        ``vocab_size`` or more makes a reply invalid; None allows any. ``rollout/requests`` and ``rollout/retries`` are
        counted in ``metrics``. ServerError, in one line with the URL, is raised if a response failed
        ``Backend.attempts`` times or was refused. The errors of :meth:`tend` and ``take`` are raised, too.
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
        """Gives open servers with room to requests that wait. The event loop calls it at each change of a server."""
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
