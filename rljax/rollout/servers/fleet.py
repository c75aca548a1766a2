"""The servers of an engine while a run goes on: requests go to open servers, and servers that are down recover.

Threads ask the servers the questions of a recovery, side by side, while responses are sampled. The caller's thread
judges the answers, which may need the policy, and decides which servers may sample.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from rljax.errors import ReplyError, ServerError, ServerGoneError, ServersLostError, StoppedWaitingError
from rljax.rollout.engine import Stopping, check_wanted
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.discovery import Discovery
from rljax.rollout.servers.http import check_url
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.requests import Completion
from rljax.rollout.servers.sources import RequestSource
from rljax.rollout.types import RolloutConfig

log = logging.getLogger(__name__)

_POLL_S = 1.0  # The longest wait for answers of servers that recover (seconds).
_TRY_EVERY_S = 0.5  # The time between two attempts to recover a server (seconds).
_RECOVERY_S = 10.0  # The time that a server may recover before a log line says that the run waits for it (seconds).
_SAY_EVERY_S = 30.0  # The time between two such lines (seconds).
_AT_ONCE = 64  # The most servers that are asked side by side.
_LONGEST_S = 3600.0  # A time longer than any request to a server takes (seconds).


class Admission(ABC):
    """The proof that a server must give before rollouts go to it, and the fate of one that fails."""

    def recover(self, url: str) -> Any:
        """Asks a server that answers again for its proof, and returns the proof for ``admit``. Runs on a thread."""
        return None

    @abstractmethod
    def admit(self, url: str, shown: Any) -> None:
        """Opens a server if its proof ``shown`` holds. Runs on the caller's thread."""

    def refuse(self, url: str, error: Exception) -> None:
        """Marks a server down after ``error`` in ``recover`` or ``admit``, or raises it. On the caller's thread."""
        raise error

    def may_recover(self) -> bool:
        """Returns whether servers can be recovered on the calling thread now."""
        return True


