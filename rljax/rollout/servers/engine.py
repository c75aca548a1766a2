"""The rollout engine over HTTP servers: fleet, weight files, handshake and verification put together.

A server samples rollouts only between a verified publish and the next one. Verified means: its workers loaded tensors
with the trainer's checksums, and the tokens that it generates from probes have the trainer's log-probabilities. A
server that died, was restarted or joins passes the handshake, gets the current weights and is verified before it
samples a token. A server that fails is left out until the next version. Servers on the trainer's devices sleep after
sampling, and are updated and verified when they wake. Each reply names the weights that sampled it. So the replies of a
server that was restarted between two requests are refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerGoneError
from rljax.rollout.engine import RolloutEngine, Samples, Stopping, TurnQueue
from rljax.rollout.servers.fleet import Admission, Fleet
from rljax.rollout.servers.handshake import Expectation, check_logprobs, check_room
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.requests import (
    Completion,
    ServerInfo,
    TakeAsks,
    check_prompts,
    make_asks,
    shortest,
    turn_asks,
)
from rljax.rollout.servers.server import Published, Server
from rljax.rollout.servers.verify import Look, Score, Verifier
from rljax.rollout.types import Response, SamplingParams
from rljax.weights.access import find_key_file
from rljax.weights.format import Checksum
from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory, WeightVersion
from rljax.weights.writer import Part, Writer

log = logging.getLogger(__name__)

STRAGGLER_S = 30.0
"""The shortest time that a publish waits for the other servers once the first one is ready (seconds)."""


@dataclass(frozen=True)
class PolicyFunctions:
    """The functions by which the engine publishes and verifies the policy's pytree, in the rollout dtype."""

    tensors: Callable[[Any], Iterable[tuple[str, np.ndarray]]]  # yields (Hugging Face name, array) of each tensor
    checksums: Callable[[Any], Mapping[str, Checksum]]  # the checksums by name; RuntimeError if a value is not finite
    score: Score  # the log-probabilities at temperature 1, for the verification
    parts: Callable[[Any], Iterable[Part]] = lambda params: ()  # yields the parts of the tensors that this process has
    writer: Writer | None = None  # the writer if several processes write a version; None if this process writes all


