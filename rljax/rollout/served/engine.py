"""The RolloutEngine over real vLLM servers: client, weight files, handshake and verification put together.

A server draws rollouts only between a verified publish and the next one. One that died or was restarted is waited for,
shaken hands with, given the current weights and verified again before it draws another token; every reply names the
weights it was drawn under, so nothing of a server restarted unnoticed is handed on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ServerGoneError, StoppedWaitingError
from rljax.rollout.served.client import ClientLimits, VllmClient
from rljax.rollout.served.verify import Score, Verifier, VerifyConfig
from rljax.rollout.types import Response, SamplingParams, VersionSpan
from rljax.rollout.vllm.handshake import Expectation, shake_hands
from rljax.rollout.vllm.update import push, serves
from rljax.rollout.vllm.wire import Completion, Request, response_seed
from rljax.rollout.weights.files import WeightFiles, WeightVersion

log = logging.getLogger(__name__)

_POLL_S = 1.0
_SAY_EVERY_S = 30.0


@dataclass(frozen=True)
class VllmConfig:
    """The engine's own settings.

    Attributes:
      transfer_dir: directory for weights that trainer and servers both see; None: memory-backed on this machine.
      server_wait_s: longest the run waits while no server answers (seconds).
      seeded: send a seed with each response, so that equal weights redraw alike as far as the server can.
      limits: of the client.
      verify: how publishes are proven.
    """

    transfer_dir: str | None = None
    server_wait_s: float = 900.0
    seeded: bool = True
    limits: ClientLimits = field(default_factory=ClientLimits)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


@dataclass(frozen=True)
class _Current:
    version: WeightVersion
    policy_version: int
    params: Any


class VllmEngine:
    """RolloutEngine over HTTP."""

    def __init__(
        self,
        urls: Sequence[str],
        expected: Expectation,
        *,
        tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]],
        score: Score,
        config: VllmConfig | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits for the servers and shakes hands with each; ``publish`` must be called before ``generate``.

        Args:
          urls: one or several servers, as ``http://host:port``.
          expected: what they must fit.
          tensors: the policy's pytree to (Hugging Face name, array of the rollout dtype).
          score: (the policy's pytree, token sequences) to the log-probability of each token, computed in the rollout
            dtype at temperature 1; used by verification alone.
          config: the engine's settings.
          should_stop: asked while no server answers; true ends the wait.

        Raises:
          HandshakeError: a server does not fit; one line for each thing that differs.
          RuntimeError: a server did not answer within ``server_wait_s``.
        """
        self._expected, self._tensors, self._score = expected, tensors, score
        self._config = config or VllmConfig()
        self._should_stop = should_stop
        self._client = VllmClient(urls, self._config.limits)
        self._current: _Current | None = None
        self._verified = False
        self._verifier: Verifier | None = None
        self._metrics: dict[str, float] = {}
        self._described: dict[str, Any] = {}
        self._said = -math.inf
        self._last_open = time.monotonic()
        self._files = WeightFiles(self._config.transfer_dir)
        try:
            for url in self._client.urls:
                self._until_back(url, self._connect)
        except BaseException:
            self.close()
            raise

    def publish(self, params: Any, policy_version: int) -> None:
        """See RolloutEngine. Rollouts are held from before the pause until every server is verified."""
        began = time.monotonic()
        version = self._files.write(self._tensors(params), policy_version)
        if version.dtype != self._expected.dtype:
            raise ValueError(f"published tensors are {version.dtype}, the rollout dtype is {self._expected.dtype}")
        held = time.monotonic()
        self._client.hold()
        self._verified = False
        self._current = _Current(version, policy_version, params)
        self._push_everywhere(version)
        for url in self._client.urls:
            self._until_back(url, self._verify if url not in self._client.lost() else self._bring_up)
        self._verified = True
        ended = time.monotonic()
        self._files.keep_only(version)
        self._add("publish/seconds", ended - began)
        self._add("publish/stall_s", ended - held)
        self._add("publish/bytes", float(version.num_bytes))
        self._add("time/publish_s", ended - began)
        if not math.isnan(version.changed_fraction):
            self._metrics["publish/changed_fraction"] = version.changed_fraction

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int
    ) -> Iterator[Response]:
        """See RolloutEngine. Waits, bounded, for servers that die meanwhile; their responses are drawn again."""
        if not self._verified:
            raise RuntimeError("the vLLM servers hold no verified policy: publish first")
        self._check(prompts, n, sampling)
        requests = [
            Request(prompt, sampling, response_seed(seed, i, j) if self._config.seeded else None)
            for i, prompt in enumerate(prompts)
            for j in range(n)
        ]
        return self._generate(requests, n)

    def take_metrics(self) -> dict[str, float]:
        """See RolloutEngine."""
        for name, count in self._client.take_counts().items():
            self._add(f"rollout/{name}", float(count))
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """See RolloutEngine. The servers keep running, with the last weights."""
        self._client.close()
        self._files.close()
        self._current = None

    def _generate(self, requests: Sequence[Request], n: int) -> Iterator[Response]:
        began = time.monotonic()
        self._last_open = time.monotonic()
        self._notice_restarts()
        stream = self._client.stream(requests)
        try:
            for item in stream:
                if item is None:
                    self._revive()
                    continue
                index, completion = item
                yield self._response(index, n, completion)
        finally:
            stream.close()
            self._add("time/generate_s", time.monotonic() - began)

    def _response(self, index: int, n: int, completion: Completion) -> Response:
        assert self._current is not None
        length = len(completion.token_ids)
        spans = completion.spans or ((self._current.version.tag, 0, length),)
        return Response(
            prompt_index=index // n,
            sample_index=index % n,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            truncated=completion.finish_reason == "length",
            versions=tuple(VersionSpan(self._files.policy_version(tag), start, end) for tag, start, end in spans),
        )

    def _check(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams) -> None:
        """Refuses here what vLLM would silently shorten (too long) or die of (a token id out of range)."""
        if not prompts or n < 1:
            raise ValueError(f"at least one prompt and one response each are needed, got {len(prompts)} and n = {n}")
        limit, vocab = self._described["max_model_len"], self._described["shape"]["vocab_size"]
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= limit - sampling.max_response_tokens:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; with {sampling.max_response_tokens} of response it must "
                    f"have 1 to {limit - sampling.max_response_tokens} (the servers' max_model_len is {limit})"
                )
            if prompt.min() < 0 or prompt.max() >= vocab:
                raise ValueError(f"prompt {i} has token ids outside 0..{vocab - 1}")
        if any(not 0 <= token < vocab for token in sampling.stop_token_ids):
            raise ValueError(f"stop_token_ids {sampling.stop_token_ids} are outside 0..{vocab - 1}")

    # ---- servers that come and go ----

    def _connect(self, url: str) -> None:
        if not self._client.answers(url):
            raise ServerGoneError(f"{url}: /health does not answer 200")
        described = shake_hands(self._client, url, self._expected, self._files, self._config.verify)
        if self._verifier is None:
            self._described = described
            self._verifier = Verifier(
                self._config.verify,
                self._score,
                dtype=self._expected.dtype,
                vocab_size=described["shape"]["vocab_size"],
                block_size=described["block_size"],
            )
        elif described["max_model_len"] < self._described["max_model_len"]:
            self._described = described
        log.info("%s: vLLM %s, %s, agrees with the trainer", url, described["vllm"], described["dtype"])

    def _push_everywhere(self, version: WeightVersion) -> None:
        """Warms the probes and updates all servers at once but the lost; one that is gone meanwhile is lost."""
        verifier = self._verifier
        assert verifier is not None

        def update(url: str) -> None:
            try:
                verifier.warm(self._client, url)
                push(self._client, url, version)
            except ServerGoneError as error:
                self._client.lose(url, str(error))

        lost = self._client.lost()
        with ThreadPoolExecutor(len(self._client.urls)) as pool:
            list(pool.map(update, [url for url in self._client.urls if url not in lost]))

    def _verify(self, url: str) -> None:
        """Proves that ``url`` samples from the current weights, and admits rollouts to it."""
        current, verifier = self._current, self._verifier
        assert current is not None
        assert verifier is not None
        if not serves(self._client, url, current.version):
            raise ServerGoneError(f"{url} does not hold {current.version.tag}: it was restarted or updated by others")
        difference = verifier.check(self._client, url, current.params)
        assert verifier.band is not None
        self._metrics["publish/verify_abs_diff_mean"] = difference.mean
        self._metrics["publish/verify_band"] = verifier.band
        self._client.open(url, self._files.run_tag)

    def _bring_up(self, url: str) -> None:
        """A server that came back: handshake, current weights, proof."""
        assert self._current is not None
        assert self._verifier is not None
        try:
            self._connect(url)
        except HandshakeError as error:
            raise RuntimeError(f"a restarted server does not fit any more: {error}") from error
        self._verifier.warm(self._client, url)
        push(self._client, url, self._current.version)
        self._verify(url)
        self._add("rollout/servers_brought_back", 1.0)
        log.warning("%s is back with policy version %d, verified", url, self._current.policy_version)

    def _until_back(self, url: str, act: Callable[[str], None]) -> None:
        """``act(url)``; if the server is gone, waits for it and brings it up instead, within ``server_wait_s``."""
        began = time.monotonic()
        while True:
            try:
                act(url)
            except ServerGoneError as error:
                self._wait_or_give_up(time.monotonic() - began, str(error))
                if self._current is not None:
                    act = self._bring_up
            else:
                return

    def _wait_or_give_up(self, waited: float, reason: str) -> None:
        if self._should_stop():
            raise StoppedWaitingError(f"asked to stop, and no vLLM server answers: {reason}")
        if waited > self._config.server_wait_s:
            raise RuntimeError(f"no vLLM server came back within {self._config.server_wait_s:.0f} s: {reason}")
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            log.warning(
                "waiting for a vLLM server, %.0f s of at most %.0f s (%s); restart it on the same port "
                "(launch/vllm_server.sh MODEL --port P) and the run goes on",
                waited,
                self._config.server_wait_s,
                reason,
            )
        time.sleep(_POLL_S)

    def _notice_restarts(self) -> None:
        """Loses the open servers that do not hold the current weights."""
        assert self._current is not None
        for url in self._client.opened():
            try:
                if not serves(self._client, url, self._current.version):
                    self._client.lose(url, f"{url} does not hold {self._current.version.tag}")
            except ServerGoneError as error:
                self._client.lose(url, str(error))

    def _revive(self) -> None:
        """Brings lost servers up that answer again; waits, bounded, only while none is open."""
        if self._client.opened():
            self._last_open = time.monotonic()
        for url, reason in self._client.lost().items():
            try:
                if self._client.answers(url):
                    self._reopen(url)
                    continue
            except ServerGoneError as error:
                reason = str(error)
            if not self._client.opened():
                self._wait_or_give_up(time.monotonic() - self._last_open, reason)

    def _reopen(self, url: str) -> None:
        """Opens a server that kept its weights through a broken connection; brings it up otherwise."""
        assert self._current is not None
        if serves(self._client, url, self._current.version):
            self._verify(url)
        else:
            self._bring_up(url)

    def _add(self, name: str, value: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + value
