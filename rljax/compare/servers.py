"""Log-probabilities and responses from a running vLLM server: what it is, what it says of given tokens, what it draws.

``vllm:URL`` asks for prompt log-probabilities, which the server computes in one forward over all tokens and always at
temperature 1. ``vllm-decode:URL`` draws, token by token through its key-value cache, as it does in a training run. Over
HTTP a server cannot be made to decode given tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.compare.dump import ColumnSource, TokenDump
from rljax.errors import ReplyError, ServerGoneError, ServerRefusedError
from rljax.rollout.served.client import ClientLimits, VllmClient
from rljax.rollout.types import Response, SamplingParams
from rljax.rollout.vllm.wire import Completion, Request, sharpening
from rljax.rollout.weights.hash import weights_hash

_LIMITS = ClientLimits(request_timeout_s=600.0)
_TOP = 8  # likeliest tokens that the probe of the temperature compares
_ROUNDING = 1e-3  # nats above 0 that a log-probability may have
_FITS = 0.25  # of |log temperature|: how far a probe may be from what it is taken for


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. An empty string or None means: not known.

    Attributes:
      url: where it listens.
      model: its name of the model.
      root: the model directory it was started with, as the server names it.
      version: of vLLM.
      dtype: of weights and activations; only a server with rljax's plugin says.
      weights_hash: of ``root``, when that is readable here and the server still has the weights it started with.
      vocab_size: token ids are below it.
      max_model_len: prompt and response (tokens).
    """

    url: str
    model: str
    root: str
    version: str
    dtype: str
    weights_hash: str
    vocab_size: int | None
    max_model_len: int | None

    @property
    def label(self) -> str:
        """The dtype; the address of a server that does not say it."""
        return self.dtype or self.url.partition("://")[2]

    def source(self, kind: str, temperature: float | None) -> ColumnSource:
        """What a column of this server's is; ``kind`` ends the engine's name."""
        engine = f"vllm {self.version} {kind}".strip()
        return ColumnSource(engine, self.dtype, self.weights_hash, temperature, "rollout")