class Metrics:
    """Named numbers of one step that several threads add to."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Adds ``value`` to the number, which begins at 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def highest(self, name: str, value: float) -> None:
        """Keeps the larger of the number and ``value``."""
        with self._lock:
            self._values[name] = max(self._values.get(name, value), value)

    def put(self, name: str, value: float) -> None:
        """Replaces the number."""
        with self._lock:
            self._values[name] = value

    def take(self) -> dict[str, float]:
        """Returns all numbers and forgets them."""
        with self._lock:
            values, self._values = self._values, {}
            return values


class Fleet:
    """A client of servers, and the recovery of servers that are down."""

    def __init__(self, config: RolloutConfig, backend: Backend, admission: Admission, stop: Stopping | None = None):
        """Sends nothing yet. ``stop`` tells when to give up a wait; None stands for never.

        It raises ValueError if ``urls``, ``discovery`` or ``api_key_file`` cannot be used.
        """
        urls = config.urls if config.discovery is None else ()
        if not urls and config.discovery is None:
            raise ValueError("at least one server is needed, in urls or by discovery")
        self._backend, self._admission = backend, admission
        self.client = ServerClient(urls, backend, config.limits, api_key_file=config.api_key_file)
        self.metrics = Metrics()  # the numbers that :meth:`report` returns
        self.discovery = None if config.discovery is None else Discovery(config.discovery, check_url)
        self._wait_s, self._stop = config.server_wait_s, stop
        self._reported_losses = 0
        self._last_open, self._last_said = time.monotonic(), -math.inf
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rljax-servers")
        self._asked: dict[str, Future[Any]] = {}  # the proof that each asked server will give, by URL
        self._outdated: set[Future[Any]] = set()  # the futures in ``_asked`` whose proof is of older weights
        self._next_try: dict[str, float] = {}  # the time of the next attempt to recover a server, by URL
        self._following = threading.Lock()

    def report(self) -> dict[str, float]:
        """Returns the metrics of the servers since the last report. Sampling has metrics of its own."""
        losses = self.client.losses
        since, self._reported_losses = losses - self._reported_losses, losses
        return {
            **self.metrics.take(),
            "rollout/server_losses": float(since),
            "rollout/servers": float(len(self.client.opened())),
        }

    def close(self) -> None:
        """Closes the client and ends the threads. The servers keep running, with the weights that they have."""
        if self.discovery is not None:
            self.discovery.close()
        self.client.close()
        self._threads.shutdown(cancel_futures=True)

    def stream(
        self, source: RequestSource, vocab_size: int | None, metrics: dict[str, float]
    ) -> Generator[tuple[tuple[int, int], Completion]]:
        """Yields the completions of :meth:`ServerClient.stream` with their places, and tends the servers meanwhile."""
        self.restart_wait()
        sampled = self.client.stream(source, vocab_size, metrics=metrics)
        with contextlib.closing(sampled) as stream:
            for item in stream:
                if item is None:
                    self.tend()
                else:
                    yield item

    def tend(self) -> None:
        """Looks after the servers while responses are sampled, and recovers them if the calling thread may do that.

        It raises StoppedWaitingError if the run gives the responses up, and ServersLostError if all servers are down
        and the calling thread may not recover them. It also raises the errors of :meth:`recover_all`.
        """
        if self._stop is not None:
            check_wanted(self._stop)
        if self._admission.may_recover():
            self.recover_all()
            return
        self.follow_discovery()
        down = self.client.down()
        if len(down) == len(self.client.urls):  # a paused server is given weights, and goes on then
            reason = next(iter(down.values()), "none is listed")
            raise ServersLostError(f"no {self._backend.name} server is left to sample: {reason}")

    def recover_all(self) -> None:
        """Recovers the servers that are down and answer again. It waits, for a moment, only while no server is open.

        It raises RuntimeError if no server was open for ``server_wait_s``, and StoppedWaitingError if none is open and
        the run was asked to stop.
        """
        self.follow_discovery()
        if self.client.opened():
            self.restart_wait()
        for url in self.client.down():
            if time.monotonic() >= self._next_try.get(url, 0.0):
                self._ask(url, self._recover)
        if not self.client.opened():
            wait(self._asked.values(), timeout=_POLL_S, return_when=FIRST_COMPLETED)
        down = len(self.client.down())
        self.take_answers()
        if not self.client.opened() and len(self.client.down()) >= down:
            self._wait(time.monotonic() - self._last_open)

    def renew(self, work: Callable[[str], Any], urls: Sequence[str], patience_s: float) -> None:
        """Pauses ``urls``, calls ``work`` for each, and recovers servers that are down. Returns once one is open.

        ``work`` runs on threads and returns the proof for ``Admission.admit``. Once one server is ready, the others
        have as long again, and at least ``patience_s`` seconds. It raises the errors of :meth:`recover_all` and
        ``Admission.refuse``.
        """
        begun = []
        for url in urls:
            self.client.pause(url)
            begun.append(self._ask(url, work))
        begun += [self._ask(url, self._recover) for url in self.client.down()]
        wait_for_most((each for each in begun if each is not None), patience_s)
        self.restart_wait()
        self.take_answers()
        while not self.client.opened():
            self.recover_all()

    def side_by_side(self, work: Callable[[str], None], urls: Sequence[str], patience_s: float = _LONGEST_S) -> None:
        """Calls ``work(url)`` for each URL on threads, and marks down a server that fails or is much slower.

        After the first success, the other calls may take as long again as that call took, and at least ``patience_s``
        seconds. ``work`` raises ServerError if the server fails.
        """
        futures = {url: self._threads.submit(work, url) for url in urls}
        wait_for_most(futures.values(), patience_s)
        for url, future in futures.items():
            if not future.done():
                self.client.mark_down(url, f"{url} was not ready {patience_s:g} s after another server")
                continue
            try:
                future.result()
            except ServerError as error:
                self.client.mark_down(url, str(error))

    def answering(self) -> list[str]:
        """Returns the URLs of the servers that are not down."""
        return [url for url in self.client.urls if url not in self.client.down()]

    def busy(self) -> list[str]:
        """Returns the URLs of the servers that have not answered yet in a recovery or an update."""
        return [url for url, answer in self._asked.items() if not answer.done()]

    def follow_discovery(self) -> None:
        """Adds the servers that discovery lists now, and drops those that it does not list."""
        if self.discovery is None:
            return
        with self._following:  # a thread that samples and one that publishes may do it at the same time
            joined, left = self.client.set_urls(self.discovery.urls)
        for url in joined:
            log.info("%s joins", url)
        for url in left:
            log.info("%s leaves", url)
            self._next_try.pop(url, None)
        for name, urls in (("joined", joined), ("left", left)):
            if urls:
                self.metrics.add(f"rollout/servers_{name}", float(len(urls)))

    def forget_asked(self) -> None:
        """Marks the proofs that servers are giving now as outdated, because other weights are published."""
        self._outdated.update(self._asked.values())

    def take_answers(self) -> None:
        """Judges the proofs that servers have given, in the order of the servers. Admits those that pass."""
        urls = [url for url in self._asked if self._asked[url].done()]
        for url in sorted(urls, key=[*self.client.urls, *urls].index):
            answer = self._asked.pop(url)
            self._next_try[url] = time.monotonic() + _TRY_EVERY_S
            outdated = answer in self._outdated
            self._outdated.discard(answer)
            if url not in self.client.urls:
                continue
            if outdated:
                self.client.mark_down(url, f"{url} was busy with the weights before")
                continue
            try:
                self._admission.admit(url, answer.result())
            except (ServerGoneError, ReplyError) as error:
                self.client.mark_down(url, str(error))
            except (RuntimeError, ValueError) as error:
                self._admission.refuse(url, error)

    def restart_wait(self) -> None:
        """Restarts the count of the time without an open server."""
        self._last_open = time.monotonic()

    def _ask(self, url: str, work: Callable[[str], Any]) -> Future[Any] | None:
        """Begins ``work(url)`` on a thread. Returns None if that server is still being asked something else."""
        if url in self._asked:
            return None
        self._asked[url] = self._threads.submit(work, url)
        return self._asked[url]

    def _recover(self, url: str) -> Any:
        """Recovers a server that was down. Raises ServerGoneError if it does not answer."""
        if not self.client.answers(url):
            raise ServerGoneError(self.client.down().get(url, f"{url} does not answer"))
        return self._admission.recover(url)

    def _wait(self, waited: float) -> None:
        """Waits a moment, and logs the wait from time to time. ``waited``: The time without an open server (seconds).

        Raises StoppedWaitingError if the run was asked to stop, and RuntimeError after ``server_wait_s``.
        """
        name = self._backend.name
        reason = next(iter(self.client.down().values()), "")
        if not self.client.urls and self.discovery is not None:
            reason = f"{self.discovery.where} lists none"
        if self._stop is not None and self._stop.is_requested():
            raise StoppedWaitingError(f"asked to stop, and no {name} server answers: {reason}")
        if waited > self._wait_s:
            raise RuntimeError(f"no {name} server came back within {self._wait_s:g} s: {reason}")
        now = time.monotonic()
        asked = waited < _RECOVERY_S and bool(self.busy())
        if not asked and now - self._last_said >= _SAY_EVERY_S:
            self._last_said = now
            so_far = f"{waited:.0f} s of at most {self._wait_s:g} s ({reason})"
            restart = f"restart it on the same port (rljax serve {name.lower()} MODEL --port P)"
            log.warning("waiting for a %s server, %s; %s and the run goes on", name, so_far, restart)
        time.sleep(_TRY_EVERY_S)


def wait_for_most(futures: Iterable[Future[Any]], patience_s: float) -> None:
    """Waits until all futures are done, but only for some time after the first success.

    This time is as long as the wait until that success, and at least ``patience_s`` seconds.
    """
    began, pending = time.monotonic(), set(futures)
    succeeded = False
    while pending and not succeeded:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        succeeded = any(each.exception() is None for each in done)
    wait(pending, timeout=max(patience_s, time.monotonic() - began))
