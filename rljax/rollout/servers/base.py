"""What the engines over servers share: requests go to those that are open, and those that are down are recovered.

What a server is asked to be recovered is asked on threads, of all of them side by side, while responses are sampled;
what needs the policy, and who may sample, is decided on the caller's thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from rljax.errors import ReplyError, ServerError, ServerGoneError, StoppedWaitingError
from rljax.rollout.engine import NeverStopping, Stopping, check_wanted
from rljax.rollout.servers.backend import Backend
from rljax.rollout.servers.client import ServerClient, check_url
from rljax.rollout.servers.discovery import Discovery
from rljax.rollout.servers.metrics import Metrics
from rljax.rollout.servers.wire import Completion, Request, ServerInfo
from rljax.rollout.types import ClientLimits

log = logging.getLogger(__name__)

_POLL_S = 1.0
_LOOK_EVERY_S = 0.5  # at a server that is down
_RECOVERY_S = 10.0  # that it may take to recover a server before somebody is told that it is waited for
_SAY_EVERY_S = 30.0
_AT_ONCE = 64  # servers that are asked side by side


class ServedBase:
    """A client of servers, and what is done while some of them are down."""

    def __init__(
        self,
        urls: Sequence[str],
        backend: Backend,
        limits: ClientLimits | None,
        *,
        wait_s: float,
        discovery: str | None = None,
        api_key_file: str | None = None,
        router: str | None = None,
        stop: Stopping | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
          urls: of the servers; not used with ``discovery``.
          backend: of their kind.
          limits: of the client.
          wait_s: longest to wait while no server is open (seconds).
          discovery: as ``RolloutConfig.discovery``.
          api_key_file: as ``RolloutConfig.api_key_file``.
          router: as ``RolloutConfig.router``.
          stop: Whether to stop waiting for servers, and to give up what is sampled; asked at least four times a second.
            None: neither.

        Raises:
          ValueError: ``urls``, ``discovery`` or ``api_key_file`` are not such.
        """
        named = urls if discovery is None else ()
        if not named and discovery is None:
            raise ValueError("at least one server is needed, in urls or by discovery")
        self._backend = backend
        self._client = ServerClient(named, backend, limits, api_key_file=api_key_file, router=router)
        self._discovery = None if discovery is None else Discovery(discovery, check_url)
        self._wait_s, self._stop = wait_s, stop or NeverStopping()
        self._metrics = Metrics()
        self._reported_losses = 0
        self._last_open, self._last_said = time.monotonic(), -math.inf
        self._asking = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rljax-servers")
        self._asked: dict[str, Future[Any]] = {}  # what is being asked of servers, by URL
        self._outdated: set[Future[Any]] = set()  # of them, whose answers count no more
        self._watched: dict[str, Future[None]] = {}  # looks at open servers that only a router talks to, by URL
        self._next_look: dict[str, float] = {}  # at a server, by URL
        self._following = threading.Lock()

    def report(self) -> dict[str, float]:
        """What happened at the servers since the last report."""
        losses = self._client.losses
        since, self._reported_losses = losses - self._reported_losses, losses
        return {
            **self._metrics.pop(),
            "rollout/server_losses": float(since),
            "rollout/servers": float(len(self._client.opened())),
        }

    def close(self) -> None:
        """See RolloutEngine. The servers keep running, with the weights they have."""
        if self._discovery is not None:
            self._discovery.close()
        self._client.close()
        self._asking.shutdown(cancel_futures=True)

    def _recover(self, url: str) -> Any:
        """Asks of a server that answers again what is needed to open it; on a thread. An engine overrides this.

        Raises:
          ServerGoneError: it is gone again.
          ReplyError: it answers with what cannot be read.
        """

    def _admit(self, url: str, recovered: Any) -> None:
        """Opens a server of which ``_recover`` gave ``recovered``; an engine that asks more of it overrides this."""
        self._client.open(url, version=None)

    def _refuse(self, url: str, error: Exception) -> None:
        """What is done with a server on which ``_recover`` or ``_admit`` failed."""
        raise error

    # ---- what is asked of servers, side by side ----

    def _follow_discovery(self) -> None:
        """Takes in the servers that are listed now, and leaves those that are not."""
        if self._discovery is None:
            return
        with self._following:  # who samples and who publishes may do it at once
            joined, left = self._client.set_urls(self._discovery.urls)
        for url in joined:
            log.info("%s joins", url)
        for url in left:
            log.info("%s leaves", url)
            self._next_look.pop(url, None)
        for name, urls in (("joined", joined), ("left", left)):
            if urls:
                self._metrics.add(f"rollout/servers_{name}", float(len(urls)))

    def _ask(self, url: str, act: Callable[[str], Any]) -> Future[Any] | None:
        """Begins ``act(url)`` on a thread; None where that server is still being asked something else."""
        if url in self._asked:
            return None
        self._asked[url] = self._asking.submit(act, url)
        return self._asked[url]

    def _forget_asked(self) -> None:
        """What is being asked of servers now will not count: other weights are published."""
        self._outdated.update(self._asked.values())
        self._watched.clear()

    def _look(self, url: str) -> Any:
        """``_recover`` of a server that may be gone."""
        if not self._client.answers(url):
            raise ServerGoneError(self._client.down().get(url, f"{url} does not answer"))
        return self._recover(url)

    def _check_held(self, url: str) -> None:
        """Raises ServerError where an open server is not fit any more; on a thread."""
        self._client.call(url, "GET", "/health", timeout_s=5.0)

    def _watch_open(self) -> None:
        """Marks open servers down that are gone, where requests go to a router and so do not show which one is."""
        for url, look in list(self._watched.items()):
            if look.done():
                del self._watched[url]
                if isinstance(look.exception(), ServerError) and url in self._client.opened():
                    self._client.mark_down(url, str(look.exception()))
        now = time.monotonic()
        for url in self._client.opened() if self._client.has_router else ():
            if url not in self._watched and now >= self._next_look.get(url, 0.0):
                self._next_look[url] = now + _LOOK_EVERY_S
                self._watched[url] = self._asking.submit(self._check_held, url)

    def _take_answers(self) -> None:
        """Opens the servers that have given all that they were asked for, in the order of the servers."""
        urls = [url for url in self._asked if self._asked[url].done()]
        for url in sorted(urls, key=[*self._client.urls, *urls].index):
            answer = self._asked.pop(url)
            self._next_look[url] = time.monotonic() + _LOOK_EVERY_S
            outdated = answer in self._outdated
            self._outdated.discard(answer)
            if url not in self._client.urls:
                continue
            if outdated:
                self._client.mark_down(url, f"{url} was busy with the weights before")
                continue
            try:
                self._admit(url, answer.result())
            except (ServerGoneError, ReplyError) as error:
                self._client.mark_down(url, str(error))
            except (RuntimeError, ValueError) as error:
                self._refuse(url, error)

    def _recover_all(self) -> None:
        """Recovers the servers that are down and answer again; waits a moment only while none is open.

        Raises:
          RuntimeError: none has been open for ``wait_s``.
          StoppedWaitingError: asked to stop, and none is open.
        """
        self._follow_discovery()
        self._watch_open()
        if self._client.opened():
            self._last_open = time.monotonic()
        for url in self._client.down():
            if time.monotonic() >= self._next_look.get(url, 0.0):
                self._ask(url, self._look)
        if not self._client.opened():
            wait(self._asked.values(), timeout=_POLL_S, return_when=FIRST_COMPLETED)
        down = len(self._client.down())
        self._take_answers()
        if not self._client.opened() and len(self._client.down()) >= down:
            self._wait(time.monotonic() - self._last_open)

    def _sample(
        self, requests: Sequence[Request], vocab_size: int | None, group_size: int, metrics: dict[str, float]
    ) -> Generator[tuple[int, Completion]]:
        """Yields (index, completion) of all ``requests`` as they complete; token ids are below ``vocab_size``.

        Raises:
          ServerError: a response failed too often, or was refused. Otherwise as :meth:`_recover_all`.
          StoppedWaitingError: likewise, or what is sampled is given up. What was asked of the servers is cancelled.
        """
        self._last_open = time.monotonic()
        stream = self._client.stream(requests, vocab_size, group_size=group_size, metrics=metrics)
        with contextlib.closing(stream):
            for item in stream:
                check_wanted(self._stop)
                if item is None:
                    self._tend()
                else:
                    yield item

    def _tend(self) -> None:
        """Looks after the servers while responses are sampled. Raises as :meth:`_recover_all`."""
        self._recover_all()

    def _wait(self, waited: float) -> None:
        """Says, from time to time, what is waited for, and waits a moment."""
        name = self._backend.name
        reason = next(iter(self._client.down().values()), "")
        if not self._client.urls and self._discovery is not None:
            reason = f"{self._discovery.where} lists none"
        if self._stop.is_requested():
            raise StoppedWaitingError(f"asked to stop, and no {name} server answers: {reason}")
        if waited > self._wait_s:
            raise RuntimeError(f"no {name} server came back within {self._wait_s:g} s: {reason}")
        now = time.monotonic()
        asked = waited < _RECOVERY_S and not all(answer.done() for answer in self._asked.values())
        if not asked and now - self._last_said >= _SAY_EVERY_S:
            self._last_said = now
            so_far = f"{waited:.0f} s of at most {self._wait_s:g} s ({reason})"
            restart = f"restart it on the same port ({self._backend.start_command})"
            log.warning("waiting for a %s server, %s; %s and the run goes on", name, so_far, restart)
        time.sleep(_LOOK_EVERY_S)


def wait_for_most(futures: Iterable[Future[Any]], patience_s: float) -> None:
    """Returns when all are done, or when one has succeeded and the others took as long again, and ``patience_s``."""
    began, pending = time.monotonic(), set(futures)
    succeeded = False
    while pending and not succeeded:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        succeeded = any(each.exception() is None for each in done)
    wait(pending, timeout=max(patience_s, time.monotonic() - began))


def shortest(infos: Iterable[ServerInfo]) -> ServerInfo:
    """The one that takes the shortest sequences."""
    return min(infos, key=lambda info: info.max_model_len or math.inf)
