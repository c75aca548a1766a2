"""The RolloutEngine over HTTP servers: client, weight files, handshake and verification put together.

A server samples rollouts only between a verified publish and the next one: the checksums of what its workers loaded are
the trainer's, and what it generates from probes has the trainer's log-probabilities. The engine waits for a server that
died or was restarted, repeats the handshake, publishes the current weights to it and verifies it before it samples
another token. Every reply names the weights it was sampled under, so replies of a server that was restarted unnoticed
are refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rljax.checksum import Checksum
from rljax.errors import HandshakeError, ReplyError, ServerGoneError, VerificationError
from rljax.rollout.api_key import find_key_file
from rljax.rollout.served.backend import Backend, Expectation
from rljax.rollout.served.base import ServedBase, shortest
from rljax.rollout.served.publishing import make_files
from rljax.rollout.served.verify import Score, Verifier
from rljax.rollout.served.wire import Completion, Request, ServerInfo, check_prompts, make_requests
from rljax.rollout.types import PublishConfig, Response, RolloutConfig, SamplingParams, VersionSpan
from rljax.rollout.weights.differences import described, differences
from rljax.rollout.weights.directory import WeightVersion
from rljax.rollout.weights.writer import Writer

log = logging.getLogger(__name__)


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
        should_stop: Callable[[], bool] = lambda: False,
        gives_up: Callable[[], bool] = lambda: False,
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
          should_stop: asked while no server answers; true ends the wait.
          gives_up: asked while responses are sampled, at least four times a second; true ends it.

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
            api_key_file=config.api_key_file,
            should_stop=should_stop,
            gives_up=gives_up,
        )
        self._config, self._tensors, self._checksums = config, tensors, checksums
        self._expected = Expectation(config.dtype, hf_config, max_tokens, config.verify, head_dtype)
        self._current: WeightVersion | None = None
        self._params: Any = None  # of the current version
        self._sums: Mapping[str, Checksum] = {}  # likewise
        self._verified = self._warned = False
        self._rejected: set[str] = set()  # servers that failed the verification of the current version
        self._metrics: defaultdict[str, float] = defaultdict(float)
        key_file = find_key_file(config.api_key_file)
        self._files = make_files(publish or PublishConfig(), config.transfer_dir, key_file, writer)
        self._infos: dict[str, ServerInfo] = {}
        try:
            while self._client.down():
                self._recover_all()
        except BaseException:
            self.close()
            raise
        self._verifier = Verifier(config.verify, score, shortest(self._infos.values()), dtype=config.dtype)

    def publish(self, params: Any, policy_version: int) -> None:
        """See RolloutEngine. Rollouts are paused from before the update until a server is verified.

        A server that fails the verification is named and gets no rollout before the next version; when all of them
        fail it, the last one's VerificationError is raised.
        """
        began = time.monotonic()
        # A server that computed one token with weights that are not finite keeps NaN in its key-value cache.
        sums = self._checksums(params)
        self._metrics["time/checksums_s"] += time.monotonic() - began
        writing = time.monotonic()
        version = self._files.write(self._tensors(params), policy_version, sums)
        self._metrics["publish/encode_s"] += time.monotonic() - writing
        if version.dtype != self._config.dtype:
            raise ValueError(f"published tensors are {version.dtype}, the rollout dtype is {self._config.dtype}")
        with ThreadPoolExecutor(len(self._client.urls)) as pool:
            # What one cannot read it may be able to read later: it is updated when it is brought back.
            prepare = functools.partial(self._attempt, functools.partial(self._prepare, version))
            list(pool.map(prepare, self._answering()))
            paused = time.monotonic()
            for url in self._client.opened():
                self._client.pause(url)
            self._verified = False
            self._rejected.clear()
            self._current, self._params, self._sums = version, params, sums
            list(pool.map(functools.partial(self._attempt, self._update), self._answering()))
        for url in self._answering():
            self._attempt(self._verify, url)
        self._last_open = time.monotonic()
        self._next_look.clear()
        self._recover_all()
        while not self._client.opened():
            self._recover_all()
        self._verified = True
        ended = time.monotonic()
        self._files.keep_only(version)
        self._metrics["publish/seconds"] += ended - began
        self._metrics["publish/stall_s"] += ended - paused
        self._metrics["publish/bytes"] += version.num_bytes
        self._metrics["time/publish_s"] += ended - began
        if not math.isnan(version.changed_fraction):
            self._metrics["publish/changed_fraction"] = version.changed_fraction

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int
    ) -> Iterator[Response]:
        """See RolloutEngine. Waits, bounded, for servers that die meanwhile; their responses are sampled again."""
        if not self._verified:
            raise RuntimeError(f"the {self._backend.name} servers hold no verified policy: publish first")
        if not prompts or n < 1:
            raise ValueError(f"at least one prompt and one response each are needed, got {len(prompts)} and n = {n}")
        info = shortest(self._infos.values())
        check_prompts(prompts, sampling.max_response_tokens, info, sampling.stop_token_ids)
        return self._responses(make_requests(prompts, n, sampling, seed if self._config.seeded else None), n)

    def pop_metrics(self) -> dict[str, float]:
        """See RolloutEngine."""
        metrics, self._metrics = self._metrics, defaultdict(float)
        return {**metrics, **super().pop_metrics()}

    def close(self) -> None:
        """See RolloutEngine. The servers keep running, with the last weights."""
        super().close()
        self._files.close()
        self._params = None

    def _responses(self, requests: Sequence[Request], n: int) -> Iterator[Response]:
        began = time.monotonic()
        for url in self._client.opened():
            self._attempt(self._check_version, url)
        try:
            vocab_size = shortest(self._infos.values()).vocab_size
            with contextlib.closing(self._sample(requests, vocab_size)) as stream:
                for index, reply in stream:
                    self._count_version(reply)
                    spans = reply.spans or ((self._version.tag, 0, len(reply.token_ids)),)
                    versions = (VersionSpan(self._files.policy_version(tag), *span) for tag, *span in spans)
                    truncated = reply.finish_reason == "length"
                    yield Response(*divmod(index, n), reply.token_ids, reply.logprobs, truncated, tuple(versions))
        finally:
            self._metrics["time/generate_s"] += time.monotonic() - began

    def _count_version(self, reply: Completion) -> None:
        """Counts a reply that does not say which weights sampled it, and warns of the first."""
        self._metrics["rollout/responses_without_version"] += reply.spans is None
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
        return self._current

    # ---- servers, one by one ----

    def _answering(self) -> list[str]:
        return [url for url in self._client.urls if url not in self._client.down()]

    def _attempt(self, act: Callable[[str], None], url: str) -> None:
        """``act(url)``; a server that is gone, or answers with what cannot be read, is marked down."""
        try:
            act(url)
        except (ServerGoneError, ReplyError) as error:
            self._client.mark_down(url, str(error))

    def _reject(self, url: str, error: VerificationError) -> None:
        """Marks a server down until the next version; raises ``error`` when none is left."""
        self._rejected.add(url)
        self._metrics["rollout/servers_rejected"] += 1.0
        self._client.mark_down(url, str(error))
        if self._rejected.issuperset(self._client.urls):
            raise error

    def _handshake(self, url: str) -> None:
        info = self._infos[url] = self._backend.handshake(self._client, url, self._expected, self._files)
        log.info("%s: %s %s, %s, agrees with the trainer", url, self._backend.name, info.version, info.dtype)

    def _prepare(self, version: WeightVersion, url: str) -> None:
        """Has the server's machine pull a version while the server goes on."""
        done = self._backend.prepare(self._client, url, version)
        if done:
            for name, value in (("publish/pull_s", done["seconds"]), ("publish/pulled_bytes", done["bytes"])):
                self._metrics[name] = max(self._metrics[name], value)
            if done["repaired"]:
                self._metrics["publish/mirrors_repaired"] += 1.0
                log.warning("%s: the weights on its machine were repaired: %s", url, done["repaired"])

    def _update(self, url: str) -> None:
        """Sends the current weights; the probes are cached under the old ones first."""
        self._verifier.warm(self._client, url)
        began = time.monotonic()
        self._backend.push(self._client, url, self._version)
        self._metrics["publish/load_s"] = max(self._metrics["publish/load_s"], time.monotonic() - began)

    def _check_version(self, url: str) -> None:
        """Raises ServerGoneError when the server does not hold the current weights."""
        if not self._backend.serves(self._client, url, self._version):
            raise ServerGoneError(f"{url} does not hold {self._version.tag}: it was restarted or updated by others")

    def _check_bits(self, url: str) -> None:
        """Raises VerificationError when what a worker loaded differs from the trainer's tensors."""
        workers = self._backend.loaded(self._client, url, self._version)
        found = differences(self._sums, [worker.tensors for worker in workers])
        if found:
            raise VerificationError(f"{url} does not hold the trainer's weights: {described(found)}")
        self._metrics["publish/verified_tensors"] = len(self._sums)
        slowest = max(worker.seconds for worker in workers)
        self._metrics["time/server_checksums_s"] = max(self._metrics["time/server_checksums_s"], slowest)

    def _verify(self, url: str) -> None:
        """Opens the server to rollouts if it holds the current weights and samples from them, and rejects it if not."""
        self._check_version(url)
        try:
            self._check_bits(url)
            difference = self._verifier.check(self._client, url, self._params)
        except VerificationError as error:
            self._reject(url, error)
            return
        assert self._verifier.band is not None
        self._metrics["publish/verify_abs_diff_mean"] = difference.mean
        self._metrics["publish/verify_band"] = self._verifier.band
        self._client.open(url, self._version.tag)

    def _recover(self, url: str) -> None:
        """Makes a server that answers again fit for use.

        Before the first publish that is the handshake alone. A server that still has the current weights (only the
        connection broke) is verified; another passes the handshake, is updated and is verified. One that was rejected
        waits for the next version.
        """
        if url in self._rejected:
            return
        if self._current is None:
            try:
                self._handshake(url)
            except ReplyError as error:  # no server of this kind: waiting would not make it one
                raise HandshakeError(error) from error
            self._client.pause(url)
        elif self._backend.serves(self._client, url, self._current):
            self._verify(url)
        else:
            try:
                self._handshake(url)
            except HandshakeError as error:
                raise RuntimeError(f"a restarted server does not fit any more: {error}") from error
            self._prepare(self._current, url)
            self._update(url)
            self._verify(url)
            if url in self._rejected:
                return
            self._metrics["rollout/servers_brought_back"] += 1.0
            version = self._files.policy_version(self._current.tag)
            log.warning("%s is back with policy version %d, verified", url, version)
