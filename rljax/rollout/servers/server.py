"""One server of a run: its state, and everything that a run does with it.

The states are ``down > greeted > loading > proving > open``. A server is *down* at the start and after a failure. It is
*greeted* once its handshake has passed, *loading* while it gets weights, and *proving* while it shows that it samples
from them. Only an *open* server samples rollouts. An open server is *paused* when new weights come, and *asleep* while
the trainer uses its devices. A server that was down stays closed, with its reason, until it is open again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljax.errors import HandshakeError, ReplyError, ServerGoneError, ServerRefusedError, VerificationError
from rljax.rollout.kinds import can
from rljax.rollout.servers.handshake import Expectation, refusals, server_info
from rljax.rollout.servers.http import Http, json_object, may_pass
from rljax.rollout.servers.kind import UPDATE_S, Backend
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.servers.verify import Look, Verifier
from rljax.rollout.types import InFlight
from rljax.weights.format import PROTOCOL, Checksum
from rljax.weights.pull import Pulled
from rljax.weights.store import WeightDirectory, WeightVersion
from rljax.weights.sums import describe_differences, differences

log = logging.getLogger(__name__)

State = Literal["down", "greeted", "loading", "proving", "open", "paused", "asleep"]
SENT: Counter[str] = Counter()
"""The number of requests for a response that this process has sent, by the URL of the server."""
_PROBE_S = 600.0  # The longest time of a probe: a few tokens, and the server's compilations for them (seconds).
_POLL_S = 0.05  # The time between two questions whether the workers have pulled a version (seconds).


class Metrics:
    """The metrics of one step, by name. Several threads may add to them."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Adds ``value`` to the number ``name``, which begins at 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def highest(self, name: str, value: float) -> None:
        """Keeps the larger of ``value`` and the number ``name``."""
        with self._lock:
            self._values[name] = max(self._values.get(name, value), value)

    def take(self) -> dict[str, float]:
        """Returns all numbers and forgets them."""
        with self._lock:
            values, self._values = self._values, {}
            return values

    @contextlib.contextmanager
    def slowest(self, name: str) -> Iterator[None]:
        """Keeps the seconds of the ``with`` block if they exceed the number ``name``."""
        began = time.monotonic()
        yield
        self.highest(name, time.monotonic() - began)


@dataclass(frozen=True, eq=False)
class Published:
    """The weight files of a version, the policy's pytree that they hold, and the checksum of each tensor."""

    version: WeightVersion
    params: Any
    sums: Mapping[str, Checksum]


@dataclass
class _LoadedAnswer:
    tag: str  # the tag of the version that the last update brought to the worker
    # The ``Checksum`` of each tensor, or of the worker's part of it, as it was loaded; None where it was not loaded.
    tensors: dict[str, tuple[int, int, int, int] | None]
    seconds: float  # the time that the checksums took


