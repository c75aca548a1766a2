"""The proof that a server samples from the trainer's weights. It has two halves, and both are asked for.

*Bits*: the server's workers return the checksum of every tensor as it stands loaded, and each equals the trainer's.

*Use*: a fixed set of probe prompts, each longer than two blocks of the server's prefix cache, is sent before an update
so that its blocks are cached. After the update the server *generates* from them (``prompt_logprobs`` would bypass the
cache), and the log-probabilities of what it sampled are compared with the trainer's. Keys and values left over from old
weights, a head that was not repacked and a broken kernel show here and hardly elsewhere.
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
"""A function of (the policy's pytree, token sequences) that returns the log-probability of each token."""

TOP = 8
"""The number of likeliest tokens that the probe of the temperature compares."""
_SHORTEST = 32  # The fewest tokens of a probe prompt: the blocks of a cache may be of one token.


@dataclass(frozen=True)
class Difference:
    """The distance |server - trainer| over the sampled probe tokens (nats): its mean, which may be NaN, and more."""

    mean: float
    largest: float
    per_prompt: tuple[float, ...]


def probe_length(block_size: int) -> int:
    """Returns the tokens of a probe prompt: two whole cache blocks and a part of a third, and no fewer than 32."""
    return max(2 * block_size + max(block_size // 3, 1), _SHORTEST)


def random_prompts(shape: tuple[int, int], vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    """Returns ``shape[0]`` prompts of ``shape[1]`` token ids below ``vocab_size``, int32."""
    return list(np.random.default_rng(seed).integers(0, vocab_size, size=shape).astype(np.int32))


def sharpening(client: ServerClient, url: str, vocab_size: int, temperature: float) -> float:
    """Returns how much farther apart the likeliest tokens' log-probabilities are at ``temperature`` than at 1.

    It is 1 / temperature where a server reports the distribution that it samples from, 1 where it reports the one
    before the temperature, and NaN when the log-probabilities at 1 are not finite, or all equal.
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
    """The probes of the second half, and the band in which the differences must stay."""

    def __init__(
        self, config: VerifyConfig, score: Score, info: ServerInfo, *, dtype: str, mixture: bool = False
    ) -> None:
        """Draws the probe prompts, for the vocabulary and the cache blocks of ``info``.

        ``score`` is the trainer's side, which computes in the rollout ``dtype`` at temperature 1. The bands of a
        ``mixture`` of experts are wider.
        """
        assert info.vocab_size is not None
        assert info.block_size is not None
        self._config, self._score, self._dtype = config, score, dtype
        self._floor, self._ceiling = config.limits(dtype, mixture=mixture)
        # A mixture's rounds have long tails: one that is out of band by chance is sampled once more.
        self._looks = config.looks(mixture=mixture)
        shape = (config.prompts, probe_length(info.block_size))
        self._prompts = random_prompts(shape, info.vocab_size, config.seed)
        self.band: float | None = None  # the largest mean that passes (nats), once the first version was verified
        self._rounds: dict[str, int] = {}  # the rounds that each server has sampled

    def warm(self, client: ServerClient, url: str) -> None:
        """Sends the probes, so that the server caches their blocks under the weights that it has now."""
        client.sample(url, [Request(prompt, SamplingParams(1)) for prompt in self._prompts])

    def sample(self, client: ServerClient, url: str) -> list[list[Completion]]:
        """Returns what the server generates from the probes, in as many rounds as :meth:`judge` needs.

        That is ``rounds`` before there is a band. It may be called from several threads, for different servers.
        """
        sampling = SamplingParams(self._config.tokens)
        rounds = []
        for _ in range(self._config.rounds if self.band is None else self._looks):
            number = self._rounds[url] = self._rounds.get(url, 0) + 1
            requests = [Request(p, sampling, seed=number * 1000 + i) for i, p in enumerate(self._prompts)]
            rounds.append(client.sample(url, requests))
        return rounds

    def judge(self, url: str, rounds: Sequence[Sequence[Completion]], params: Any) -> Difference:
        """Compares what :meth:`sample` returned with the trainer's ``params``. The first call sets the band.

        It returns the worst of the rounds that set the band, and later the best. It raises VerificationError where that
        one is out of the band, or at the first call above the dtype's ceiling.
        """
        name, limit = ("ceiling", self._ceiling) if self.band is None else ("band", self.band)
        measured = [self._difference(sampled, params) for sampled in rounds]
        decides = (max if self.band is None else min)(measured, key=lambda d: d.mean if np.isfinite(d.mean) else np.inf)
        if not decides.mean <= limit:
            prompts = ", ".join(f"{gap:.3g}" for gap in decides.per_prompt)
            raise VerificationError(
                f"{url} does not sample from the trainer's weights: mean |server - trainer| over "
                f"{self._config.prompts * self._config.tokens} probe tokens is {decides.mean:.3g} nats (largest "
                f"{decides.largest:.3g}; by prompt {prompts}), the {name} for {self._dtype} is {limit:.3g}"
            )
        if self.band is None:
            self.band = min(self._ceiling, max(self._floor, self._config.factor * decides.mean))
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
