"""Servers as they stand: whatever model they were started with, nothing published, nothing verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rljax.errors import ReplyError, ServerGoneError
from rljax.rollout.engine import Samples
from rljax.rollout.servers.backend import Backend
from rljax.rollout.servers.base import ServedBase, shortest
from rljax.rollout.servers.verify import sharpening
from rljax.rollout.servers.wire import Completion, Request, check_completion, check_prompts, make_requests
from rljax.rollout.types import ClientLimits, Response, SamplingParams

_FITS = 0.25  # of |log temperature|: how far a probe may be from what it is taken for


class ServedModel(ServedBase):
    """RolloutEngine over servers that already hold the policy; ``publish`` is refused. It also scores given tokens."""

    def __init__(
        self,
        urls: Sequence[str],
        backend: Backend,
        *,
        wait_s: float = 60.0,
        limits: ClientLimits | None = None,
        api_key_file: str | None = None,
    ) -> None:
        """Asks each server what it is.

        Args:
          urls: one or several servers of one model, as ``http://host:port``.
          backend: of their kind.
          wait_s: longest to wait while no server answers (seconds).
          limits: of the client.
          api_key_file: as ``RolloutConfig.api_key_file``.

        Raises:
          ServerError: a server does not answer.
          ValueError: a server serves another number of models than one, is paused, or holds another model.
        """
        super().__init__(urls, backend, limits, wait_s=wait_s, api_key_file=api_key_file)
        try:
            infos = [backend.describe(self._client, url) for url in self._client.urls]
            models = list(dict.fromkeys(info.root or info.model for info in infos))
            if len(models) > 1:
                raise ValueError(f"the servers hold different models: {' and '.join(models)}")
        except BaseException:
            self.close()
            raise
        self.info = shortest(infos)
        for url in self._client.urls:
            self._admit(url, None)

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int, at_once: int | None = None
    ) -> Samples:
        """See RolloutEngine; ``at_once`` requests are sent at a time, None: all.

        Raises:
          ServerError: no server answers for ``wait_s``, or one gives logits.
        """
        check_prompts(prompts, sampling.max_response_tokens, self.info)
        metrics: dict[str, float] = {}
        return Samples(self._responses(make_requests(prompts, n, sampling, seed), n, at_once, metrics), metrics)

    def _responses(
        self, requests: Sequence[Request], n: int, at_once: int | None, metrics: dict[str, float]
    ) -> Iterator[Response]:
        size = at_once or len(requests)
        for start in range(0, len(requests), size):
            for place, reply in self._sample(requests[start : start + size], self.info.vocab_size, n, metrics):
                i, j = divmod(start + place, n)
                yield Response(i, j, reply.token_ids, reply.logprobs, reply.finish_reason == "length", ())

    def score(self, sequences: Sequence[np.ndarray], *, at_once: int) -> Iterator[np.ndarray]:
        """Log-probabilities at temperature 1 of given tokens, by one server, which is not waited for.

        Args:
          sequences: int32 [t] token ids of each.
          at_once: sequences sent at a time.

        Yields:
          Float32 [t] for each in order, NaN at position 0.

        Raises:
          ServerError: the server does not answer, or not with these log-probabilities.
          ValueError: a sequence that the server does not take.
        """
        check_prompts(sequences, 1, self.info)
        for start in range(0, len(sequences), at_once):
            requests = [
                Request(ids, SamplingParams(1), prompt_logprobs=True) for ids in sequences[start : start + at_once]
            ]
            for request, reply in zip(requests, self._scored(requests), strict=True):
                yield self._logprobs_of(request.prompt, reply)

    def top_logprobs(self, sequence: np.ndarray, count: int) -> list[dict[int, float]]:
        """Log-probabilities at temperature 1 of the likeliest tokens at each place of a sequence, by one server.

        Args:
          sequence: int32 [t] token ids.
          count: how many are asked for, at most as many as the server says that the vocabulary has: vLLM's engine
            ends when it is asked for more. The token that stands there is among those reported, too.

        Returns:
          Token id -> log-probability at each place; nothing at place 0.

        Raises:
          As ``score``.
        """
        check_prompts([sequence], 1, self.info)
        count = min(count, self.info.vocab_size or count)
        (reply,) = self._scored([Request(sequence, SamplingParams(1), top_logprobs=count, prompt_logprobs=True)])
        self._logprobs_of(sequence, reply)
        return [dict(top) for top in reply.prompt_logprobs]

    def _scored(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """One server's replies to these requests, each checked."""
        for request, reply in zip(requests, self._client.sample(self.info.url, requests), strict=True):
            if reply.finish_reason not in ("stop", "length"):
                raise ServerGoneError(f"{self.info.url} ended a response with {reply.finish_reason!r}")
            check_completion(self.info.url, reply, request, self.info.vocab_size)
            yield reply

    def logprobs_temperature(self, temperature: float) -> float | None:
        """Of which temperature the log-probabilities are that come with responses sampled at ``temperature``.

        Returns:
          ``temperature`` when they are of the distribution sampled from, 1 when they are of the one before the
          temperature, None when neither fits.
        """
        if temperature == 1.0:
            return 1.0
        sharpened = np.log(sharpening(self._client, self.info.url, self.info.vocab_size or 64, temperature) or np.nan)
        room = _FITS * abs(np.log(temperature))
        if abs(sharpened) < room:
            return 1.0
        return temperature if abs(sharpened + np.log(temperature)) < room else None

    def prepare(self, params: Any, policy_version: int) -> None:
        """Raises RuntimeError as :meth:`publish`."""
        self.publish(params, policy_version)

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Raises RuntimeError: these servers keep the model they have."""
        raise RuntimeError("weights cannot be published to a served model")

    def _logprobs_of(self, ids: np.ndarray, reply: Completion) -> np.ndarray:
        """The log-probability of each token among those reported at its place."""
        pairs = list(zip(ids.tolist(), reply.prompt_logprobs, strict=False))[1:]
        other = [f"{sorted(top)}, expected {token}" for token, top in pairs if token not in top]
        if other or len(reply.prompt_logprobs) != len(ids):
            said = other[0] if other else f"{len(reply.prompt_logprobs)}, expected {len(ids)}"
            raise ReplyError(f"{self.info.url} scored other tokens: {said}")
        return np.asarray([np.nan, *(top[token] for token, top in pairs)], np.float32)
