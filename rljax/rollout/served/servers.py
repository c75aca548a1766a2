"""The servers of an engine: requests go to those that are open, and those that are down are recovered."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Sequence

from rljax.errors import ServerGoneError, StoppedWaitingError
from rljax.rollout.served.backend import Backend
from rljax.rollout.served.client import ServerClient
from rljax.rollout.served.wire import Completion, Request

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SAY_EVERY_S = 30.0


class Servers:
    """A client, and what is done while servers are down."""

    def __init__(
        self,
        client: ServerClient,
        backend: Backend,
        recover_one: Callable[[str], None],
        *,
        wait_s: float,
        should_stop: Callable[[], bool],
    ) -> None:
        """Sends nothing yet.

        Args:
          client: whose servers these are.
          backend: of their kind.
          recover_one: makes a server that answers again fit for use, and opens or pauses it; raises ServerGoneError
            when it is gone again.
          wait_s: longest to wait while no server is open (seconds).
          should_stop: asked while no server is open; true ends the wait.
        """
        self._client, self._backend, self._recover_one = client, backend, recover_one
        self._wait_s, self._should_stop = wait_s, should_stop
        self._last_open, self._last_said = time.monotonic(), -math.inf

    def start_waiting(self) -> None:
        """From now on ``wait_s`` counts."""
        self._last_open = time.monotonic()

    def recover(self) -> None:
        """Recovers the servers that are down and answer again; waits a moment only while none is open.

        Raises:
          RuntimeError: none has been open for ``wait_s``.
          StoppedWaitingError: asked to stop, and none is open.
        """
        if self._client.opened():
            self.start_waiting()
        for url, reason in self._client.down().items():
            try:
                if self._client.answers(url):
                    self._recover_one(url)
                    continue
            except ServerGoneError as error:
                reason = str(error)
            if not self._client.opened():
                self._wait(time.monotonic() - self._last_open, reason)

    def sample(self, requests: Sequence[Request]) -> Generator[tuple[int, Completion]]:
        """Yields (index, completion) of all ``requests`` as they complete. Raises as :meth:`recover`."""
        self.start_waiting()
        with contextlib.closing(self._client.stream(requests)) as stream:
            for item in stream:
                if item is None:
                    self.recover()
                else:
                    yield item

    def _wait(self, waited: float, reason: str) -> None:
        name = self._backend.name
        if self._should_stop():
            raise StoppedWaitingError(f"asked to stop, and no {name} server answers: {reason}")
        if waited > self._wait_s:
            raise RuntimeError(f"no {name} server came back within {self._wait_s:g} s: {reason}")
        now = time.monotonic()
        if now - self._last_said >= _SAY_EVERY_S:
            self._last_said = now
            so_far = f"{waited:.0f} s of at most {self._wait_s:g} s ({reason})"
            restart = f"restart it on the same port ({self._backend.start_command})"
            log.warning("waiting for a %s server, %s; %s and the run goes on", name, so_far, restart)
        time.sleep(_POLL_S)
