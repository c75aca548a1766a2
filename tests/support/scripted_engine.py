"""A rollout engine whose responses follow a script: whole loops take moments, and every number of a row is known."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from records import response

from rljax.data.tokenizer import Tokenizer
from rljax.errors import StoppedWaitingError
from rljax.rollout.engine import Samples
from rljax.rollout.types import Response, SamplingParams


class ScriptedEngine:
    """An engine that answers each prompt from a script, and keeps what was published and asked.

    Args:
      tokenizer: The tokenizer of the prompts and of the script's texts.
      script: A function of (prompt, sample index, seed) that returns the response's text with its end-of-sequence
        token.
      gone_at_version: The version at whose publish the servers are gone. The engine then says that the run is to stop.
    """

    def __init__(
        self, tokenizer: Tokenizer, script: Callable[[str, int, int], str], *, gone_at_version: int | None = None
    ) -> None:
        self.tokenizer, self.script, self.gone_at_version = tokenizer, script, gone_at_version
        self.published: list[int] = []
        self.asked: list[list[str]] = []
        self.is_gone = False

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        self.metrics = {"rollout/requests": 0.0}
        return Samples(self.respond(prompts, n, sampling, seed, self.metrics), self.metrics)

    def respond(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, seed: int, metrics: dict[str, float]
    ) -> Iterator[Response]:
        self._check()
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.asked.append(texts)
        for i, prompt in reversed(list(enumerate(texts))):
            for j in range(n):
                metrics["rollout/requests"] += 1
                tokens = self.tokenizer.encode(self.script(prompt, j, seed))[: sampling.max_response_tokens]
                truncated = tokens[-1] not in sampling.stop_token_ids
                version = self.published[-1]
                yield response((i, j), tokens, version=version, prompt=prompts[i], truncated=truncated)

    def prepare(self, params: dict, policy_version: int) -> None:
        pass

    def publish(self, params: dict, policy_version: int) -> dict[str, float]:
        self.is_gone |= policy_version == self.gone_at_version
        self._check()
        self.published.append(policy_version)
        return {}

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.is_gone:
            raise StoppedWaitingError("no server answers, and the run is to stop")