class Server:
    """A connection to one server; made by :func:`connect`."""

    def __init__(self, client: VllmClient, info: ServerInfo) -> None:
        self._client, self.info = client, info

    def check(self, name: str, ids: np.ndarray, response_tokens: int) -> None:
        """Refuses what vLLM would cut short or die of.

        Raises:
          ValueError: ``ids`` and ``response_tokens`` more do not fit, or a token is outside the vocabulary.
        """
        longest, known = self.info.max_model_len, self.info.vocab_size
        if longest is not None and len(ids) + response_tokens > longest:
            raise ValueError(
                f"sequence {name!r} has {len(ids)} tokens and the server takes {longest - response_tokens}: "
                "start it with a larger --max-model-len"
            )
        if known is not None and ids.max() >= known:
            raise ValueError(f"sequence {name!r} has token {ids.max()}, but the server's model knows {known}")

    def score(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities at temperature 1 of given tokens, all requested at once.

        Args:
          batch: int32 [t] token ids of each sequence.

        Returns:
          Float32 [t] for each, NaN at position 0.
        """
        requests = [Request(ids, SamplingParams(1), prompt_logprobs=True) for ids in batch]
        return [_of_tokens(self.info.url, ids, reply) for ids, reply in zip(batch, self._ask(requests), strict=True)]

    def draw(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: SamplingParams,
        *,
        seed: int,
        batch_size: int,
        progress: Callable[[int], object] = lambda count: None,
    ) -> list[Response]:
        """``n`` responses to each prompt, ``batch_size`` requested at a time; a response's seed is its own."""
        places = [(i, j) for i in range(len(prompts)) for j in range(n)]
        drawn: list[Completion] = []
        for start in range(0, len(places), batch_size):
            batch = places[start : start + batch_size]
            seeds = [int(np.random.SeedSequence((seed, *place)).generate_state(1)[0] >> 1) for place in batch]
            drawn += self._ask([Request(prompts[i], sampling, s) for (i, _), s in zip(batch, seeds, strict=True)])
            progress(len(batch))
        return [
            Response(i, j, reply.token_ids, reply.logprobs, reply.finish_reason == "length", ())
            for (i, j), reply in zip(places, drawn, strict=True)
        ]

    def logprobs_temperature(self, temperature: float) -> float | None:
        """Of which temperature the log-probabilities are that come with a draw at ``temperature``.

        Returns:
          ``temperature`` of a server with ``--logprobs-mode processed_logprobs``, 1 with ``raw_logprobs``, None when
          neither fits.
        """
        if temperature == 1.0:
            return 1.0
        generator = np.random.default_rng(0)
        prompts = list(generator.integers(0, self.info.vocab_size or 64, size=(8, 4)).astype(np.int32))
        raw, asked = (
            self._ask([Request(p, SamplingParams(1, t), 1, _TOP) for p in prompts]) for t in (1.0, temperature)
        )
        sharpened = np.log(sharpening(raw, asked) or np.nan)
        room = _FITS * abs(np.log(temperature))
        if abs(sharpened) < room:
            return 1.0
        return temperature if abs(sharpened + np.log(temperature)) < room else None

    def _ask(self, requests: Sequence[Request]) -> list[Completion]:
        with _one_line():
            replies = self._client.sample(self.info.url, requests)
        ended = {reply.finish_reason for reply in replies} - {"stop", "length"}
        if ended:
            raise ConnectionError(f"{self.info.url} ended a response with {ended.pop()!r}")
        reported = [[*reply.logprobs.tolist(), *_values(reply.prompt_logprobs)] for reply in replies]
        if any(max(values) > _ROUNDING for values in reported):
            raise ValueError(f"{self.info.url} gives logits: start it with --logprobs-mode processed_logprobs")
        return replies


@contextlib.contextmanager
def connect(url: str) -> Iterator[Server]:
    """A connection to the server at ``url``.

    Raises:
      ConnectionError: it does not answer.
      ValueError: it answers with something else than a vLLM server that serves one model would.
    """
    client = VllmClient([url], _LIMITS)
    try:
        with _one_line():
            info = _describe(client, client.urls[0])
        yield Server(client, info)
    finally:
        client.close()


def check_sequences(server: Server, dump: TokenDump, response_tokens: int) -> None:
    """See ``Server.check``, for every sequence of ``dump``."""
    for name, ids in zip(dump.sequence_ids, dump.token_ids, strict=True):
        server.check(name, ids, response_tokens)


def _describe(client: VllmClient, url: str) -> ServerInfo:
    """Asks the server, and sets the client to its model's name and the endpoint it has."""
    try:
        (model,) = client.call(url, "GET", "/v1/models")["data"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{url} does not list one model at /v1/models: {error}") from error
    if _optional(client, url, "GET", "/is_paused").get("is_paused"):
        raise ValueError(f"{url} is paused: end the run that publishes weights to it, or POST /resume")
    plugin = (_optional(client, url, "POST", "/collective_rpc", {"method": "rljax_describe"}).get("results") or [{}])[0]
    root = str(model.get("root") or "")
    fresh = _optional(client, url, "GET", "/weight_info").get("weight_version") == "default"
    client.set_model(url, str(model["id"]))
    client.find_route(url)
    return ServerInfo(
        url=url,
        model=str(model["id"]),
        root=root,
        version=str(_optional(client, url, "GET", "/version").get("version", "")),
        dtype=str(plugin.get("dtype", "")),
        weights_hash=weights_hash(root) if fresh and any(Path(root).glob("*.safetensors")) else "",
        vocab_size=plugin.get("shape", {}).get("vocab_size"),
        max_model_len=model.get("max_model_len"),
    )


def _optional(client: VllmClient, url: str, method: str, path: str, json: Any = None) -> dict[str, Any]:
    """The reply of an endpoint that a server may lack; empty when it does."""
    try:
        return client.call(url, method, path, json=json)
    except ServerRefusedError:
        return {}


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """The client's errors as those that a program says in one line."""
    try:
        yield
    except ServerGoneError as error:
        raise ConnectionError(f"the vLLM server is gone: {error}") from error
    except (ServerRefusedError, ReplyError) as error:
        raise ValueError(str(error)) from error


def _values(tops: Sequence[Mapping[int, float]]) -> list[float]:
    return [value for top in tops for value in top.values()]


def _of_tokens(url: str, ids: np.ndarray, reply: Completion) -> np.ndarray:
    """The log-probability of each token among those reported at its place."""
    found = np.full(len(ids), np.nan, np.float32)
    if len(reply.prompt_logprobs) != len(ids):
        raise ValueError(f"{url} gave {len(reply.prompt_logprobs)} prompt log-probabilities for {len(ids)} tokens")
    for t, token in enumerate(ids.tolist()[1:], 1):
        if token not in reply.prompt_logprobs[t]:
            raise ValueError(f"{url} scored other tokens: {sorted(reply.prompt_logprobs[t])} at {t}, expected {token}")
        found[t] = reply.prompt_logprobs[t][token]
    return found
