"""The servers of a run: their event loop, their list, and the proofs (``verify``) that open them to rollouts.

Servers that are down are asked for a proof, side by side, while responses are sampled. The proofs wait until the thread
that publishes judges them, because only that thread may use the policy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from rljax.errors import ReplyError, ServerError, ServerGoneError, ServersLostError, StoppedWaitingError
from rljax.rollout.engine import AHEAD, Stopping, check_wanted
from rljax.rollout.servers.discovery import Discovery
from rljax.rollout.servers.dispatch import Dispatcher
from rljax.rollout.servers.http import Http, check_url, room_for
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.requests import ServerInfo
from rljax.rollout.servers.server import Metrics, Server, State
from rljax.rollout.types import RolloutConfig
from rljax.weights.access import find_client_key_file, read_api_key

log = logging.getLogger(__name__)

Work = Callable[[Server], Coroutine[Any, Any, Any]]
"""A coroutine function whose argument is a server."""

_POLL_S = 1.0  # The longest wait for a proof (seconds).
_TRY_EVERY_S = 0.5  # The time between two attempts to recover a server (seconds).
_RECOVERY_S = 10.0  # The time that a server may recover before a log line says that the run waits for it (seconds).
_SAY_EVERY_S = 30.0  # The time between two such lines (seconds).
_LONGEST_S = 3600.0  # A time longer than any request to a server takes (seconds).
_LATE = "{} was not ready {:g} s after another server"


class Admission:
    """The proof that a server must give before rollouts go to it, and the fate of a server that fails.

    By default a server only has to answer, and the error of a server that fails is raised.
    """

    async def recover(self, server: Server) -> Any:
        """Asks a server that answers again for its proof, and returns it. Runs on the event loop."""
        return None

    def admit(self, server: Server, proof: Any) -> Callable[[], None]:
        """Judges ``proof``, on the publishing thread. Returns the server's method that sets its next state."""
        return partial(server.open, None)

    def refuse(self, server: Server, error: Exception) -> None:
        """Closes a server after ``error`` in ``recover`` or ``admit``, or raises it. Runs on the publishing thread."""
        raise error


