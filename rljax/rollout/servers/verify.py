"""Whether a server samples from the trainer's weights: generate, score the same tokens, compare.

A fixed set of probe prompts, each longer than two blocks of the server's prefix cache, is sent before an update so that
its blocks are cached. After the update the server *generates* from them (``prompt_logprobs`` would pass the cache by)
and the log-probabilities of what it sampled are compared with the trainer's. Keys and values left over from old
weights, a head that was not repacked and a broken kernel show here and hardly elsewhere; weights that differ by less
than the band are found by their checksums (rljax.weights.checksum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.errors import VerificationError
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.wire import Completion, Request, ServerInfo
from rljax.rollout.types import SamplingParams, VerifyConfig

Score = Callable[[Any, Sequence[np.ndarray]], Sequence[np.ndarray]]

_SHORTEST = 32  # tokens of a probe prompt: the blocks of a cache may be of one token
TOP = 8  # likeliest tokens that the probe of the temperature compares


@dataclass(frozen=True)
class Difference:
    """|server - trainer| over the sampled probe tokens (nats): mean, largest, per prompt; ``mean`` may be NaN."""

    mean: float
    largest: float
    per_prompt: tuple[float, ...]


def probe_length(block_size: int) -> int:
    """Tokens of a probe prompt: two whole cache blocks and a part of a third, and no fewer than 32."""
    return max(2 * block_size + max(block_size // 3, 1), _SHORTEST)


def random_prompts(shape: tuple[int, int], vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    """``shape[0]`` prompts of ``shape[1]`` token ids below ``vocab_size``, int32."""
    return list(np.random.default_rng(seed).integers(0, vocab_size, size=shape).astype(np.int32))


def sharpening(client: ServerClient, url: str, vocab_size: int, temperature: float) -> float:
    """How many times as far apart the likeliest tokens' log-probabilities are at ``temperature`` as at 1.

    1 / temperature of a server that reports the distribution it samples from, 1 of one that reports it before the
    temperature; NaN when the log-probabilities at 1 are not finite, or all equal.
    """
    prompts = random_prompts((8, 4), vocab_size)
    replies = [
        client.sample(url, [Request(prompt, SamplingParams(1, t), seed=1, top_logprobs=TOP) for prompt in prompts])
        for t in (1.0, temperature)
    ]
    gaps = np.zeros(2)
    for pair in zip(*replies, strict=True):
        tops = [reply.top_logprobs[0] for reply in pair]
        common = tops[0].keys() & tops[1].keys()  # which tokens are reported depends on the one that was sampled
        gaps += [np.ptp([top[token] for token in common]) if common else 0.0 for top in tops]
    return float(gaps[1] / gaps[0]) if np.isfinite(gaps).all() and gaps[0] > 0 else float("nan")


class Verifier:
    """Probes, and the band they must stay in."""

    def __init__(
        self, config: VerifyConfig, score: Score, info: ServerInfo, *, dtype: str, mixture: bool = False
    ) -> None:
        """Samples the probe prompts.

        Args:
          config: how hard to look.
          score: the trainer's side: log-probability of each token of each sequence under the given params.
          info: of a server; its vocabulary and the block size of its prefix cache are known.
          dtype: of the rollout.
          mixture: whether the policy is a mixture of experts.
        """
        assert info.vocab_size is not None
        assert info.block_size is not None
        self.config, self._score, self._dtype = config, score, dtype
        self._floor, self._ceiling = config.limits(dtype, mixture=mixture)
        # A mixture's rounds have long tails: one that is out of band by chance is sampled once more.
        self._looks = config.looks(mixture=mixture)
        shape = (config.prompts, probe_length(info.block_size))
        self._prompts = random_prompts(shape, info.vocab_size, config.seed)
        self.band: float | None = None
        self._rounds: dict[str, int] = {}  # that each server has sampled

    def warm(self, client: ServerClient, url: str) -> None:
        """Sends the probes so that the server caches their blocks under the weights it has now."""
        client.sample(url, [Request(prompt, SamplingParams(1)) for prompt in self._prompts])

    def sample(self, client: ServerClient, url: str) -> list[list[Completion]]:
        """What the server generates from the probes: ``rounds`` times before there is a band, then as often as judged.

        It may be called from several threads, for different servers.
        """
        sampling = SamplingParams(self.config.tokens)
        rounds = []
        for _ in range(self.config.rounds if self.band is None else self._looks):
            number = self._rounds[url] = self._rounds.get(url, 0) + 1
            requests = [Request(p, sampling, seed=number * 1000 + i) for i, p in enumerate(self._prompts)]
            rounds.append(client.sample(url, requests))
        return rounds

    def judge(self, url: str, rounds: Sequence[Sequence[Completion]], params: Any) -> Difference:
        """Compares what :meth:`sample` gave with the trainer's ``params`` and the band, which the first call sets.

        Returns:
          What was measured: the worst of the rounds that set the band, later the best of those that are judged.

        Raises:
          VerificationError: out of band, or at the first call above the dtype's ceiling: the weights are not equal.
        """
        name, limit = ("ceiling", self._ceiling) if self.band is None else ("band", self.band)
        measured = [self._difference(sampled, params) for sampled in rounds]
        decides = (max if self.band is None else min)(measured, key=lambda d: d.mean if np.isfinite(d.mean) else np.inf)
        if not decides.mean <= limit:
            raise VerificationError(self._says(url, decides, f"the {name} for {self._dtype} is {limit:.3g}"))
        if self.band is None:
            self.band = min(self._ceiling, max(self._floor, self.config.factor * decides.mean))
        return decides

    def _difference(self, sampled: Sequence[Completion], params: Any) -> Difference:
        sequences = [np.concatenate([p, s.token_ids]) for p, s in zip(self._prompts, sampled, strict=True)]
        scored = self._score(params, sequences)
        gaps = [
            np.abs(np.asarray(logprobs, np.float32)[len(p) : len(p) + len(s.token_ids)] - s.logprobs)
            for p, s, logprobs in zip(self._prompts, sampled, scored, strict=True)
        ]
        together = np.concatenate(gaps)
        return Difference(float(together.mean()), float(together.max()), tuple(float(gap.mean()) for gap in gaps))

    def _says(self, url: str, difference: Difference, limit: str) -> str:
        prompts = ", ".join(f"{gap:.3g}" for gap in difference.per_prompt)
        return (
            f"{url} does not sample from the trainer's weights: mean |server - trainer| over "
            f"{self.config.prompts * self.config.tokens} probe tokens is {difference.mean:.3g} nats "
            f"(largest {difference.largest:.3g}; by prompt {prompts}), {limit}"
        )
