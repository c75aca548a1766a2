"""The proof that a server samples from the trainer's weights. It has two halves, and a server must give both.

*Bits*: the server's workers return the checksum of every tensor as it was loaded. Each must equal the trainer's.

*Use*: a fixed set of probe prompts is sent before an update, so that the server caches them. Each is whole blocks of
its prefix cache and a few more tokens. After the update the server *generates* from them (``prompt_logprobs`` would
bypass the cache). The log-probabilities of the sampled tokens are compared with the trainer's. Keys and values of old
weights, a head that was not repacked and a broken kernel show here and hardly elsewhere. The first round has half of
the probes, and may be out of the band by chance. So a whole round with other prompts and tokens decides.

A server that rounds to 8 bits is far from the trainer by its rounding alone, which would hide old keys and values. So
it also scores its tokens a second time, as a prompt. It rounds as before, but reads nothing from the cache. The two
scores are compared with each other, in a narrower band. Old keys and values move nearly all probes, and other causes
only a few. So the lower tercile of the probes' distances is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.errors import VerificationError
from rljax.rollout.servers.process import TOP
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.types import SamplingParams, VerifyConfig

Score = Callable[[Any, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""A function from the policy's pytree and token sequences to the log-probabilities of each one's tokens (nats)."""

LOOKS = 2
"""The number of times that a server's probes must fail, one after the other, before the server is refused."""
ROUNDS = 3
"""The number of rounds of probes at the first publish, from which the band is made."""
FLOORS = {"bfloat16": 2e-2, "float16": 2.5e-3, "float32": 1e-5}
"""The lowest band of each dtype (nats): mean distances up to it always pass. The mismatch of equal weights changes as a
policy learns. A tiny random model showed 1.2e-2 in bfloat16, 1.6e-3 in float16 and 9e-7 in float32."""
CEILINGS = {"bfloat16": 8e-2, "float16": 1e-2, "float32": 1e-3}
"""The highest band of each dtype (nats). A server whose mean distance is larger is always refused."""
MIXTURE_FACTOR = 3.0
"""The highest band of a mixture of experts, as a multiple of the one of other models. It is wider because different
rounding in server and trainer sends some tokens to other experts."""
ROUNDED_BAND = 0.1, 0.6
"""The lowest and the highest band of a server that rounds weights or cache to 8 bits, in every dtype (nats)."""
OWN_FLOOR = 1e-3
"""The lowest band of the distance between the two scores of a server that rounds to 8 bits (nats)."""
TAIL_PROMPTS = 16
"""The fewest probes of a round where a few tokens may be far off: with a mixture of experts, with a server that rounds
to 8 bits, and with random tokens."""
ROUNDED_TOKENS = 16
"""The fewest tokens that a server with 8 bits generates from a probe. With fewer, more old caches pass."""
_CACHED = 32  # The fewest tokens of a probe that a server can cache. A cache may have blocks of one token.
_FRESH = 16  # The tokens of a probe after that. Computed with new weights from old keys, they show these better than 8.


@dataclass(frozen=True)
class Look:
    """The completions that a server generated from the probes of one round."""

    completions: Sequence[Completion]
    # The replies with the server's scores of the same tokens as prompts. It is empty if nothing is rounded.
    again: Sequence[Completion] = ()


@dataclass(frozen=True)
class ProbeDifference:
    """The distance |server - trainer| of log-probabilities over the sampled probe tokens (nats)."""

    mean: float  # the mean over all tokens, which may be NaN
    largest: float  # the largest distance of a token
    per_prompt: tuple[float, ...]  # the mean of each probe
    # The distance between the server's two scores of these tokens. A third of the probes have a smaller distance. It
    # is 0 if nothing is rounded.
    own: float = 0.0


def limits(dtype: str, *, mixture: bool = False, rounded: bool = False) -> tuple[float, float]:
    """Returns the lowest and highest band (nats) of a server in ``dtype``.

    ``mixture``: Whether the model is a mixture of experts. ``rounded``: Whether weights or cache have 8 bits.
    """
    lowest, highest = ROUNDED_BAND if rounded else (FLOORS[dtype], CEILINGS[dtype])
    return lowest, highest * (MIXTURE_FACTOR if mixture else 1.0)


