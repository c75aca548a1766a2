"""Proof that a server samples from the trainer's weights: generate, score the same tokens, compare.

A fixed set of probe prompts, each longer than two blocks of the server's prefix cache, is sent before an update so that
its blocks are cached. After the update the server *generates* from them (``prompt_logprobs`` would pass the cache by)
and the log-probabilities of what it sampled are compared with the trainer's. Keys and values left over from old
weights, a head that was not repacked, a tensor left out and a wrong dtype all show here and hardly elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.errors import VerificationError
from rljax.rollout.served.client import VllmClient
from rljax.rollout.types import SamplingParams
from rljax.rollout.vllm.wire import Request

Score = Callable[[Any, Sequence[np.ndarray]], Sequence[np.ndarray]]

# Mean |server - trainer| per token (nats). Floors: no tighter than this, because a policy's own mismatch moves while it
# learns. Ceilings: above them calibration itself is refused. Seen with equal weights on a tiny random model: bf16
# 1.2e-2, fp16 1.6e-3, fp32 9e-7.
_FLOORS = {"bfloat16": 2e-2, "float16": 2.5e-3, "float32": 1e-5}
_CEILINGS = {"bfloat16": 8e-2, "float16": 1e-2, "float32": 1e-3}


@dataclass(frozen=True)
class VerifyConfig:
    """How hard to look.

    Attributes:
      prompts: probe prompts.
      tokens: tokens generated from each; the statistic is a mean over ``prompts * tokens`` of them.
      rounds: times the probes are drawn for calibration.
      factor: the band is ``factor`` times the worst calibration round, between floor and ceiling of the dtype.
      floors: mean |server - trainer| (nats) below which no band goes, by dtype.
      ceilings: the same above which no band goes, by dtype.
      seed: of the probe prompts.
    """

    prompts: int = 4
    tokens: int = 16
    rounds: int = 3
    factor: float = 4.0
    floors: Mapping[str, float] = field(default_factory=lambda: dict(_FLOORS))
    ceilings: Mapping[str, float] = field(default_factory=lambda: dict(_CEILINGS))
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompts, self.tokens, self.rounds) < 1 or self.factor < 1.0:
            raise ValueError(f"prompts, tokens and rounds must be at least 1 and factor at least 1.0, got {self}")


@dataclass(frozen=True)
class Difference:
    """|server - trainer| over the sampled probe tokens (nats): mean, largest, per prompt; ``mean`` may be NaN."""

    mean: float
    largest: float
    per_prompt: tuple[float, ...]


def probe_length(block_size: int) -> int:
    """Tokens of a probe prompt: two whole cache blocks and a part of a third."""
    return 2 * block_size + max(block_size // 3, 1)


class Verifier:
    """Probes, and the band they must stay in."""

    def __init__(self, config: VerifyConfig, score: Score, *, dtype: str, vocab_size: int, block_size: int) -> None:
        """Draws the probe prompts.

        Args:
          config: how hard to look.
          score: the trainer's side: log-probability of each token of each sequence under the given params.
          dtype: of the rollout.
          vocab_size: v; token ids of the probes are below it.
          block_size: of the server's prefix cache (tokens).
        """
        self.config, self._score, self._dtype = config, score, dtype
        draw = np.random.default_rng(config.seed)
        shape = (config.prompts, probe_length(block_size))
        self._prompts = list(draw.integers(0, vocab_size, size=shape).astype(np.int32))
        self.band: float | None = None
        self._draws = 0

    def warm(self, client: VllmClient, url: str) -> None:
        """Sends the probes so that the server caches their blocks under the weights it has now."""
        client.sample(url, [Request(prompt, SamplingParams(1)) for prompt in self._prompts])

    def measure(self, client: VllmClient, url: str, params: Any) -> Difference:
        """Lets the server generate from the probes and compares with the trainer's ``params``."""
        sampling = SamplingParams(self.config.tokens)
        self._draws += 1
        requests = [Request(p, sampling, seed=self._draws * 1000 + i) for i, p in enumerate(self._prompts)]
        drawn = client.sample(url, requests)
        sequences = [np.concatenate([p, d.token_ids]) for p, d in zip(self._prompts, drawn, strict=True)]
        scored = self._score(params, sequences)
        gaps = [
            np.abs(np.asarray(s, np.float32)[len(p) : len(p) + len(d.token_ids)] - d.logprobs)
            for p, d, s in zip(self._prompts, drawn, scored, strict=True)
        ]
        together = np.concatenate(gaps)
        return Difference(float(together.mean()), float(together.max()), tuple(float(gap.mean()) for gap in gaps))

    def calibrate(self, client: VllmClient, url: str, params: Any) -> Difference:
        """Sets the band from ``rounds`` measurements under equal weights, and returns the worst of them.

        Raises:
          VerificationError: the worst is above the dtype's ceiling, so the weights are not equal.
        """
        rounds = [self.measure(client, url, params) for _ in range(self.config.rounds)]
        worst = max(rounds, key=lambda d: d.mean if np.isfinite(d.mean) else np.inf)
        ceiling = self.config.ceilings[self._dtype]
        if not worst.mean <= ceiling:
            raise VerificationError(self._says(url, worst, f"the ceiling for {self._dtype} is {ceiling:.3g}"))
        self.band = min(ceiling, max(self.config.floors[self._dtype], self.config.factor * worst.mean))
        return worst

    def check(self, client: VllmClient, url: str, params: Any) -> Difference:
        """Measures once against the band; the first call calibrates it.

        Raises:
          VerificationError: out of band.
        """
        if self.band is None:
            return self.calibrate(client, url, params)
        difference = self.measure(client, url, params)
        if not difference.mean <= self.band:
            raise VerificationError(self._says(url, difference, f"the band for {self._dtype} is {self.band:.3g}"))
        return difference

    def _says(self, url: str, difference: Difference, limit: str) -> str:
        prompts = ", ".join(f"{gap:.3g}" for gap in difference.per_prompt)
        return (
            f"{url} does not sample from the trainer's weights: mean |server - trainer| over "
            f"{self.config.prompts * self.config.tokens} probe tokens is {difference.mean:.3g} nats "
            f"(largest {difference.largest:.3g}; by prompt {prompts}), {limit}"
        )