class Server(Remote):
    """One server. Its coroutines, and its methods that change its state, run on the event loop of the fleet."""

    def __init__(
        self, url: str, kind: Backend, http: Http, timeout_s: float, metrics: Metrics, on_change: Callable[[], None]
    ) -> None:
        """Sends nothing yet. The server is down.

        Args:
          url: The address.
          kind: The kind of the server.
          http: The HTTP client of the fleet.
          timeout_s: The longest time of a rollout (seconds).
          metrics: The object that takes the server's metrics.
          on_change: The function that is called after each change of the state.
        """
        self.url, self.route, self.model, self.platform = url, kind.route, kind.model, ""
        self.state: State = "down"
        self.reason = f"{url}: /health does not answer 200"  # the reason why it was down last; "" if it is not
        self.versions: list[str] = []  # the tags of the weights that it was opened with, newest last
        self.info: ServerInfo | None = None  # its description at its last handshake
        self.rejected: Exception | None = None  # the failure of its proof of the current version
        self.outstanding = 0  # the number of requests that it has not answered yet
        self.next_try = 0.0  # the time of the next attempt to recover it (``time.monotonic``)
        self._slept = False  # whether it has no weights because it was put to sleep
        self._loaded: str | None = None  # the tag of its last update; "" if that did not end, None if there was none
        self._kind, self._http, self._timeout_s, self._metrics = kind, http, timeout_s, metrics
        self._on_change, self._changed = on_change, asyncio.Event()
        self._waits: set[asyncio.Timeout] = set()  # the waits for the replies of the rollouts under way

    # ---- The state ----

    @property
    def is_renewed(self) -> bool:
        """Whether the server gets new weights, so that rollouts may soon go on there."""
        return self.state in ("paused", "loading", "proving") and not self.reason

    def pause(self) -> None:
        """Sends no further rollout to the server until it is open again. The rollouts under way go on.

        A greeted server, which was never open, stays greeted.
        """
        self._enter("greeted" if self.state == "greeted" else "paused")

    def open(self, version: str | None) -> None:
        """Admits rollouts, whose replies must name weight ``version``; None allows any version.

        A reply may also name a version that the server was opened with since the request was sent.
        Another version marks the server down.
        """
        if version is not None and self.versions[-1:] != [version]:
            self.versions.append(version)
        self._enter("open")

    def close(self, reason: str) -> None:
        """Marks the server down for a ``reason``. If it was getting new weights, the responses under way there fail."""
        if not self.reason:
            log.warning("a %s server is down: %s", self._kind.name, reason)
            self._metrics.add("rollout/server_losses", 1.0)
        is_as_before = self.state == "proving" and self.versions[-1:] == [self._loaded]  # only the connection broke
        while self.state in ("paused", "loading", "proving") and not is_as_before and self._waits:
            self._waits.pop().reschedule(0.0)
        self._enter("down", reason)

    def leave(self) -> None:
        """Marks the server down because it is not listed any more. It still answers the requests that it has."""
        self.next_try = 0.0
        self._enter("down", f"{self.url}: /health does not answer 200")

    def _enter(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    # ---- Requests ----

    async def call(self, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """Sends one request that samples no response, as :meth:`Remote.call` says."""
        reply = await self._http.exchange(self.url, method, path, timeout_s, **content)
        return json_object(self.url + path, reply) if reply and path != "/health" else {}

    async def text(self, path: str) -> str:
        """Returns the text of a page of the server. Raises the errors of :meth:`Http.exchange`."""
        return (await self._http.exchange(self.url, "GET", path, 10.0)).decode(errors="replace")

    async def answers(self) -> bool:
        """Returns whether ``/health`` answers 200 within 5 seconds."""
        try:
            await self.call("GET", "/health", timeout_s=5.0)
        except ServerGoneError:
            return False
        return True

    async def rollout(self, request: Request, vocab_size: int | None) -> Completion:
        """Returns a completion that may be trained on, or a part of one if new weights came meanwhile.

        A completion that names weights without a proof is returned only after the proof.
        """
        first = max(0, len(self.versions) - 1)
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                reply = await self._send(request, self._timeout_s)
        except TimeoutError as error:
            raise ServerGoneError(self.reason or f"{self.url} was down") from error
        finally:
            self._waits.discard(wait)
        completion = self._read(reply, request)
        is_updated = self.is_renewed or len(self.versions) - 1 > first
        check_completion(self.url, completion, request, vocab_size, may_be_part=is_updated)
        if self.versions and completion.spans is None and len(completion.response):
            raise ReplyError(f"{self.url} does not name the weights that sampled a response")
        tags = {tag for tag, _, _ in completion.spans or ()} if self.versions else set()
        while (others := tags.difference(self.versions[first:])) and self.is_renewed:
            await self._changed.wait()
        if others:
            raise ServerGoneError(f"{self.url} samples from weights {min(others)!r}, not from {self.versions[-1]!r}")
        return completion

    async def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns a completion for each request, as :meth:`Remote.sample` says."""
        probes = [asyncio.ensure_future(self._probe(request)) for request in requests]
        try:
            return await asyncio.gather(*probes)
        finally:
            for probe in probes:
                probe.cancel()

    async def _probe(self, request: Request) -> Completion:
        """Returns a completion. Asks again if the reply cannot be read or the refusal may pass."""
        failures = 0
        while True:
            try:
                return self._read(await self._send(request, min(_PROBE_S, self._timeout_s)), request)
            except (ReplyError, ServerRefusedError) as error:
                failures += 1
                if failures >= self._kind.attempts or not may_pass(error):
                    raise
            await asyncio.sleep(self._kind.wait_s(failures))

    def _send(self, request: Request, timeout_s: float) -> Coroutine[Any, Any, bytes]:
        """Returns the exchange of a request for one response, which it counts."""
        SENT[self.url] += 1
        body = self._kind.body(self.route, request, self.model, self.platform)
        if self.route == self._kind.own_route:
            return self._http.ask(self.url, self.route, timeout_s, body)
        return self._http.exchange(self.url, "POST", self.route, timeout_s, json=body)

    def _read(self, reply: bytes, request: Request) -> Completion:
        try:
            return self._kind.completion(self.route, reply, request)
        except ReplyError as error:
            raise type(error)(f"{self.url}{error}") from error

    # ---- Weights ----

    async def greet(self, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Compares the server with the trainer, tells it where weights will be, and returns its description.

        Nothing is sampled. It raises HandshakeError if they differ, with one line for each difference.
        """
        kind = self._kind
        if self._loaded != "":  # otherwise it may hold a part of a version, and the next update resumes it
            await kind.resume(self)
        with refusals(self.url, kind.without_plugin):
            answers = await kind.ask_plugin(self, "rljax_describe")
        try:
            described = answers[0]
            if (theirs := described.get("protocol")) != PROTOCOL:
                said = f"the plugin speaks protocol {theirs}, the trainer {PROTOCOL}"
                raise HandshakeError(f"{self.url}: {said}: install the same rljax beside both")
            self.platform = described.get("platform", "")
            differing = kind.differences(described, expected)
        except (LookupError, TypeError, AttributeError) as error:
            raise ReplyError(f"{self.url}: the plugin answered without {error}: {str(answers)[:300]}") from error
        if differing:
            raise HandshakeError("\n".join(f"{self.url}: {line}" for line in differing))
        await kind.find_route(self)
        unread = f"the server cannot read the weight directory {files.root}; set transfer_dir to one that both see"
        unread += ", and publish.readable_by where the server runs as another user"
        if files.source:
            unread = f"the server's machine cannot read weights from {files.source}"
        path, text = files.probe()
        with refusals(self.url, unread):
            probe = {"probe_path": str(path), "probe_text": text, "protocol": PROTOCOL, "source": files.source}
            await kind.show(self, probe | {"version_bytes": expected.version_bytes})
        info = server_info(self.url, described, kind.name.lower())
        log.info("%s: %s %s, %s, agrees with the trainer", self.url, kind.name, info.version, info.dtype)
        if not can(expected.config.engine, "takes_seeds", self.platform):
            log.warning("%s takes no seeds (%s): it repeats no rollouts", self.url, self.platform.upper() or kind.name)
        self.state = "greeted"
        return info

    async def pull(self, version: WeightVersion) -> None:
        """Makes the workers pull a version into their machine's mirror while they sample. :meth:`load` loads it later.

        If servers read the version in the directory of the trainer, there is nothing to do. It raises ServerGoneError
        if a worker could not pull the version in time.
        """
        if not version.source:
            return
        name, began = version.path.name, time.monotonic()
        while True:
            answers: list[Pulled | None] = await self._kind.ask(self, Pulled | None, "rljax_pull", name)
            done = [answer for answer in answers if answer is not None]
            if failed := [answer.error for answer in done if answer.error]:
                raise ServerGoneError(f"{self.url} could not pull {version.tag}: {failed[0]}")
            if len(done) == len(answers):
                break
            if time.monotonic() - began > UPDATE_S:
                raise ServerGoneError(f"{self.url} did not pull {version.tag} within {UPDATE_S:g} s")
            await asyncio.sleep(_POLL_S)
        slowest = max(done, key=lambda answer: answer.seconds)
        names = {"pull_s": slowest.seconds, "fetch_s": slowest.fetch_s, "check_s": slowest.check_s}
        for metric, value in {**names, "pulled_bytes": slowest.bytes}.items():
            self._metrics.highest(f"publish/{metric}", value)
        if slowest.repaired:
            self._metrics.add("publish/mirrors_repaired", 1.0)
            log.warning("%s: the weights on its machine were repaired: %s", self.url, slowest.repaired)

    async def load(self, version: WeightVersion, in_flight: InFlight) -> None:
        """Makes the server load a version that its machine can read. ``in_flight``: See :meth:`Backend.push`."""
        self.state, self._loaded = "loading", ""
        try:
            with self._metrics.slowest("publish/load_s"):
                await self._kind.push(self, version, in_flight)
        except Exception as error:  # its proof may be judged much later
            self.close(str(error))
            raise
        self._loaded = version.tag

    async def serves(self, version: WeightVersion) -> bool:
        """Returns whether the server holds all of ``version``. Raises ServerGoneError also if it refuses to answer."""
        try:
            answer = await self.call("GET", self._kind.version_route, timeout_s=10.0)
        except ServerRefusedError as error:
            raise ServerGoneError(str(error)) from error
        return self._loaded == answer.get("weight_version") == version.tag

    async def check_serves(self, version: WeightVersion) -> None:
        """Raises ServerGoneError unless the server says that it holds ``version``."""
        if not await self.serves(version):
            raise ServerGoneError(f"{self.url} does not hold {version.tag}: it was restarted or updated by others")

    async def prove(self, published: Published, verifier: Verifier) -> list[Look]:
        """Compares the weights that the workers loaded with the trainer's, and returns the completions of the probes.

        It raises VerificationError if a tensor differs, or a worker's last update brought another version.
        """
        self.state, version = "proving", published.version
        await self.check_serves(version)
        workers: list[_LoadedAnswer] = await self._kind.ask(self, _LoadedAnswer, "rljax_checksums")
        tags = {worker.tag for worker in workers}
        if tags != {version.tag}:
            raise VerificationError(f"{self.url} was last given the weights {sorted(tags)}, not {version.tag!r}")
        loaded = [{name: found and Checksum(*found) for name, found in worker.tensors.items()} for worker in workers]
        if found := await asyncio.to_thread(differences, published.sums, loaded):
            raise VerificationError(f"{self.url} does not hold the trainer's weights: {describe_differences(found)}")
        self._metrics.highest("publish/verified_tensors", len(published.sums))
        self._metrics.highest("time/server_checksums_s", max(worker.seconds for worker in workers))
        with self._metrics.slowest("publish/probe_s"):
            return await verifier.sample(self)

    async def renew(self, published: Published, verifier: Verifier, in_flight: InFlight) -> list[Look]:
        """Makes the server cache the probes, load a version that its machine can read, and prove it (:meth:`prove`)."""
        slept = await self.wake()  # the whole server wakes first: a part that wakes later could change the weights
        with self._metrics.slowest("publish/warm_s"):
            # Keys and values of equal weights are not stale.
            if not slept and published.version.changed_fraction != 0:
                await verifier.warm(self)
        try:
            await self.load(published.version, in_flight)
        except ServerRefusedError as error:  # it may have been restarted, and knows nothing of this run then
            raise ServerGoneError(str(error)) from error
        return await self.prove(published, verifier)

    async def sleep(self, verifier: Verifier) -> None:
        """Makes the server cache the probes and sleep. If the cache outlives the weights, the next proof shows it."""
        with self._metrics.slowest("time/sleep_s"):
            await verifier.warm(self)
            await self._kind.sleep(self)
        self._slept = True
        if self.state == "open":
            self._enter("asleep")

    async def wake(self) -> bool:
        """Wakes the server, without weights, and returns whether it slept."""
        slept = self._slept
        if slept:
            with self._metrics.slowest("time/wake_s"):
                await self._kind.wake(self)
            self._slept = False
        return slept
