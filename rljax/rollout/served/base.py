"""What the engines over servers share: requests go to those that are open, and those that are down are recovered."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence

from rljax.errors import ReplyError, ServerGoneError, StoppedWaitingError, stop_sampling
from rljax.rollout.served.backend import Backend
from rljax.rollout.served.client import ServerClient
from rljax.rollout.served.wire import Completion, Request, ServerInfo
from rljax.rollout.types import ClientLimits

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SAY_EVERY_S = 30.0


class ServedBase:
    """A client of servers, and what is done while some of them are down."""

    def __init__(
        self,
        urls: Sequence[str],
        backend: Backend,
        limits: ClientLimits | None,
        *,
        wait_s: float,
        api_key_file: str | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sends nothing yet.

        Args:
          urls: of the servers.
          backend: of their kind.
          limits: of the client.
          wait_s: longest to wait while no server is open (seconds).
          api_key_file: as ``RolloutConfig.api_key_file``.
          should_stop: asked while no server is open; true ends the wait.
          gives_up: asked while responses are sampled, at least four times a second; true ends it.

        Raises:
          ValueError: ``urls`` or ``api_key_file`` are not such.
        """
        self._client, self._backend = ServerClient(urls, backend, limits, api_key_file=api_key_file), backend
        self._wait_s, self._should_stop, self._gives_up = wait_s, should_stop, gives_up
        self._last_open, self._last_said = time.monotonic(), -math.inf
        self._next_look: dict[str, float] = {}  # at a server that is down, by URL

    def pop_metrics(self) -> dict[str, float]:
        """See RolloutEngine."""
        return {f"rollout/{name}": float(count) for name, count in self._client.pop_counts().items()}

    def close(self) -> None:
        """See RolloutEngine. The servers keep running, with the weights they have."""
        self._client.close()

    def _recover(self, url: str) -> None:
        """Opens a server that answers again, as it stands; an engine that wants more of it overrides this.

        Raises:
          ServerGoneError: it is gone again.
          ReplyError: it answers with what cannot be read.
        """
        self._client.open(url, version=None)

    def _recover_all(self) -> None:
        """Recovers the servers that are down and answer again; waits a moment only while none is open.

        While one is open, the others are looked at so rarely that this takes at most a fifth of the time.

        Raises:
          RuntimeError: none has been open for ``wait_s``.
          StoppedWaitingError: asked to stop, and none is open.
        """
        if self._client.opened():
            self._last_open = time.monotonic()
        for url, reason in self._client.down().items():
            began = time.monotonic()
            if self._client.opened() and began < self._next_look.get(url, began):
                continue
            try:
                if self._client.answers(url):
                    self._recover(url)
                    continue
            except (ServerGoneError, ReplyError) as error:
                reason = str(error)
            finally:
                now = time.monotonic()
                self._next_look[url] = now + 4.0 * (now - began)
            if not self._client.opened():
                self._wait(time.monotonic() - self._last_open, reason)

    def _sample(self, requests: Sequence[Request], vocab_size: int | None) -> Generator[tuple[int, Completion]]:
        """Yields (index, completion) of all ``requests`` as they complete; token ids are below ``vocab_size``.

        Raises:
          ServerError: a response failed too often, or was refused. Otherwise as :meth:`_recover_all`.
          StoppedWaitingError: likewise, or ``gives_up`` said so. What was asked of the servers is cancelled.
        """
        self._last_open = time.monotonic()
        with contextlib.closing(self._client.stream(requests, vocab_size)) as stream:
            for item in stream:
                stop_sampling(self._gives_up)
                if item is None:
                    self._recover_all()
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


def shortest(infos: Iterable[ServerInfo]) -> ServerInfo:
    """The one that takes the shortest sequences."""
    return min(infos, key=lambda info: info.max_model_len or math.inf)