def probe_lengths(block_size: int, *, rounded: bool = False) -> tuple[int, int]:
    """Returns the number of a probe's tokens in whole cache blocks, and the length of the probe.

    There are at least 32 tokens in blocks, and 16 more. ``rounded``: Whether the server rounds weights or cache to 8
    bits. A probe then is two blocks and a third, or 32 tokens if that is more, so that an old LM head is noticed.
    """
    if rounded:
        return 2 * block_size, max(2 * block_size + max(block_size // 3, 1), _CACHED)
    cached = -(-_CACHED // block_size) * block_size
    return cached, cached + _FRESH


def probe_tokens(config: VerifyConfig, *, rounded: bool) -> int:
    """Returns the number of tokens that a server generates from a probe. ``rounded`` is as in ``probe_lengths``."""
    return max(config.tokens, ROUNDED_TOKENS) if rounded else config.tokens


def random_prompts(shape: tuple[int, int], vocab_size: int) -> list[np.ndarray]:
    """Returns ``shape[0]`` prompts of ``shape[1]`` random token ids below ``vocab_size``, int32."""
    return list(np.random.default_rng(0).integers(0, vocab_size, size=shape).astype(np.int32))


def joined_prompts(prompts: Sequence[np.ndarray], shape: tuple[int, int]) -> list[np.ndarray]:
    """Returns ``shape[0]`` probes of ``shape[1]`` token ids, int32. Each ends with one of ``prompts``.

    If the prompt is shorter than a probe, other prompts stand before it. If it is longer, its beginning is cut off.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(shape[0]):
        tokens = np.zeros(0, np.int32)
        while len(tokens) < shape[1]:
            tokens = np.concatenate([prompts[int(rng.integers(len(prompts)))], tokens])
        found.append(tokens[-shape[1] :].astype(np.int32))
    return found


async def sharpening(server: Remote, vocab_size: int, temperature: float) -> float:
    """Returns the ratio of the gaps between the likeliest tokens' log-probabilities at ``temperature`` to those at 1.

    The ratio is 1 / temperature if a server reports the distribution that it samples from. It is 1 if it reports the
    distribution before the temperature. It is NaN if a gap is not finite, or all log-probabilities at 1 are equal.
    """
    prompts = random_prompts((8, 4), vocab_size)
    how = [SamplingParams(1, t, reported=min(TOP, vocab_size)) for t in (1.0, temperature)]
    asked = [[Request(prompt, each, seed=1, vocab_size=vocab_size) for prompt in prompts] for each in how]
    replies = [await server.sample(requests) for requests in asked]
    gaps = np.zeros(2)
    for pair in zip(*replies, strict=True):
        tops = np.concatenate([reply["top_logprobs"][:1] for reply in pair])  # in the same order at both temperatures
        tops = tops[:, ~np.isneginf(tops).any(axis=0)]  # without tokens that a server leaves out
        if len(tops) == 2 and tops.size:
            gaps += np.ptp(tops, axis=1)
    return float(gaps[1] / gaps[0]) if np.isfinite(gaps).all() and gaps[0] > 0 else float("nan")


class Verifier:
    """The probes of the second half (*use*), and the band: the largest mean distance that passes."""

    def __init__(
        self,
        config: VerifyConfig,
        score: Score,
        info: ServerInfo,
        *,
        dtype: str,
        mixture: bool = False,
        prompts: Sequence[np.ndarray] = (),
    ) -> None:
        """Makes the probe prompts for the vocabulary, cache blocks and number formats that ``info`` describes.

        ``score`` computes the trainer's log-probabilities in the rollout dtype at temperature 1. ``dtype`` is the
        rollout dtype, which chooses the bands. They are wider for a ``mixture`` of experts. The probes are made from
        ``prompts`` of the run, int32 [s] each, or without any from random tokens.
        """
        assert info.vocab_size is not None
        assert info.block_size is not None
        self._config, self._score, self._info, self.block_size = config, score, info, info.block_size
        self._dtype, self._is_rounded = dtype, info.form.is_rounded
        self._tokens = probe_tokens(config, rounded=self._is_rounded)
        self._floor, self._ceiling = limits(dtype, mixture=mixture, rounded=self._is_rounded)
        has_tail = mixture or self._is_rounded or not prompts  # whether single tokens may be far off
        self._probes = max(config.prompts, TAIL_PROMPTS) if has_tail else config.prompts  # the probes of one look
        self._first = self._probes if has_tail else -(-self._probes // 2)  # the probes of the first look of a publish
        self._cached, length = probe_lengths(info.block_size, rounded=self._is_rounded)
        shape = (LOOKS * self._probes, length)
        self._prompts = joined_prompts(prompts, shape) if prompts else random_prompts(shape, info.vocab_size)
        self.band: float | None = None  # the largest mean that passes (nats); None before the first verification
        # The largest ``own`` that passes (nats); None before the first verification, and if no server rounds.
        self.own_band: float | None = None
        self._rounds: dict[str, int] = {}  # the number of looks that each server has sampled, by URL

    async def warm(self, server: Remote) -> None:
        """Makes the server cache the whole blocks of all probes, under the weights that it has now.

        One more token is sent, because a server computes at least the last token of a prompt.
        """
        requests = [Request(prompt[: self._cached + 1], SamplingParams(1)) for prompt in self._prompts]
        await server.sample(requests)

    async def sample(self, server: Remote, *, whole: bool = False) -> list[Look]:
        """Makes the server generate from the probes: ``ROUNDS`` rounds while there is no band, and one afterwards.

        The one round has half of the probes, or all of them if ``whole`` or if single tokens may be far off.
        """
        if self.band is None:
            return [await self.look(server) for _ in range(ROUNDS)]
        return [await self.look(server, None if whole else self._first)]

    async def look(self, server: Remote, probes: int | None = None) -> Look:
        """Makes the server generate from the probes of one round, or from the first ``probes`` of them.

        Consecutive rounds have other prompts.
        """
        number = self._rounds[server.url] = self._rounds.get(server.url, 0) + 1
        prompts, sampling = self._prompts[number % LOOKS :: LOOKS][:probes], SamplingParams(self._tokens)
        requests = [Request(p, sampling, seed=number * 1000 + i) for i, p in enumerate(prompts)]
        completions, again = await server.sample(requests), list[Completion]()
        if self._is_rounded:
            again = await server.sample([Request(c.ids, SamplingParams(1), prompt_logprobs=0) for c in completions])
        return Look(completions, again)

    def judge(
        self, url: str, looks: Sequence[Look], params: Any, again: Callable[[], Sequence[Look]]
    ) -> ProbeDifference:
        """Compares rounds of the server at ``url`` with the trainer's ``params``. The first call sets the band.

        If the worst round is out of the band, ``again`` makes the server sample again. At the first call the highest
        band is the limit. Returns the difference that passed. Raises VerificationError if the new rounds fail, too.
        """
        limit = self._ceiling if self.band is None else self.band
        own_limit = self._ceiling if self.own_band is None else self.own_band
        measured = [self._worst(looks, params)]
        while not (measured[-1].mean <= limit and measured[-1].own <= own_limit):
            if len(measured) == LOOKS:
                raise VerificationError(self._said(url, measured))
            measured.append(self._worst(again(), params))
        if self.band is None:
            self.band = self._band(measured[-1].mean, self._floor)
            if self._is_rounded:
                self.own_band = self._band(measured[-1].own, OWN_FLOOR)
        return measured[-1]

    def difference(self, look: Look, params: Any) -> ProbeDifference:
        """Returns the distance between the server's log-probabilities in a round and those of ``params``."""
        scored = self._score(params, [sampled.ids for sampled in look.completions])
        gaps = [
            np.abs(np.asarray(logprobs, np.float32)[s.prompt_length : len(s.ids)] - s["rollout_logprobs"])
            for s, logprobs in zip(look.completions, scored, strict=True)
        ]
        together = np.concatenate(gaps)
        own = [_own_gap(*each) for each in zip(look.completions, look.again, strict=bool(look.again))]
        per_prompt = tuple(float(gap.mean()) for gap in gaps)
        return ProbeDifference(float(together.mean()), float(together.max()), per_prompt, lower_third(own))

    def _worst(self, looks: Sequence[Look], params: Any) -> ProbeDifference:
        """Returns the difference of the round with the largest mean, with the largest ``own`` of all rounds."""
        measured = [self.difference(look, params) for look in looks]
        worst = measured[int(np.argmax([each.mean for each in measured]))]  # NaN counts as the largest
        return dataclasses.replace(worst, own=float(np.max([each.own for each in measured])))

    def _band(self, measured: float, floor: float) -> float:
        """Returns the band, at least ``floor``, of a server whose worst calibration round was ``measured`` (nats)."""
        return min(self._ceiling, max(floor, self._config.factor * measured))

    def _said(self, url: str, measured: Sequence[ProbeDifference]) -> str:
        """Returns the message of a failure: the mean of each round, the server's dtypes and the limits."""
        info, name = self._info, f"{self._dtype} with {self._info.form}" if self._is_rounded else self._dtype
        means = ", then ".join(f"{each.mean:.3g}" for each in measured)
        prompts = ", ".join(f"{gap:.3g}" for gap in measured[-1].per_prompt)
        limit = f"the ceiling for {name} is {self._ceiling:.3g}"
        if self.band is not None:
            limit = (
                f"the band for {name} is {self.band:.3g} (rollout.verify.factor {self._config.factor:g} x the first "
                f"publish, at least {self._floor:g}, at most {self._ceiling:.3g})"
            )
        if self._is_rounded:
            own = ", then ".join(f"{each.own:.3g}" for each in measured)
            most = self._ceiling if self.own_band is None else self.own_band
            limit += (
                f"; its own scores of these tokens without its prefix cache differ by {own} nats, at most {most:.3g} "
                "are expected: above that its cache may hold keys and values of older weights"
            )
        return (
            f"{url} holds the trainer's weights, by their checksums, but does not sample from them: "
            f"mean |server - trainer| over {self._probes * self._tokens} probe tokens is {means} nats "
            f"(largest {measured[-1].largest:.3g}; by prompt {prompts}); the server has dtype {info.dtype}, LM head "
            f"{info.head_dtype or 'unknown'}, {info.form}; {limit}"
        )


def lower_third(gaps: Sequence[float]) -> float:
    """Returns the lower tercile of the gaps; 0 without gaps, and NaN if a gap is not finite."""
    if not np.isfinite(gaps).all():
        return float("nan")
    return sorted(gaps)[len(gaps) // 3] if gaps else 0.0


def _own_gap(sampled: Completion, scored: Completion) -> float:
    """Returns the mean distance between a response's two scores: as it was generated, and as a part of a prompt (nats).

    It is NaN if the second score lacks a token.
    """
    pairs = zip(sampled.response.tolist(), scored.prompt_logprobs[sampled.prompt_length :], strict=True)
    again = [found.get(token, np.nan) for token, found in pairs]
    return float(np.mean(np.abs(sampled["rollout_logprobs"] - np.array(again, np.float32))))
