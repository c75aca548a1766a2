"""Draws from vLLM servers as they stand: whatever model they were started with, nothing published, nothing verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rljax.errors import ServerGoneError, ServerRefusedError
from rljax.rollout.served.client import ClientLimits, VllmClient
from rljax.rollout.types import Response, SamplingParams
from rljax.rollout.vllm.wire import Request, response_seed


class ServedModel:
    """RolloutEngine over servers that already hold the policy; ``publish`` is refused."""

    def __init__(self, urls: Sequence[str], *, wait_s: float = 60.0, limits: ClientLimits | None = None) -> None:
        """Asks each server what it calls its model and which endpoint it has.

        Args:
          urls: one or several servers of one model, as ``http://host:port``.
          wait_s: longest to wait while no server answers (seconds).
          limits: of the client.

        Raises:
          ValueError: a server does not answer, serves another number of models than one, or another model.
        """
        self._client = VllmClient(urls, limits)
        self._wait_s = wait_s
        self.model, self.max_model_len = "", 0
        try:
            for url in self._client.urls:
                self._connect(url)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int
    ) -> Iterator[Response]:
        """See RolloutEngine. Raises RuntimeError when no server answers for ``wait_s``."""
        room = self.max_model_len - sampling.max_response_tokens
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= room:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; with {sampling.max_response_tokens} of response it must "
                    f"have 1 to {room} (the servers' max_model_len is {self.max_model_len})"
                )
        requests = [
            Request(prompt, sampling, response_seed(seed, i, j)) for i, prompt in enumerate(prompts) for j in range(n)
        ]
        return self._responses(requests, n)

    def publish(self, params: Any, policy_version: int) -> None:
        """Raises RuntimeError: these servers keep the model they have."""
        raise RuntimeError("weights cannot be published to a served model")

    def take_metrics(self) -> dict[str, float]:
        """See RolloutEngine."""
        return {f"rollout/{name}": float(count) for name, count in self._client.take_counts().items()}

    def close(self) -> None:
        """See RolloutEngine."""
        self._client.close()

    def _responses(self, requests: Sequence[Request], n: int) -> Iterator[Response]:
        stream = self._client.stream(requests)
        alive = time.monotonic()
        try:
            for item in stream:
                if item is None:
                    alive = self._revived(alive)
                    continue
                alive = time.monotonic()
                index, drawn = item
                yield Response(
                    index // n, index % n, drawn.token_ids, drawn.logprobs, drawn.finish_reason == "length", ()
                )
        finally:
            stream.close()

    def _revived(self, alive: float) -> float:
        """Opens lost servers that answer again; returns when one was last open."""
        for url, reason in self._client.lost().items():
            if self._client.answers(url):
                self._client.open(url, "")
            elif not self._client.opened() and time.monotonic() - alive > self._wait_s:
                raise RuntimeError(f"no server answered for {self._wait_s:.0f} s; the last: {reason}")
        return time.monotonic() if self._client.opened() else alive

    def _connect(self, url: str) -> None:
        try:
            models = self._client.call(url, "GET", "/v1/models")["data"]
            if len(models) != 1:
                raise ValueError(f"{url} serves {len(models)} models, expected one")
            self._client.set_model(url, str(models[0]["id"]))
            self._client.find_route(url)
        except (ServerGoneError, ServerRefusedError, KeyError) as error:
            raise ValueError(f"{url} does not answer as a vLLM server does: {error}") from error
        root = str(models[0].get("root") or models[0]["id"])
        if self.model and root != self.model:
            raise ValueError(f"the servers hold different models: {self.model} and {root}")
        length = int(models[0].get("max_model_len") or 0)
        self.model = root
        self.max_model_len = min(self.max_model_len or length, length)
        self._client.open(url, "")
