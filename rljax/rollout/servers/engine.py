"""The RolloutEngine over HTTP servers: client, weight files, handshake and verification put together.

A server samples rollouts only between a verified publish and the next one: the checksums of what its workers loaded are
the trainer's, and what it generates from probes has the trainer's log-probabilities. Servers are updated and asked for
their proof side by side. One that died, was restarted or joins passes the handshake, is given the current weights and
verified before it samples a token; one that fails the proof is left out until the next version. Servers on the
trainer's devices sleep from the end of sampling on, and are updated and verified whenever they wake. Every reply names
the weights it was sampled under, so replies of a server that was restarted unnoticed are refused.
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

from rljax.errors import (
    HandshakeError,
    ReplyError,
    ServerError,
    ServerGoneError,
    ServersLostError,
    VerificationError,
)
from rljax.policy.config import route_dtype
from rljax.rollout.engine import Samples, Stopping
from rljax.rollout.servers.backend import Backend, Expectation
from rljax.rollout.servers.base import ServedBase, shortest, wait_for_most
from rljax.rollout.servers.handshake import check_logprobs
from rljax.rollout.servers.publishing import make_files
from rljax.rollout.servers.verify import Score, Verifier
from rljax.rollout.servers.wire import Completion, Request, ServerInfo, check_prompts, make_requests
from rljax.rollout.types import PublishConfig, Response, RolloutConfig, SamplingParams, VersionSpan
from rljax.weights.api_key import find_key_file
from rljax.weights.checksum import Checksum
from rljax.weights.differences import described, differences
from rljax.weights.directory import WeightVersion
from rljax.weights.writer import Writer

log = logging.getLogger(__name__)

_LONGEST_S = 3600.0  # longer than anything that is asked of a server takes


@dataclass(frozen=True, eq=False)
class _Published:
    """One version, and what servers that hold it must show: the policy, and the checksum of each tensor."""

    version: WeightVersion
    params: Any
    sums: Mapping[str, Checksum]


@dataclass(frozen=True)
class _Recovered:
    """What a server has shown: that it fits, and what it generated from the probes under the current weights."""

    info: ServerInfo | None = None  # of a handshake; None: it needed none
    probes: Sequence[Sequence[Completion]] = ()


class ServedEngine(ServedBase):
    """RolloutEngine over HTTP."""

    def __init__(
        self,
        config: RolloutConfig,
        backend: Backend,
        *,
        hf_config: Mapping[str, Any],
        max_tokens: int,
        tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]],
        checksums: Callable[[Any], Mapping[str, Checksum]],
        score: Score,
        publish: PublishConfig | None = None,
        writer: Writer | None = None,
        head_dtype: str | None = None,
        stop: Stopping | None = None,
    ) -> None:
        """Waits for the servers and shakes hands with each; ``publish`` must be called before ``generate``.

        Args:
          config: names the servers, the dtype of weights and servers, and the engine's settings.
          backend: of the servers' kind.
          hf_config: the policy's ``config.json`` as a mapping.
          max_tokens: longest prompt plus longest response that will be asked for (tokens).
          tensors: the policy's pytree to (Hugging Face name, array of the rollout dtype).
          checksums: the policy's pytree to the checksum of each of those tensors; raises RuntimeError where one holds a
            value that is not finite in the rollout dtype.
          score: (the policy's pytree, token sequences) to the log-probability of each token, computed in the rollout
            dtype at temperature 1; used by verification alone.
          publish: how weights come to the servers; None: as ``PublishConfig()`` says.
          writer: of what ``tensors`` gives, where several processes hold it; None: that is whole tensors.
          head_dtype: in which the servers' LM heads must compute; None: any.
          stop: Whether to stop waiting for servers, and to give up what is sampled; asked at least four times a second.
            None: neither.

        Raises:
          HandshakeError: a server does not fit; one line for each thing that differs.
          RuntimeError: a server did not answer within ``server_wait_s``.
          ValueError: ``urls`` or ``api_key_file`` are not such.
        """
        super().__init__(
            config.urls,
            backend,
            config.limits,
            wait_s=config.server_wait_s,
            discovery=config.discovery,
            api_key_file=config.api_key_file,
            router=config.router,
            stop=stop,
        )
        publish = publish or PublishConfig()
        self._config, self._tensors, self._checksums = config, tensors, checksums
        self._straggler_s, self._in_place = publish.straggler_s, publish.in_place
        self._expected = Expectation(
            config.dtype, hf_config, max_tokens, config.verify, head_dtype, config.router_replay == "r3"
        )
        # (layers, k, experts) of the routes that every reply must have, or None.
        self._routes = self._expected.routes
        self._current: _Published | None = None
        self._prepared: _Published | None = None  # to be published next
        self._publisher = threading.get_ident()  # thread that may use the policy of ``_current``
        self._verified = self._warned = False
        self._rejected: dict[str, Exception] = {}  # servers that failed under the current version, and how
        self._infos: dict[str, ServerInfo] = {}
        self._asleep: set[str] = set()
        try:
            key_file = find_key_file(config.api_key_file)
            self._files = make_files(publish, config.transfer_dir, key_file, writer)
        except BaseException:
            super().close()
            raise
        try:
            while not self._infos or (self._discovery is None and self._client.down()):
                self._recover_all()
        except BaseException:
            self.close()
            raise
        self._verifier = Verifier(
            config.verify, score, shortest(self._infos.values()), dtype=config.dtype, mixture="num_experts" in hf_config
        )

    def prepare(self, params: Any, policy_version: int) -> None:
        """See RolloutEngine: writes the version, and has the servers' machines pull it."""
        began = time.monotonic()
        self._publisher = threading.get_ident()
        # A server that computed one token with weights that are not finite keeps NaN in its key-value cache.
        sums = self._checksums(params)
        self._metrics.add("time/checksums_s", time.monotonic() - began)
        writing = time.monotonic()
        version = self._files.write(self._tensors(params), policy_version, sums)
        self._metrics.add("publish/encode_s", time.monotonic() - writing)
        if version.dtype != self._config.dtype:
            raise ValueError(f"published tensors are {version.dtype}, the rollout dtype is {self._config.dtype}")
        self._follow_discovery()
        self._take_answers()
        # What one cannot read it may be able to read later: it is updated when it is brought back.
        self._side_by_side(lambda url: self._pull(version, url), self._answering(), self._straggler_s)
        self._prepared = _Published(version, params, sums)
        self._metrics.add("publish/bytes", version.num_bytes)
        self._metrics.add("publish/seconds", time.monotonic() - began)
        if not math.isnan(version.changed_fraction):
            self._metrics.put("publish/changed_fraction", version.changed_fraction)

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """See RolloutEngine. Rollouts are paused from before the update until a server is verified.

        A server that fails the verification is named and gets no rollout before the next version; when all of them
        fail it, the last one's VerificationError is raised.
        """
        began = time.monotonic()
        if self._prepared is None or self._prepared.params is not params:
            self.prepare(params, policy_version)
        paused = time.monotonic()
        self._current, self._prepared = self._prepared, None
        answering = self._answering()
        self._verified = False
        self._rejected.clear()
        self._forget_asked()
        self._renew_all(answering)
        self._verified = True
        ended = time.monotonic()
        self._files.keep_only(self._version)
        self._metrics.add("publish/seconds", ended - paused)
        self._metrics.add("publish/stall_s", ended - paused)
        self._metrics.add("time/publish_s", ended - began)
        return self.report()

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """See RolloutEngine. Waits, bounded, for servers that die meanwhile; their responses are sampled again.

        On another thread than the one that publishes it does not wait when all of them died: ServersLostError.
        """
        if not self._verified:
            raise RuntimeError(f"the {self._backend.name} servers hold no verified policy: publish first")
        if not prompts or n < 1:
            raise ValueError(f"at least one prompt and one response each are needed, got {len(prompts)} and n = {n}")
        info = shortest(self._infos.values())
        check_prompts(prompts, sampling.max_response_tokens, info, sampling.stop_token_ids)
        # When weights come while responses are sampled, that moment decides what is sampled, whatever the seed.
        seed_sent = seed if self._config.seeded and self._config.update == "wait" else None
        metrics: dict[str, float] = {}
        requests = make_requests(prompts, n, sampling, seed_sent, self._routes)
        return Samples(self._responses(requests, n, metrics), metrics)

    def close(self) -> None:
        """See RolloutEngine. The servers keep running, with the last weights."""
        super().close()
        self._files.close()
        self._current = self._prepared = None

    def _responses(self, requests: Sequence[Request], n: int, metrics: dict[str, float]) -> Iterator[Response]:
        metrics["rollout/responses_without_version"] = 0.0
        began = time.monotonic()
        asleep = [url for url in self._client.opened() if url in self._asleep]
        if asleep:
            self._renew_all(asleep)
        self._side_by_side(functools.partial(self._check_version, self._version), self._client.opened())
        try:
            vocab_size = shortest(self._infos.values()).vocab_size
            with contextlib.closing(self._sample(requests, vocab_size, n, metrics)) as stream:
                for index, reply in stream:
                    self._check_versions(reply, metrics)
                    spans = reply.spans or ((self._version.tag, 0, len(reply.token_ids)),)
                    versions = (VersionSpan(self._files.policy_version(tag), *span) for tag, *span in spans)
                    truncated = reply.finish_reason == "length"
                    sampled = reply.token_ids, reply.logprobs
                    yield Response(*divmod(index, n), *sampled, truncated, tuple(versions), self._narrow(reply.routes))
        finally:
            if self._config.colocated and self._current is not None:
                self._side_by_side(self._rest, self._client.opened())
            metrics["time/generate_s"] = time.monotonic() - began

    def _narrow(self, routes: np.ndarray | None) -> np.ndarray | None:
        """Routes of a reply in the dtype that the trainer carries."""
        if routes is None or self._routes is None:
            return None
        return routes.astype(route_dtype(self._routes[2]), copy=False)

    def _check_versions(self, reply: Completion, metrics: dict[str, float]) -> None:
        """Counts a reply that does not say which weights sampled it, and warns of the first.

        Raises:
          ReplyError: it may be of several.
        """
        if reply.spans is None and self._config.update != "wait":
            raise ReplyError(
                f"{self._backend.name} does not name the weights that sampled a response; set rollout.update to wait"
            )
        metrics["rollout/responses_without_version"] += reply.spans is None
        if reply.spans is None and not self._warned:
            self._warned = True
            log.warning(
                "replies do not name the weights that sampled them; they are taken for version %d and counted in "
                "rollout/responses_without_version",
                self._files.policy_version(self._version.tag),
            )

    @property
    def _version(self) -> WeightVersion:
        assert self._current is not None
        return self._current.version

    # ---- what is asked of a server, on a thread ----

    def _handshake(self, url: str) -> ServerInfo:
        info = self._backend.handshake(self._client, url, self._expected, self._files)
        log.info("%s: %s %s, %s, agrees with the trainer", url, self._backend.name, info.version, info.dtype)
        return info

    def _pull(self, version: WeightVersion, url: str) -> None:
        """Has the server's machine pull a version while the server goes on."""
        done = self._backend.prepare(self._client, url, version)
        if done:
            names = {"pull_s": "seconds", "fetch_s": "fetch_s", "check_s": "check_s", "pulled_bytes": "bytes"}
            for name, of_pull in names.items():
                self._metrics.highest(f"publish/{name}", done[of_pull])
            if done["repaired"]:
                self._metrics.add("publish/mirrors_repaired", 1.0)
                log.warning("%s: the weights on its machine were repaired: %s", url, done["repaired"])

    def _rest(self, url: str) -> None:
        """Puts the server to sleep, with the probes cached: a cache that outlives its weights shows in the proof."""
        began = time.monotonic()
        self._verifier.warm(self._client, url)
        self._backend.sleep(self._client, url)
        self._asleep.add(url)
        self._metrics.highest("time/sleep_s", time.monotonic() - began)

    def _wake(self, url: str) -> bool:
        """Whether the server slept; it is awake then, without weights."""
        if url not in self._asleep:
            return False
        began = time.monotonic()
        self._backend.wake(self._client, url)
        self._asleep.discard(url)
        self._metrics.highest("time/wake_s", time.monotonic() - began)
        return True

    def _renew(self, published: _Published, url: str) -> _Recovered:
        """Sends weights that the server's machine has, and asks for the proof; the probes are cached before."""
        if not self._wake(url):  # all of it before the weights come: what wakes later cannot change them
            self._verifier.warm(self._client, url)
        self._load(published, url)
        return self._prove(published, url)

    def _load(self, published: _Published, url: str) -> None:
        """Sends weights that the server's machine has."""
        began = time.monotonic()
        self._backend.push(self._client, url, published.version, self._config.update)
        self._metrics.highest("publish/load_s", time.monotonic() - began)

    def _prove(self, published: _Published, url: str, info: ServerInfo | None = None) -> _Recovered:
        """Asks for the proof that the server holds these weights.

        Raises:
          VerificationError: what a worker loaded differs from the trainer's tensors. Otherwise as `_check_version`.
        """
        self._check_version(published.version, url)
        workers = self._backend.loaded(self._client, url, published.version)
        found = differences(published.sums, [worker.tensors for worker in workers])
        if found:
            raise VerificationError(f"{url} does not hold the trainer's weights: {described(found)}")
        self._metrics.put("publish/verified_tensors", len(published.sums))
        self._metrics.highest("time/server_checksums_s", max(worker.seconds for worker in workers))
        if self._in_place:
            self._metrics.add("publish/servers_in_place", all(worker.in_place for worker in workers))
        return _Recovered(info, self._verifier.sample(self._client, url))

    def _check_version(self, version: WeightVersion, url: str) -> None:
        """Raises ServerGoneError when the server does not hold ``version``."""
        if not self._backend.serves(self._client, url, version):
            raise ServerGoneError(f"{url} does not hold {version.tag}: it was restarted or updated by others")

    def _check_held(self, url: str) -> None:
        """See ServedBase."""
        self._check_version(self._version, url)

    def _recover(self, url: str) -> _Recovered:
        """Makes a server that answers again hold the current weights.

        Before the first publish that is the handshake alone. A server that still has them (only the connection broke)
        is asked for the proof; another passes the handshake and is updated, and samples nothing before: with weights
        that are not finite it would fill its key-value cache with what no update takes out. One that was rejected waits
        for the next version.
        """
        if url in self._rejected:
            raise ServerGoneError(str(self._rejected[url]))
        published = self._current
        if published is None:
            try:
                info = self._handshake(url)
                check_logprobs(self._client, info, self._backend.logprobs_hint)
                return _Recovered(info)
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
            recovered = self._prove(published, url, info)
            check_logprobs(self._client, info, self._backend.logprobs_hint)
        except HandshakeError as error:
            raise RuntimeError(f"a restarted server does not fit any more: {error}") from error
        return recovered

    # ---- who may sample ----

    def _tend(self) -> None:
        """See ServedBase. On another thread than the publisher's servers that come back wait for the next publish.

        The trainer may have taken over the policy that they would be verified with.
        """
        if threading.get_ident() == self._publisher:
            super()._tend()
            return
        self._follow_discovery()
        self._watch_open()
        down = self._client.down()
        if len(down) == len(self._client.urls):  # one that is paused is given weights, and goes on then
            reason = next(iter(down.values()), "none is listed")
            raise ServersLostError(f"no {self._backend.name} server is left to sample: {reason}")

    def _renew_all(self, urls: Sequence[str]) -> None:
        """Gives these servers, and those that came back, the current weights; returns when one of all is verified."""
        published = self._current
        assert published is not None
        begun = []
        for url in urls:
            self._client.pause(url)
            begun.append(self._ask(url, functools.partial(self._renew, published)))
        begun += [self._ask(url, self._look) for url in self._client.down()]
        wait_for_most((each for each in begun if each is not None), self._straggler_s)
        self._last_open = time.monotonic()
        self._take_answers()
        while not self._client.opened():
            self._recover_all()

    def _answering(self) -> list[str]:
        return [url for url in self._client.urls if url not in self._client.down()]

    def _side_by_side(self, act: Callable[[str], None], urls: Sequence[str], patience_s: float = _LONGEST_S) -> None:
        """``act(url)`` of each; one that is gone, much slower than another, or answers nonsense is marked down."""
        futures = {url: self._asking.submit(act, url) for url in urls}
        wait_for_most(futures.values(), patience_s)
        for url, future in futures.items():
            if not future.done():
                self._client.mark_down(url, f"{url} was not ready {patience_s:g} s after another server")
                continue
            try:
                future.result()
            except ServerError as error:
                self._client.mark_down(url, str(error))

    def _admit(self, url: str, recovered: _Recovered) -> None:
        """Opens the server to rollouts if it generated what the current weights do."""
        if recovered.info is not None:
            self._infos[url] = recovered.info
        current = self._current
        if current is None:
            self._client.pause(url)
            return
        difference = self._verifier.judge(url, recovered.probes, current.params)
        assert self._verifier.band is not None
        self._metrics.highest("publish/verify_abs_diff_mean", difference.mean)
        self._metrics.put("publish/verify_band", self._verifier.band)
        self._client.open(url, current.version.tag)
        if recovered.info is not None:
            self._metrics.add("rollout/servers_brought_back", 1.0)
            version = self._files.policy_version(current.version.tag)
            log.warning("%s is back with policy version %d, verified", url, version)

    def _refuse(self, url: str, error: Exception) -> None:
        """Marks a server down until the next version; raises ``error`` where none is left, or a named one misfits."""
        if self._current is None and self._discovery is None:
            raise error
        self._rejected[url] = error
        self._metrics.add("rollout/servers_rejected", 1.0)
        if url in self._client.down():
            log.warning("a %s server is left out: %s", self._backend.name, error)
        self._client.mark_down(url, str(error))
        if self._rejected.keys() >= set(self._client.urls):
            raise error
