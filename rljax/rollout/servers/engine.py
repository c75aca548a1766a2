"""The rollout engine over HTTP servers: fleet, weight files, handshake and verification put together.

A server samples rollouts only between a verified publish and the next one. Verified means: its workers loaded tensors
with the trainer's checksums, and the tokens that it generates from probes have the trainer's log-probabilities. A
server that died, was restarted or joins passes the handshake, gets the current weights and is verified before it
samples a token. A server that fails is left out until the next version. Servers on the trainer's devices sleep after
sampling, and are updated and verified when they wake. Each reply names the weights that sampled it. So replies of a
server that was restarted unnoticed are refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerGoneError
from rljax.rollout.engine import RolloutEngine, Samples, Stopping
from rljax.rollout.servers.fleet import Admission, Fleet
from rljax.rollout.servers.handshake import Expectation, check_logprobs
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.requests import Completion, ServerInfo, check_prompts, make_requests, shortest
from rljax.rollout.servers.sources import ListedRequests, QueuedTurns, RequestSource
from rljax.rollout.servers.verify import Look, Score, Verifier
from rljax.rollout.turns import TurnQueue
from rljax.rollout.types import Response, RolloutConfig, SamplingParams
from rljax.weights.access import find_key_file
from rljax.weights.format import Checksum
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory, WeightVersion
from rljax.weights.writer import Part, Writer

log = logging.getLogger(__name__)

STRAGGLER_S = 30.0
"""The shortest time that a publish waits for the other servers once the first one is ready (seconds)."""

_Shown = tuple[ServerInfo | None, Sequence[Look]]
"""The proof of a server: its description or None, and its completions of the probes, one ``Look`` for each round.

The description is there after a handshake. There are no looks before the first publish."""


@dataclass(frozen=True)
class PolicyFunctions:
    """The functions of the policy's pytree that the engine needs. All numbers are in the rollout dtype."""

    tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]]  # yields (Hugging Face name, array) of each tensor
    checksums: Callable[[Any], Mapping[str, Checksum]]  # the checksums by name; RuntimeError if a value is not finite
    score: Score  # the log-probabilities at temperature 1, for the verification
    parts: Callable[[Any], Iterable[Part]] = lambda params: ()  # yields the parts of the tensors that this process has
    writer: Writer | None = None  # the writer if several processes write a version; None if this process writes all


@dataclass(frozen=True, eq=False)
class _Published:
    """The weight files of a version, the policy's pytree that they hold, and the checksum of each tensor."""

    version: WeightVersion
    params: Any
    sums: Mapping[str, Checksum]