class Fleet(Dispatcher):
    """The servers of one kind that a run samples from. Methods block their caller, never the event loop."""

    def __init__(
        self, config: RolloutConfig, kind: Backend, admission: Admission | None = None, stop: Stopping | None = None
    ) -> None:
        """Sends nothing yet. Every server is down. The soft limit of file descriptors is raised.

        Args:
          config: The servers, the limits on requests, and the longest time without an open server.
          kind: The kind of the servers.
          admission: The proof that a server must give. None: the caller opens the servers itself.
          stop: The object that tells when to give up a wait. None: waits are never given up.

        Raises:
          ValueError: There is no URL, a URL stands twice, has another form or holds a password, or ``discovery`` or
            ``api_key_file`` cannot be used.
        """
        urls = [url.rstrip("/") for url in config.urls] if config.discovery is None else []
        if not urls and config.discovery is None:
            raise ValueError("at least one server is needed, in urls or by discovery")
        key_file = find_client_key_file(config.api_key_file)
        headers = {} if key_file is None else {"Authorization": f"Bearer {read_api_key(key_file)}"}
        for url in urls:
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError(f"urls must be distinct, got {urls}")
        self.discovery = None if config.discovery is None else Discovery(config.discovery, check_url)
        super().__init__(kind, config.limits)
        self._admission, self._stop = admission, stop
        self.metrics = Metrics()  # the numbers that :meth:`report` returns
        self._wait_s, self._last_said = config.server_wait_s, -math.inf
        self._known: dict[str, Server] = {}  # all servers that were ever listed, by URL
        self.urls: tuple[str, ...] = ()  # the URLs of the servers of the list, in its order
        # The proof that each asked server will give, and the number of publishes when it was asked, by URL.
        self._proofs: dict[str, tuple[Future[Any], int]] = {}
        self._publishes = 0
        self._http = Http(headers)
        self._list(urls)

    # ---- The list ----

    @property
    def servers(self) -> list[Server]:
        """The servers of the list, in its order."""
        return [self._known[url] for url in self.urls]

    def server(self, url: str) -> Server:
        """Returns the server at ``url``, which may have left the list."""
        return self._known[url]

    def all_in(self, state: State) -> list[Server]:
        """Returns the servers in ``state``."""
        return [server for server in self.servers if server.state == state]

    def opened(self) -> list[str]:
        """Returns the URLs of the servers that rollouts may go to."""
        return [server.url for server in self.all_in("open")]

    def infos(self) -> list[ServerInfo]:
        """Returns the description of each server that passed the handshake, even if it has left the list."""
        return [server.info for server in list(self._known.values()) if server.info is not None]

    def down(self) -> dict[str, str]:
        """Returns the reason of each server that was down and is not open again, by its URL."""
        return {server.url: server.reason for server in self.servers if server.reason}

    def answering(self) -> list[Server]:
        """Returns the servers that are not down."""
        return [server for server in self.servers if not server.reason]

    def busy(self) -> list[str]:
        """Returns the URLs of the servers that were asked for a proof and have not given it yet."""
        return [url for url, (proof, _) in self._proofs.items() if not proof.done()]

    def report(self) -> dict[str, float]:
        """Returns the metrics of the servers since the last report. Sampling has metrics of its own."""
        return {"rollout/server_losses": 0.0, **self.metrics.take(), "rollout/servers": float(len(self.opened()))}

    def follow_discovery(self) -> None:
        """Adds the servers that discovery lists now, and drops all others."""
        if self.discovery is None:
            return
        for name, urls in zip(("joined", "left"), self.on_loop(self._list, self.discovery.urls), strict=True):
            for url in urls:
                log.info("%s %s", url, "joins" if name == "joined" else "leaves")
            if urls:
                self.metrics.add(f"rollout/servers_{name}", float(len(urls)))

    def _list(self, urls: Sequence[str]) -> tuple[list[str], list[str]]:
        """Makes ``urls`` the list of servers. Returns the new servers, which are down, and the dropped ones.

        If the hard limit of file descriptors does not allow ``max_outstanding`` requests to each server, fewer are sent
        at a time.
        """
        before, wanted = self.urls, self.limits.max_outstanding
        joined, left = [url for url in urls if url not in before], [url for url in before if url not in urls]
        if not joined and not left:
            return [], []
        for url in joined:
            if url not in self._known:
                timeout_s = self.limits.request_timeout_s
                self._known[url] = Server(url, self.kind, self._http, timeout_s, self.metrics, self.assign)
        self.urls = tuple(urls)
        for url in left:
            self._known[url].leave()
        count = max(1, len(urls))
        most = max(1, room_for(count * wanted) // count)
        if most < min(self.most, wanted):
            limit = "the hard limit of file descriptors (ulimit -Hn) allows no more"
            log.warning("at most %d requests at a time go to each server, not %d: %s", most, wanted, limit)
        self.most = most
        return joined, left

    def close(self) -> None:
        """Closes connections and ends the thread. It may be called twice. The servers keep running."""
        if self.discovery is not None:
            self.discovery.close()
        self.end(self._http.aclose)

    # ---- Servers that are down, and new weights ----

    def tend(self) -> None:
        """Follows the list of servers while responses are sampled, and recovers them unless the thread samples ahead.

        It raises StoppedWaitingError if the run gives the responses up, and ServersLostError if all servers are down
        and the thread samples ahead. It also raises the errors of :meth:`recover`.
        """
        check_wanted(self._stop)
        if self._admission is None:
            return
        if AHEAD.get() is None:
            self.recover()
            return
        self.follow_discovery()
        down = self.down()
        if len(down) == len(self.urls):  # a paused server is given weights, and goes on then
            reason = next(iter(down.values()), "none is listed")
            raise ServersLostError(f"no {self.kind.name} server is left to sample: {reason}")

    def recover(self) -> None:
        """Recovers each server that was down and answers again. It waits, for a moment, only while no server is open.

        It raises RuntimeError if no server was open for ``server_wait_s``, and StoppedWaitingError if none is open and
        the run was asked to stop. It also raises the errors of :meth:`judge`. Only the thread that publishes calls it.
        """
        self.follow_discovery()
        if self.opened():
            self.last_open = time.monotonic()
        down = [server for server in self.servers if server.reason]
        for server in down:
            if time.monotonic() >= server.next_try:
                self._ask(server, self._recover)
        if not self.opened():
            wait([proof for proof, _ in self._proofs.values()], timeout=_POLL_S, return_when=FIRST_COMPLETED)
        self.judge()
        if not self.opened() and len(self.down()) >= len(down):
            self._wait_for_any()

    def renew(self, work: Work, servers: Sequence[Server], patience_s: float) -> None:
        """Pauses ``servers``, calls ``work`` for each, and recovers servers that are down. Returns once one is open.

        ``work`` returns the proof for ``Admission.admit``. Once one server is ready, the others have the same time
        again, and at least ``patience_s`` seconds. A server that is later is closed until its proof is judged. The
        errors of :meth:`recover` are raised, and StoppedWaitingError if the run gives the wait up.
        """
        for server in servers:
            self.on_loop(server.pause)
        begun = [self._ask(server, work) for server in servers]
        begun += [self._ask(server, self._recover) for server in self.servers if server.reason]
        wait_for_most((each for each in begun if each is not None), patience_s, self._stop)
        self.last_open, late = time.monotonic(), self.busy()
        self.judge()
        for server in servers:  # The run may wait for their responses before this thread judges again.
            if server.url in late and server.state != "open":
                self.on_loop(server.close, _LATE.format(server.url, patience_s))
        while not self.opened():
            self.recover()

    def side_by_side(self, work: Work, servers: Sequence[Server], patience_s: float = _LONGEST_S) -> None:
        """Calls ``work`` for each of ``servers``, and closes a server that fails or is much slower.

        After the first success, the other calls may take as long again as that call took, and at least ``patience_s``
        seconds, and are then cancelled. ``work`` raises ServerError if the server fails.
        """
        futures = [self.start(work(server)) for server in servers]
        wait_for_most(futures, patience_s, self._stop)
        for server, future in zip(servers, futures, strict=True):
            error = future.exception() if future.done() else ServerError(_LATE.format(server.url, patience_s))
            future.cancel()  # late work must not go on beside the work for the next version
            if isinstance(error, ServerError):
                self.on_loop(server.close, str(error))
            elif error is not None:
                raise error

    def begin_version(self) -> None:
        """Makes all proofs of the version before outdated, and forgets which servers were rejected.

        No such proof can be judged any more, because the trainer may have reused the buffers of that version's policy.
        """
        self._publishes += 1
        self._proofs = {url: asked for url, asked in self._proofs.items() if not asked[0].done()}
        for server in list(self._known.values()):
            server.rejected = None

    def judge(self) -> None:
        """Judges the proofs that servers have given, in the order of the servers. Opens those that pass.

        Only the thread that publishes may call it. It raises the errors of ``Admission.refuse``.
        """
        given = [url for url, (proof, _) in self._proofs.items() if proof.done()]
        for url in sorted(given, key=[*self.urls, *given].index):
            (proof, number), server = self._proofs.pop(url), self._known[url]
            server.next_try = time.monotonic() + _TRY_EVERY_S
            if url not in self.urls:
                continue
            if number != self._publishes:
                self.on_loop(server.close, f"{url} was busy with the weights before")
                continue
            assert self._admission is not None
            try:
                self.on_loop(self._admission.admit(server, proof.result()))
            except (ServerGoneError, ReplyError) as error:
                self.on_loop(server.close, str(error))
            except (RuntimeError, ValueError) as error:
                self._admission.refuse(server, error)

    def _ask(self, server: Server, work: Work) -> Future[Any] | None:
        """Begins ``work`` for a server. Returns None if that server is still being asked something else."""
        if server.url in self._proofs:
            return None
        self.check_alive()
        future = asyncio.run_coroutine_threadsafe(work(server), self.loop)
        self._proofs[server.url] = future, self._publishes
        return future

    async def _recover(self, server: Server) -> Any:
        """Recovers a server that was down. Raises ServerGoneError if it does not answer."""
        assert self._admission is not None
        if not await server.answers():
            raise ServerGoneError(server.reason or f"{server.url} does not answer")
        return await self._admission.recover(server)

    def _wait_for_any(self) -> None:
        """Waits a moment, and logs the wait from time to time.

        Raises StoppedWaitingError if the run was asked to stop, and RuntimeError after ``server_wait_s``.
        """
        name, waited = self.kind.name, time.monotonic() - self.last_open
        reason = next(iter(self.down().values()), "")
        if not self.urls and self.discovery is not None:
            reason = f"{self.discovery.where} lists none"
        if self._stop is not None:
            self._stop.progress()
            if self._stop.is_requested():
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


def wait_for_most(futures: Iterable[Future[Any]], patience_s: float, stop: Stopping | None) -> None:
    """Waits until all futures are done, but only for some time after the first success.

    This time is as long as the wait until that success, and at least ``patience_s`` seconds. It raises
    StoppedWaitingError if ``stop`` gives the wait up.
    """
    began, pending, ends_at = time.monotonic(), set(futures), math.inf
    while pending and (left_s := ends_at - time.monotonic()) > 0:
        done, pending = wait(pending, timeout=min(_POLL_S, left_s), return_when=FIRST_COMPLETED)
        if ends_at == math.inf and any(each.exception() is None for each in done):
            ends_at = time.monotonic() + max(patience_s, time.monotonic() - began)
        if pending:
            check_wanted(stop, "servers were awaited")
