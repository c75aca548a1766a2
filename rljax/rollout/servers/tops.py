"""The likeliest tokens of a response as arrays: read from a reply, checked, and joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.types import SamplingParams
from rljax.tokens import TOPS, T, TokenRecord, blank

ROUNDING = 1e-3
"""The largest error of a log-probability (nats), or of a sum of probabilities, that counts as rounding."""
_NEVER = -9999.0  # vLLM's value for the logarithm of 0. SGLang's value is lower.
_TIES = 16  # The most tokens beyond ``top_k`` that a server may keep because they tie with the last one.


def as_floats(values: Iterable[float]) -> np.ndarray:
    """Returns log-probabilities as float32 [n]. A number beyond float32 becomes infinite."""
    if isinstance(values, np.ndarray) and values.dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        return np.fromiter(values, np.float64).astype(np.float32)


def make_tops(
    counts: Iterable[int], ids: Iterable[int], logprobs: Iterable[float], k: int, before: int = 0
) -> dict[str, np.ndarray]:
    """Returns ``top_ids`` and ``top_logprobs`` [t, k], the ``k`` likeliest of the tokens that a server reports.

    ``counts`` has the number of reported tokens at each position. The other two have their ids and log-probabilities
    (nats), position by position. The first one of a position, the sampled token, may be there twice. Of tokens with
    equal log-probabilities the one that is reported first is taken. The first ``before`` entries of the result are
    fills, for the prompt's tokens. No Python runs for each token.
    """
    numbers = _as_integers(counts, np.int64)
    width = max(int(numbers.max(initial=0)), k)
    tokens, scores = _as_integers(ids, np.int32), as_floats(logprobs)
    if (numbers == width).all():
        tokens, scores = tokens.reshape(-1, width), scores.reshape(-1, width)
    else:
        is_reported = np.arange(width) < numbers[:, None]
        tokens, scores = (_spread(values, is_reported, gap) for values, gap in ((tokens, -1), (scores, -np.inf)))
    is_twice = (tokens[:, 1:] == tokens[:, :1]).any(axis=1)
    whole = {name: blank(name, before + len(tokens), np.zeros((0, k))) for name in TOPS}
    kept, kept_scores = (whole[name][before:] for name in TOPS)
    kept[:], kept_scores[:] = tokens[:, -k:], scores[:, -k:]
    rows = np.arange(len(tokens))  # those whose last k entries are not the likeliest in order
    if width == k + 1:  # the usual form of a reply: the sampled token, and then the likeliest in order
        is_likely = ~is_twice & (scores[:, 0] >= scores[:, -1])
        rows = np.flatnonzero(is_likely | (scores[:, 2:] > scores[:, 1:-1]).any(axis=1))
    of_rows = scores[rows]
    of_rows[is_twice[rows], 0] = -np.inf
    kept[rows], kept_scores[rows] = _first_of(tokens[rows], of_rows, k)
    is_none = kept_scores <= _NEVER
    kept[is_none], kept_scores[is_none] = -1, -np.inf
    return whole


def _spread(values: np.ndarray, is_reported: np.ndarray, gap: float) -> np.ndarray:
    """Returns the values at the true places of ``is_reported``, in order, and ``gap`` at all others."""
    spread = np.full(is_reported.shape, gap, values.dtype)
    spread[is_reported] = values
    return spread


def _first_of(tokens: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ``k`` entries of each row with the highest scores, in order."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(tokens, order, axis=1), np.take_along_axis(scores, order, axis=1)


def _as_integers(values: Iterable[int], dtype: Any) -> np.ndarray:
    return values.astype(dtype) if isinstance(values, np.ndarray) else np.fromiter(values, dtype)


def without_ties(reply: T) -> T:
    """Normalises log-probabilities over the reported tokens at positions where a server has kept ties.

    vLLM's build for a CPU keeps every token that ties with the last one of ``top_k``. So it could sample more tokens
    than it reports. A position is changed only if its missing probability is that of a few such ties.
    """
    tops = reply["top_logprobs"]
    mass = _masses(tops)
    with np.errstate(divide="ignore", invalid="ignore"):
        ties = (1.0 - mass) / np.exp(tops[:, -1], dtype=np.float64)
        is_tied = (1.0 - mass > ROUNDING) & (np.abs(ties - np.rint(ties)) < 0.05) & (ties < _TIES + 0.5)
    if not is_tied.any():
        return reply
    excess = np.where(is_tied, np.log(mass), 0.0).astype(np.float32)
    logprobs = reply["rollout_logprobs"] - excess
    return reply.add({"rollout_logprobs": logprobs, "top_logprobs": tops - excess[:, None]})


def check_tops(url: str, reply: TokenRecord, sampling: SamplingParams, vocab_size: int | None) -> None:
    """Raises ReplyError if the likeliest tokens do not fit the distribution that the response was sampled from.

    There is at least one sampled token. Messages name the server ``url``. Every token id is below ``vocab_size``, or
    that is None: it is not known.
    """
    tokens, logprobs, shape = reply.response, reply["rollout_logprobs"], (len(reply.response), sampling.reported)
    if "top_ids" not in reply.columns or reply["top_ids"].shape != shape:
        got = reply["top_ids"].shape if "top_ids" in reply.columns else None
        raise ReplyError(f"{url} gave likeliest tokens of shape {got}, expected {shape}")
    ids, tops = reply["top_ids"], reply["top_logprobs"]
    is_there, is_sampled = ids >= 0, ids == tokens[:, None]
    if ids.min() < -1 or (vocab_size is not None and ids.max() >= vocab_size):
        raise ReplyError(f"{url} gave likeliest tokens from {ids.min()} to {ids.max()}, outside the vocabulary")
    if (is_there != np.isfinite(tops)).any() or (tops[:, 1:] > tops[:, :-1]).any():
        raise ReplyError(
            f"{url} gave likeliest tokens that are not in order, or whose log-probabilities are not finite"
        )
    mass, among = _masses(tops), is_sampled.any(axis=1)
    if mass.max() > 1.0 + ROUNDING:
        raise ReplyError(f"{url} gave likeliest tokens whose probabilities sum to {mass.max():.4f}, expected at most 1")
    gaps = np.abs(np.where(is_sampled, tops - logprobs[:, None], 0.0)).max()
    left_out = np.where(among, -np.inf, logprobs - tops[:, -1]).max()
    if gaps > ROUNDING or left_out > ROUNDING:
        gap = max(gaps, left_out)
        raise ReplyError(f"{url} gave log-probabilities of sampled tokens {gap:.3g} nats from their likeliest tokens'")
    _check_support(url, mass, is_there, among, is_cut=sampling.top_k > 0)


def _check_support(url: str, mass: np.ndarray, is_there: np.ndarray, among: np.ndarray, *, is_cut: bool) -> None:
    """Raises ReplyError if too few tokens are reported: not k of a whole distribution, or not all of a cut one."""
    is_whole = mass >= 1.0 - ROUNDING
    if not (is_whole | is_there.all(axis=1)).all():
        fewest = int(is_there.sum(axis=1)[~is_whole].min())
        raise ReplyError(f"{url} gave {fewest} likeliest tokens at a position, expected {is_there.shape[1]}")
    if is_cut and not (is_whole & among).all():
        lowest = float(mass.min())
        raise ReplyError(
            f"{url} did not report all tokens that it could sample: the {is_there.shape[1]} likeliest have probability "
            f"{lowest:.4f}, expected 1 with rollout.top_k (vLLM: --logprobs-mode processed_logprobs; a head in 16 bits "
            "has ties, which precision.lm_head_dtype = float32 avoids)"
        )


def _masses(tops: np.ndarray) -> np.ndarray:
    """Returns the sum of the reported tokens' probabilities at each position, float64 [t]."""
    return np.exp(tops).sum(axis=1, dtype=np.float64)