class ServedEngine(Admission, RolloutEngine):
    """RolloutEngine over HTTP servers."""

    def __init__(
        self,
        config: RolloutConfig,
        backend: Backend,
        functions: PolicyFunctions,
        *,
        hf_config: Mapping[str, Any],
        max_tokens: int,
        publish: PublishConfig | None = None,
        head_dtype: str | None = None,
        stop: Stopping | None = None,
        probe_prompts: Sequence[np.ndarray] = (),
        version_bytes: int = 0,
    ) -> None:
        """Waits for the servers and shakes hands with each; ``publish`` must be called before ``generate``.

        Args:
          config: The servers, the dtype of weights and servers, and the engine's settings.
          backend: The kind of the servers.
          hf_config: The policy's ``config.json`` as a mapping.
          max_tokens: The longest prompt plus response of any request (tokens).
          publish: The way in which weights come to the servers; None for ``PublishConfig()``.
          head_dtype: The dtype in which the servers' LM heads must compute, or None for any.
          stop: The object that tells when to give up waits for servers and responses. None: they are never given up.
          probe_prompts: The prompts of the run from which the probes are made, int32 [s] each. Empty: random tokens.
          version_bytes: The size of one version of the weights. Mirrors must have room for two. 0: not known.

        Raises:
          HandshakeError: A server does not fit. The message has one line for each difference.
          RuntimeError: A server did not answer within ``server_wait_s``.
          ValueError: ``urls`` or ``api_key_file`` cannot be used.
        """
        self._config, self._backend, self._publish = config, backend, publish or PublishConfig()
        self._functions = functions
        self._expected = Expectation(config, hf_config, max_tokens, head_dtype, version_bytes)
        self._current: _Published | None = None
        self._prepared: _Published | None = None  # the version that is published next
        self._publisher = threading.get_ident()  # the thread that may use the policy of ``_current``
        self._verified = self._warned = False
        self._rejected: dict[str, Exception] = {}  # the servers that failed under the current version, and how
        self._infos: dict[str, ServerInfo] = {}
        self._asleep: set[str] = set()
        self.fleet = Fleet(config, backend, self, stop)
        self._client, self._metrics = self.fleet.client, self.fleet.metrics
        with contextlib.ExitStack() as opened:
            opened.callback(self.fleet.close)
            key_file, writer = find_key_file(config.api_key_file), functions.writer
            self.files = WeightDirectory(self._publish, config.transfer_dir, api_key_file=key_file, writer=writer)
            opened.callback(self.files.close)
            # Until all servers of ``urls`` have shaken hands, or the first one that discovery lists.
            while not self._infos or (self.fleet.discovery is None and self._client.down()):
                self.fleet.recover_all()
            opened.pop_all()
        info, mixture = shortest(self._infos.values()), "num_experts" in hf_config
        self.verifier = Verifier(
            config.verify, functions.score, info, dtype=config.dtype, mixture=mixture, prompts=probe_prompts
        )

    def prepare(self, params: Any, policy_version: int) -> None:
        """Writes the version, and makes the servers' machines pull it while responses are sampled."""
        began = time.monotonic()
        self._publisher = threading.get_ident()
        # A server that computed one token with weights that are not finite keeps NaN in its key-value cache.
        sums = self._functions.checksums(params)
        self._metrics.add("time/checksums_s", time.monotonic() - began)
        writing = time.monotonic()
        version = self.files.write(self._functions.tensors(params), policy_version, sums)
        self._metrics.add("publish/encode_s", time.monotonic() - writing)
        if version.dtype != self._config.dtype:
            raise ValueError(f"published tensors are {version.dtype}, the rollout dtype is {self._config.dtype}")
        self.fleet.follow_discovery()
        self.fleet.take_answers()
        # A server that cannot read the version now may read it later: it is updated when it is brought back.
        pull = functools.partial(self._pull, version)
        self.fleet.side_by_side(pull, self.fleet.answering(), STRAGGLER_S)
        self._prepared = _Published(version, params, sums)
        self._metrics.add("publish/bytes", version.num_bytes)
        self._metrics.add("publish/seconds", time.monotonic() - began)
        if not math.isnan(version.changed_fraction):
            self._metrics.put("publish/changed_fraction", version.changed_fraction)

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Gives the servers a version, and returns once at least one of them is verified.

        A server that fails the verification is logged and gets no rollout before the next version. If all servers fail,
        the error of the last one is raised.
        """
        began = time.monotonic()
        if self._prepared is None or self._prepared.params is not params:
            self.prepare(params, policy_version)
        paused = time.monotonic()
        self._current, self._prepared = self._prepared, None
        answering = self.fleet.answering()
        self._verified = False
        self._rejected.clear()
        self.fleet.forget_asked()
        self._renew_all(answering)
        self._verified = True
        ended = time.monotonic()
        self.files.drop_old()
        for name in ("publish/seconds", "publish/stall_s"):
            self._metrics.add(name, ended - paused)
        self._metrics.add("time/publish_s", ended - began)
        return self.fleet.report()

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples from all verified servers. If some die, other servers sample their part again.

        If all have died, the thread that publishes waits up to ``server_wait_s``. Another one raises ServersLostError.
        """
        if not prompts or n < 1:
            raise ValueError(f"at least one prompt and one response each are needed, got {len(prompts)} and n = {n}")
        self._check_verified()
        info, seed_sent = self._shortest(), self._seed_sent(seed)
        check_prompts(prompts, sampling.max_response_tokens, info, sampling.stop_token_ids)
        requests = make_requests(prompts, n, sampling, seed_sent, self._expected.routes, info.vocab_size)
        metrics: dict[str, float] = {}
        return Samples(self._responses(ListedRequests(requests, n), metrics), metrics)

    def answer(self, queue: TurnQueue, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples each turn as soon as it is asked for. Servers and errors are those of ``generate``.

        The turns of a trajectory go to one server while it has room, because it has computed the tokens before them.
        """
        self._check_verified()
        turns = QueuedTurns(queue, sampling, self._seed_sent(seed), self._shortest, self._expected.routes)
        metrics: dict[str, float] = {}
        return Samples(self._responses(turns, metrics), metrics)

    def _check_verified(self) -> None:
        if not self._verified:
            raise RuntimeError(f"the {self._backend.name} servers hold no verified policy: publish first")

    def _shortest(self) -> ServerInfo:
        """Returns the description of the server that takes the shortest sequences now, on any thread."""
        return shortest(list(self._infos.values()))

    def _seed_sent(self, seed: int) -> int | None:
        """Returns the seed from which the seeds of responses are made, or None if the servers choose their own."""
        # When weights come while responses are sampled, that moment decides what is sampled, whatever the seed.
        return seed if self._config.update == "wait" else None

    def close(self) -> None:
        """Closes the client and removes the weight files. The servers keep running, with the last weights."""
        self.fleet.close()
        self.files.close()
        self._current = self._prepared = None

    def _responses(self, source: RequestSource, metrics: dict[str, float]) -> Iterator[Response]:
        began = time.monotonic()
        metrics["rollout/responses_without_version"] = 0.0
        asleep = [url for url in self._client.opened() if url in self._asleep]
        if asleep:
            self._renew_all(asleep)
        self.fleet.side_by_side(self.check, self._client.opened())
        try:
            with contextlib.closing(self.fleet.stream(source, self._shortest().vocab_size, metrics)) as stream:
                for place, reply in stream:
                    yield self._response(place, reply, metrics)
        finally:
            if self._config.colocated and self._current is not None:
                self.fleet.side_by_side(self._rest, self._client.opened())
            metrics["time/generate_s"] = time.monotonic() - began

    def _response(self, place: tuple[int, int], reply: Completion, metrics: dict[str, float]) -> Response:
        """Returns ``reply`` as a response. Raises ReplyError if it should name several versions and names none."""
        if reply.spans is None:
            if self._config.update != "wait":
                remedy = "set rollout.update to wait"
                raise ReplyError(f"{self._backend.name} does not name the weights that sampled a response; {remedy}")
            metrics["rollout/responses_without_version"] += 1
            if not self._warned:
                self._warned = True
                log.warning(
                    "replies do not name the weights that sampled them; they are taken for version %d and counted in "
                    "rollout/responses_without_version",
                    self.files.policy_version(self.version.tag),
                )
        versions = np.zeros(len(reply.response), np.int32)
        for tag, start, end in reply.spans or ((self.version.tag, 0, len(versions)),):
            versions[start:end] = self.files.policy_version(tag)
        columns = reply.add({"version": versions}).columns
        return Response(reply.ids, reply.prompt_length, columns, *place, reply.finish_reason == "length")

    @property
    def version(self) -> WeightVersion:
        """The version that was published last."""
        assert self._current is not None
        return self._current.version

    def _renew_all(self, urls: Sequence[str]) -> None:
        """Gives the current weights to these servers and to those that came back. Returns once one is verified."""
        assert self._current is not None
        self.fleet.renew(functools.partial(self._renew, self._current), urls, STRAGGLER_S)

    def _handshake(self, url: str) -> ServerInfo:
        info = self._backend.handshake(self._client, url, self._expected, self.files)
        log.info("%s: %s %s, %s, agrees with the trainer", url, self._backend.name, info.version, info.dtype)
        return info

    def _pull(self, version: WeightVersion, url: str) -> None:
        """Makes the server's machine pull a version while the server samples."""
        done = self._backend.prepare(self._client, url, version)
        if done:
            names = {"pull_s": "seconds", "fetch_s": "fetch_s", "check_s": "check_s", "pulled_bytes": "bytes"}
            for name, field in names.items():
                self._metrics.highest(f"publish/{name}", done[field])
            if done["repaired"]:
                self._metrics.add("publish/mirrors_repaired", 1.0)
                log.warning("%s: the weights on its machine were repaired: %s", url, done["repaired"])

    def _rest(self, url: str) -> None:
        """Caches the probes and puts the server to sleep. So a cache that outlives its weights shows in the proof."""
        began = time.monotonic()
        self.verifier.warm(self._client, url)
        self._backend.sleep(self._client, url)
        self._asleep.add(url)
        self._metrics.highest("time/sleep_s", time.monotonic() - began)

    def _wake(self, url: str) -> bool:
        """Wakes the server, without weights, and returns whether it slept."""
        if url not in self._asleep:
            return False
        began = time.monotonic()
        self._backend.wake(self._client, url)
        self._asleep.discard(url)
        self._metrics.highest("time/wake_s", time.monotonic() - began)
        return True

    def _renew(self, published: _Published, url: str) -> _Shown:
        """Loads weights that the server's machine has, and asks for the proof. The probes are cached before that."""
        slept = self._wake(url)  # the whole server wakes first: a part that wakes later could change the weights
        began = time.monotonic()
        if not slept and published.version.changed_fraction != 0:  # Keys and values of equal weights are not stale.
            self.verifier.warm(self._client, url)
        self._metrics.highest("publish/warm_s", time.monotonic() - began)
        self._load(published, url)
        return self._prove(published, url)

    def _load(self, published: _Published, url: str) -> None:
        began = time.monotonic()
        self._backend.push(self._client, url, published.version, self._config.update)
        self._metrics.highest("publish/load_s", time.monotonic() - began)

    def _prove(self, published: _Published, url: str, info: ServerInfo | None = None) -> _Shown:
        """Asks for the proof that the server holds these weights. Errors are those of :meth:`Backend.check_bits`."""
        workers = self._backend.check_bits(self._client, url, published.version, published.sums)
        self._metrics.put("publish/verified_tensors", len(published.sums))
        self._metrics.highest("time/server_checksums_s", max(worker.seconds for worker in workers))
        began = time.monotonic()
        looks = self.verifier.sample(self._client, url)
        self._metrics.highest("publish/probe_s", time.monotonic() - began)
        return info, looks

    # ---- What a server must show (Admission) ----

    def recover(self, url: str) -> _Shown:
        """Makes a server that answers again hold the current weights.

        Before the first publish it only passes the handshake. If only the connection broke and it still has the
        weights, it is asked for the proof. Otherwise it passes the handshake and is updated. It samples nothing before
        that: weights that are not finite would put NaN into its key-value cache, which no update removes. A server that
        was rejected waits for the next version.
        """
        if url in self._rejected:
            raise ServerGoneError(str(self._rejected[url]))
        published = self._current
        if published is None:
            try:
                info = self._handshake(url)
                check_logprobs(self._client, info, self._backend.logprobs_hint)
                return info, ()
            except ReplyError as error:  # no server of this kind: waiting would not make it one
                raise HandshakeError(error) from error
        if not self._wake(url) and self._backend.serves(self._client, url, published.version):
            return self._prove(published, url)
        try:
            info = self._handshake(url)
            self._pull(published.version, url)
            if self._current is not published:
                raise ServerGoneError(f"{url} was recovered for weights that are not the current ones any more")
            self._load(published, url)
            shown = self._prove(published, url, info)
            check_logprobs(self._client, info, self._backend.logprobs_hint)
        except HandshakeError as error:
            raise RuntimeError(f"a restarted server does not fit any more: {error}") from error
        return shown

    def check(self, url: str) -> None:
        """Raises ServerError if an open server no longer holds the current version."""
        self._backend.check_serves(self._client, url, self.version)

    def may_recover(self) -> bool:
        """Returns whether the calling thread is the one that publishes.

        On another thread, servers that come back wait for the next publish. The trainer may have reused the buffers of
        the policy that they would be verified with.
        """
        return threading.get_ident() == self._publisher

    def admit(self, url: str, shown: _Shown) -> None:
        """Opens the server to rollouts if its probes agree with the current weights, or raises VerificationError."""
        info, probes = shown
        if info is not None:
            self._infos[url] = info
        current = self._current
        if current is None:
            self._client.pause(url)
            return
        began = time.monotonic()
        difference = self.verifier.judge(self._client, url, probes, current.params)
        self._metrics.add("publish/score_s", time.monotonic() - began)
        assert self.verifier.band is not None
        self._metrics.highest("publish/verify_abs_diff_mean", difference.mean)
        self._metrics.put("publish/verify_band", self.verifier.band)
        if self.verifier.own_band is not None:
            self._metrics.highest("publish/verify_own_abs_diff_mean", difference.own)
            self._metrics.put("publish/verify_own_band", self.verifier.own_band)
        self._client.open(url, current.version.tag)
        if info is not None:
            self._metrics.add("rollout/servers_brought_back", 1.0)
            version = self.files.policy_version(current.version.tag)
            log.warning("%s is back with policy version %d, verified", url, version)

    def refuse(self, url: str, error: Exception) -> None:
        """Rejects a server for this version. Raises ``error`` if none is left or at a start without discovery."""
        if self._current is None and self.fleet.discovery is None:
            raise error
        self._rejected[url] = error
        self._metrics.add("rollout/servers_rejected", 1.0)
        if url in self._client.down():
            log.warning("a %s server is left out: %s", self._backend.name, error)
        self._client.mark_down(url, str(error))
        if self._rejected.keys() >= set(self._client.urls):
            raise error
