"""Servers that keep the model that they were started with: nothing is published to them, and nothing is verified."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rljax.errors import ReplyError, ServerGoneError
from rljax.rollout.engine import RolloutEngine, Samples, TurnQueue
from rljax.rollout.servers.fleet import Admission, Fleet
from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Completion, Request, TakeAsks, check_prompts, make_asks, shortest, turn_asks
from rljax.rollout.servers.verify import sharpening
from rljax.rollout.types import ClientLimits, Response, RolloutConfig, SamplingParams

_FITS = 0.25  # The largest error of a measured log-temperature that is accepted, as a share of |log temperature|.


class ServedModel(RolloutEngine):
    """The engine of servers that already hold the policy. It refuses ``publish``, and also scores given tokens."""

    def __init__(
        self,
        urls: Sequence[str],
        kind: Backend,
        *,
        wait_s: float = 60.0,
        limits: ClientLimits | None = None,
        api_key_file: str | None = None,
    ) -> None:
        """Asks each server for its description. Sampling waits at most ``wait_s`` seconds while no server answers.

        ``urls`` are the base URLs. ``limits`` None: the defaults. ``api_key_file`` is as in ``RolloutConfig``.

        Raises:
          ServerError: A server does not answer.
          ValueError: A server does not serve exactly one model, is paused, or holds another model than the others.
        """
        self._kind = kind
        config = RolloutConfig(
            urls=tuple(urls), server_wait_s=wait_s, limits=limits or ClientLimits(), api_key_file=api_key_file
        )
        self._fleet = Fleet(config, kind, Admission())
        try:
            infos = [self._fleet.wait(kind.describe(server)) for server in self._fleet.servers]
            models = list(dict.fromkeys(info.root or info.model for info in infos))
            if len(models) > 1:
                raise ValueError(f"the servers hold different models: {' and '.join(models)}")
        except BaseException:
            self.close()
            raise
        self.info = shortest(infos)  # the description of the server with the smallest ``max_model_len``
        self._server = self._fleet.server(self.info.url)  # the server that scores and decodes given tokens
        for server in self._fleet.servers:
            self._fleet.on_loop(server.open, None)

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int, at_once: int | None = None
    ) -> Samples:
        """Samples ``n`` responses to each prompt. ``at_once`` requests are sent at a time; None sends all at once."""
        check_prompts(prompts, sampling.max_response_tokens, self.info)
        asks, metrics = make_asks(prompts, n, sampling, seed), dict[str, float]()
        size = at_once or max(1, len(asks))
        parts: list[TakeAsks] = [functools.partial(list, asks[at : at + size]) for at in range(0, len(asks), size)]
        responses = (response for take in parts for response in self._responses(take, None, metrics))
        return Samples(responses, metrics)

    def answer(self, queue: TurnQueue, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples each turn as soon as ``queue`` has its request."""
        metrics: dict[str, float] = {}
        take = turn_asks(queue, sampling, seed, lambda: self.info)
        return Samples(self._responses(take, queue, metrics), metrics)

    def score(self, sequences: Sequence[np.ndarray], *, at_once: int) -> Iterator[np.ndarray]:
        """Yields the log-probabilities of each sequence's tokens at temperature 1. One server scores them as a prompt.

        The token ids are int32 [t] for each sequence, and ``at_once`` sequences are sent at a time. The
        log-probabilities (nats) are float32 [t], with NaN at position 0.

        Raises:
          ServerError: The server does not answer, or its answer lacks these log-probabilities. It is not waited for.
          ValueError: A sequence is empty or too long, or has a token id outside the server's vocabulary.
        """
        check_prompts(sequences, 1, self.info)
        requests = (Request(ids, SamplingParams(1), prompt_logprobs=0) for ids in sequences)
        for ids, reply in zip(sequences, self._scored(requests, at_once), strict=True):
            yield self._logprobs_of(ids, reply)

    def decode(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], *, at_once: int
    ) -> Iterator[np.ndarray]:
        """Yields the log-probabilities of each response's tokens at temperature 1. One server decodes them one by one.

        The token ids are int32 [s] for each prompt and int32 [t] for the response to it. ``at_once`` responses are
        decoded at a time. The log-probabilities (nats) are float32 [t].

        Raises:
          ServerError: The server does not answer, or decodes other tokens.
          ValueError: The server cannot decode given tokens, or does not take a prompt, as in :meth:`score`.
        """
        for prompt, response in zip(prompts, responses, strict=True):
            check_prompts([prompt], max(len(response), 1), self.info)
        forced = self._fleet.wait(self._kind.force(self._server))
        requests = (
            Request(prompt, SamplingParams(len(tokens)), seed=0, forced=forced(tokens))
            for prompt, tokens in zip(prompts, responses, strict=True)
            if len(tokens)
        )
        replies = self._scored(requests, at_once)
        for tokens in responses:
            yield self._decoded(tokens, next(replies)) if len(tokens) else np.zeros(0, np.float32)

    def _decoded(self, tokens: np.ndarray, reply: Completion) -> np.ndarray:
        """Returns the log-probabilities in ``reply``. Raises ReplyError if its tokens are not ``tokens``."""
        others = np.flatnonzero(reply.response != tokens)
        if len(others):
            at = int(others[0])
            said = f"token {at} is {reply.response[at]}, expected {tokens[at]}"
            cause = "the server's log says why if rljax's hooks failed"
            raise ReplyError(f"{self.info.url} decoded other tokens than those given: {said}; {cause}")
        return reply["rollout_logprobs"]

    def top_logprobs(self, sequence: np.ndarray, count: int) -> list[dict[int, float]]:
        """Returns a mapping from token id to log-probability at temperature 1 for each position of ``sequence`` [t].

        A mapping has the ``count`` likeliest tokens and the sequence's own token. The mapping of position 0 is empty.
        If the server tells the size of its vocabulary, ``count`` is limited to it, because a larger one ends vLLM's
        engine. It raises the errors of :meth:`score`.
        """
        check_prompts([sequence], 1, self.info)
        count = min(count, self.info.vocab_size or count)
        (reply,) = self._scored([Request(sequence, SamplingParams(1), prompt_logprobs=count)], 1)
        self._logprobs_of(sequence, reply)
        return [dict(top) for top in reply.prompt_logprobs]

    def logprobs_temperature(self, temperature: float) -> float | None:
        """Measures the temperature of the log-probabilities that come with responses sampled at ``temperature``.

        The result is ``temperature``, or 1 if the log-probabilities belong to the distribution before the temperature
        is applied, or None if neither fits.
        """
        if temperature == 1.0:
            return 1.0
        measured = self._fleet.wait(sharpening(self._server, self.info.vocab_size or 64, temperature))
        sharpened = np.log(measured or np.nan)
        room = _FITS * abs(np.log(temperature))
        if abs(sharpened) < room:
            return 1.0
        return temperature if abs(sharpened + np.log(temperature)) < room else None

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Raises RuntimeError: these servers keep the model that they have."""
        raise RuntimeError("weights cannot be published to a served model")

    def close(self) -> None:
        """Closes the client. The servers keep running."""
        self._fleet.close()

    def _responses(self, take: TakeAsks, turns: TurnQueue | None, metrics: dict[str, float]) -> Iterator[Response]:
        with contextlib.closing(self._fleet.stream(take, turns, self.info.vocab_size, metrics)) as stream:
            for place, reply in stream:
                is_cut = reply.finish_reason == "length"
                yield Response(reply.ids, reply.prompt_length, reply.columns, *place, is_cut)

    def _scored(self, requests: Iterable[Request], at_once: int) -> Iterator[Completion]:
        """Yields the replies of one server to ``requests``, checked. ``at_once`` requests are sent at a time."""
        left = iter(requests)
        while batch := list(itertools.islice(left, at_once)):
            for request, reply in zip(batch, self._fleet.wait(self._server.sample(batch)), strict=True):
                if reply.finish_reason not in ("stop", "length"):
                    raise ServerGoneError(f"{self.info.url} ended a response with {reply.finish_reason!r}")
                check_completion(self.info.url, reply, request, self.info.vocab_size)
                yield reply

    def _logprobs_of(self, ids: np.ndarray, reply: Completion) -> np.ndarray:
        """Returns the log-probability of each token of ``ids`` in ``reply``, float32 [t], with NaN at position 0.

        Raises ReplyError if a token is not among the tokens that are reported at its position.
        """
        pairs = list(zip(ids.tolist(), reply.prompt_logprobs, strict=False))[1:]
        other = [f"{sorted(top)}, expected {token}" for token, top in pairs if token not in top]
        if other or len(reply.prompt_logprobs) != len(ids):
            said = other[0] if other else f"{len(reply.prompt_logprobs)}, expected {len(ids)}"
            raise ReplyError(f"{self.info.url} scored other tokens: {said}")
        return np.asarray([np.nan, *(top[token] for token, top in pairs)], np.float32)