class ServedEngine(Admission, RolloutEngine):
    """The engine that publishes to HTTP servers, verifies them and samples from them."""

    def __init__(
        self,
        expected: Expectation,
        backend: Backend,
        functions: PolicyFunctions,
        *,
        publish: PublishConfig | None = None,
        stop: Stopping | None = None,
        probe_prompts: Sequence[np.ndarray] = (),
    ) -> None:
        """Waits for the servers and shakes hands with each; ``publish`` must be called before ``generate``.

        Args:
          expected: The settings of the engine, and everything that the servers must fit.
          backend: The kind of the servers.
          publish: The way in which weights come to the servers; None for ``PublishConfig()``.
          stop: The object that tells when to give up waits for servers and responses. None: they are never given up.
          probe_prompts: The prompts of the run from which the probes are made, int32 [s] each. Empty: random tokens.

        Raises:
          HandshakeError: A server does not fit. The message has one line for each difference.
          RuntimeError: A server did not answer within ``server_wait_s``, or no directory for weights can be made.
          ValueError: ``urls`` or ``api_key_file`` cannot be used.
        """
        config, publish = expected.config, publish or PublishConfig()
        self._expected, self._config, self._backend, self._functions = expected, config, backend, functions
        self._current: Published | None = None
        self._prepared: Published | None = None  # the version that is published next
        self._verified = False
        self.fleet = Fleet(config, backend, self, stop)
        self._metrics = self.fleet.metrics
        with contextlib.ExitStack() as opened:
            opened.callback(self.fleet.close)
            key_file, writer = find_key_file(config.api_key_file), functions.writer
            self.files = WeightDirectory(publish, config.transfer_dir, api_key_file=key_file, writer=writer)
            opened.callback(self.files.close)
            # Until all servers of ``urls`` have shaken hands, or the first one that discovery lists.
            while not self.fleet.answering() or (self.fleet.discovery is None and self.fleet.down()):
                self.fleet.recover()
            infos, mixture = self.fleet.infos(), "num_experts" in expected.hf_config
            block_size = max(each.block_size or 0 for each in infos)
            info = replace(shortest(infos), block_size=block_size)
            check_room(info, block_size, expected)
            opened.pop_all()
        self.verifier = Verifier(
            config.verify, functions.score, info, dtype=config.dtype, mixture=mixture, prompts=probe_prompts
        )

    def prepare(self, params: Any, policy_version: int) -> None:
        """Writes the weight files of ``params``. The servers' machines pull them while responses are sampled."""
        began = time.monotonic()
        # A server that computed one token with weights that are not finite keeps NaN in its key-value cache.
        sums = self._functions.checksums(params)
        self._metrics.add("time/checksums_s", time.monotonic() - began)
        writing = time.monotonic()
        version = self.files.write(self._functions.tensors(params), policy_version, sums)
        self._metrics.add("publish/encode_s", time.monotonic() - writing)
        if version.dtype != self._config.dtype:
            raise ValueError(f"published tensors are {version.dtype}, the rollout dtype is {self._config.dtype}")
        self.fleet.follow_discovery()
        # A server that cannot read the version now may read it later: it is updated when it is brought back.
        self.fleet.side_by_side(lambda server: server.pull(version), self.fleet.answering(), STRAGGLER_S)
        self._prepared = Published(version, params, sums)
        self._metrics.add("publish/bytes", version.num_bytes)
        self._metrics.add("publish/seconds", time.monotonic() - began)
        if not math.isnan(version.changed_fraction):
            self._metrics.highest("publish/changed_fraction", version.changed_fraction)

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
        # Unless publishes wait for the responses under way, more of them may be asked for meanwhile.
        self._verified = self._verified and self._config.update != "wait"
        self.fleet.begin_version()
        self._renew_all(self.fleet.answering())
        self._verified = True
        ended = time.monotonic()
        self.files.drop_old()
        for name in ("publish/seconds", "publish/stall_s"):
            self._metrics.add(name, ended - paused)
        self._metrics.add("time/publish_s", ended - began)
        return self.fleet.report()

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples from all verified servers. If some die, other servers sample their part again.

        If all have died, it waits up to ``server_wait_s``. A thread that samples ahead raises ServersLostError instead.
        """
        if not prompts or n < 1:
            raise ValueError(f"at least one prompt and one response each are needed, got {len(prompts)} and n = {n}")
        self._check_verified()
        info, seed_sent = self._shortest(), self._seed_sent(seed)
        check_prompts(prompts, sampling.max_response_tokens, info, sampling.stop_token_ids)
        asks = make_asks(prompts, n, sampling, seed_sent, self._expected.routes, info.vocab_size)
        metrics: dict[str, float] = {}
        return Samples(self._responses(lambda: asks, None, metrics), metrics)

    def answer(self, queue: TurnQueue, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples each turn as soon as ``queue`` has its request. Servers and errors are those of ``generate``.

        The turns of a group go to one server, because it has computed the tokens before them.
        """
        self._check_verified()
        take = turn_asks(queue, sampling, self._seed_sent(seed), self._shortest, self._expected.routes)
        metrics: dict[str, float] = {}
        return Samples(self._responses(take, queue, metrics), metrics)

    def _check_verified(self) -> None:
        if not self._verified:
            raise RuntimeError(f"the {self._backend.name} servers hold no verified policy: publish first")

    def _shortest(self) -> ServerInfo:
        """Returns the description of the server that takes the shortest sequences now, on any thread."""
        return shortest(self.fleet.infos())

    def _seed_sent(self, seed: int) -> int | None:
        """Returns the seed from which the seeds of responses are made, or None if the servers choose their own."""
        # When weights come while responses are sampled, that moment decides what is sampled, whatever the seed.
        return seed if self._config.update == "wait" else None

    def close(self) -> None:
        """Closes the client and removes the weight files. The servers keep running, with the last weights."""
        self.fleet.close()
        self.files.close()
        self._current = self._prepared = None

    def _responses(self, take: TakeAsks, turns: TurnQueue | None, metrics: dict[str, float]) -> Iterator[Response]:
        began, cached, told = time.monotonic(), 0, 0
        if asleep := self.fleet.all_in("asleep"):
            self._renew_all(asleep)
        if self._config.update == "wait":  # otherwise a publish may be under way, and replies name their weights
            self.fleet.side_by_side(lambda server: server.check_serves(self.version), self.fleet.all_in("open"))
        try:
            with contextlib.closing(self.fleet.stream(take, turns, self._shortest().vocab_size, metrics)) as stream:
                for place, reply in stream:
                    if reply.cached is not None:
                        cached, told = cached + reply.cached, told + reply.prompt_length
                    yield self._response(place, reply)
        finally:
            if self._config.colocated and self._current is not None:
                self.fleet.side_by_side(lambda server: server.sleep(self.verifier), self.fleet.all_in("open"))
            metrics["time/generate_s"] = time.monotonic() - began
            if told:
                metrics["rollout/cached_prompt_fraction"] = cached / told

    def _response(self, place: tuple[int, int], reply: Completion) -> Response:
        versions = np.zeros(len(reply.response), np.int32)
        for tag, start, end in reply.spans or ():
            versions[start:end] = self.files.policy_version(tag)
        columns = reply.add({"version": versions}).columns
        return Response(reply.ids, reply.prompt_length, columns, *place, reply.finish_reason == "length")

    @property
    def version(self) -> WeightVersion:
        """The version that was published last."""
        assert self._current is not None
        return self._current.version

    def _renew_all(self, servers: Sequence[Server]) -> None:
        """Gives the current weights to ``servers``, and to servers that came back. Returns once one is verified."""
        published, in_flight = self._current, self._config.update
        assert published is not None
        self.fleet.renew(lambda server: server.renew(published, self.verifier, in_flight), servers, STRAGGLER_S)

    # ---- What a server must show (Admission) ----

    async def recover(self, server: Server) -> list[Look]:
        """Makes a server that answers again hold the current weights, and returns its answers to the probes.

        Before the first publish it only passes the handshake. If only the connection broke and the server still has the
        weights, it just proves them. Otherwise it first passes the handshake and is updated. It samples nothing before
        that: weights that are not finite would put NaN into its key-value cache, which no update removes. A server that
        was rejected waits for the next version.
        """
        if server.rejected is not None:
            raise ServerGoneError(str(server.rejected))
        published, hint = self._current, self._backend.logprobs_hint
        if published is None:
            try:
                info = await server.greet(self._expected, self.files)
                if info.is_broken:
                    raise HandshakeError(f"{server.url}: its last update broke off and left mixed weights; restart it")
                await check_logprobs(server, info, hint)
                server.info = info
                return []
            except ReplyError as error:  # no server of this kind: waiting would not make it one
                raise HandshakeError(error) from error
        if not await server.wake() and await server.serves(published.version):
            return await server.prove(published, self.verifier)
        try:
            info, most = await server.greet(self._expected, self.files), self.verifier.block_size
            if (info.block_size or 0) > most:  # the probes would not show whether its cache is reset
                said = f"its cache blocks have {info.block_size} tokens, and the probes fill blocks of {most}"
                raise HandshakeError(f"{server.url}: {said}: start it with smaller ones, or start the run again")
            check_room(info, most, self._expected)
            await server.pull(published.version)
            if self._current is not published:
                raise ServerGoneError(f"{server.url} was recovered for weights that are not the current ones any more")
            await server.load(published.version, self._config.update)
            looks = await server.prove(published, self.verifier)
            await check_logprobs(server, info, hint)
        except HandshakeError as error:
            raise RuntimeError(f"a restarted server does not fit any more: {error}") from error
        server.info = info
        return looks

    def admit(self, server: Server, looks: list[Look]) -> Callable[[], None]:
        """Returns ``server.open``, or ``pause`` before a publish. VerificationError: The probes show other weights."""
        current = self._current
        if current is None:
            return server.pause
        began, verifier = time.monotonic(), self.verifier
        difference = verifier.judge(
            server.url, looks, current.params, lambda: self.fleet.wait(verifier.sample(server, whole=True))
        )
        self._metrics.add("publish/score_s", time.monotonic() - began)
        assert verifier.band is not None
        self._metrics.highest("publish/verify_abs_diff_mean", difference.mean)
        self._metrics.highest("publish/verify_band", verifier.band)
        if verifier.own_band is not None:
            self._metrics.highest("publish/verify_own_abs_diff_mean", difference.own)
            self._metrics.highest("publish/verify_own_band", verifier.own_band)
        if server.reason:
            self._metrics.add("rollout/servers_brought_back", 1.0)
            version = self.files.policy_version(current.version.tag)
            log.warning("%s is back with policy version %d, verified", server.url, version)
        return functools.partial(server.open, current.version.tag)

    def refuse(self, server: Server, error: Exception) -> None:
        """Rejects a server for this version. Raises ``error`` if no server is left, or at a start without discovery."""
        if self._current is None and self.fleet.discovery is None:
            raise error
        server.rejected = error
        self._metrics.add("rollout/servers_rejected", 1.0)
        if server.reason:
            log.warning("a %s server is left out: %s", self._backend.name, error)
        self.fleet.on_loop(server.close, str(error))
        if all(each.rejected for each in self.fleet.servers):
            raise error
