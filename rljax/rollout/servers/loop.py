"""An asyncio event loop on a thread of its own, and calls into it from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rljax.errors import ServerError

T = TypeVar("T")
_ALIVE_S = 5.0  # The time between two checks that the event loop still runs (seconds).
_CLOSE_S = 10.0  # The longest time to end what still runs (seconds).


class LoopThread:
    """An event loop that runs from the start until :meth:`end`. Methods may be called from any other thread."""

    def __init__(self, name: str) -> None:
        """Starts the thread ``name``."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

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
