"""The likeliest tokens of a response as arrays: read from a reply, checked, and joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.types import SamplingParams, Tops

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


def make_tops(counts: Iterable[int], ids: Iterable[int], logprobs: Iterable[float], k: int) -> Tops:
    """Returns the ``k`` likeliest of the tokens that a server reports at each position. No Python runs for each token.

    ``counts`` has the number of reported tokens at each position. The other two have their ids and log-probabilities
    (nats), position by position. The first one of a position, the sampled token, may be there twice. Of tokens with
    equal log-probabilities the one that is reported first is taken.
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
    kept, kept_scores = tokens[:, -k:].copy(), scores[:, -k:].copy()
    rows = np.arange(len(tokens))  # those whose last k entries are not the likeliest in order
    if width == k + 1:  # the usual form of a reply: the sampled token, and then the likeliest in order
        is_likely = ~is_twice & (scores[:, 0] >= scores[:, -1])
        rows = np.flatnonzero(is_likely | (scores[:, 2:] > scores[:, 1:-1]).any(axis=1))
    of_rows = scores[rows]
    of_rows[is_twice[rows], 0] = -np.inf
    kept[rows], kept_scores[rows] = _first_of(tokens[rows], of_rows, k)
    is_none = kept_scores <= _NEVER
    kept[is_none], kept_scores[is_none] = -1, -np.inf
    return Tops(kept, kept_scores)


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


def join_tops(parts: Sequence[Tops | None]) -> Tops | None:
    """Returns the likeliest tokens of a response, joined from its parts, or None if a part has none."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    return Tops(np.concatenate([part.ids for part in there]), np.concatenate([part.logprobs for part in there]))


def without_ties(logprobs: np.ndarray, tops: Tops) -> tuple[np.ndarray, Tops]:
    """Normalises log-probabilities over the reported tokens at positions where a server has kept ties.

    vLLM's build for a CPU keeps every token that ties with the last one of ``top_k``. So it could sample more tokens
    than it reports. A position is changed only if its missing probability is that of a few such ties. Takes and returns
    the log-probabilities of the sampled tokens, float32 [t], and the reported tokens with theirs.
    """
    mass = _masses(tops)
    with np.errstate(divide="ignore", invalid="ignore"):
        ties = (1.0 - mass) / np.exp(tops.logprobs[:, -1], dtype=np.float64)
        is_tied = (1.0 - mass > ROUNDING) & (np.abs(ties - np.rint(ties)) < 0.05) & (ties < _TIES + 0.5)
    if not is_tied.any():
        return logprobs, tops
    excess = np.where(is_tied, np.log(mass), 0.0).astype(np.float32)
    return logprobs - excess, Tops(tops.ids, tops.logprobs - excess[:, None])


def check_tops(
    url: str,
    tops: Tops | None,
    tokens: np.ndarray,
    logprobs: np.ndarray,
    sampling: SamplingParams,
    vocab_size: int | None,
) -> None:
    """Raises ReplyError if the likeliest tokens do not fit the distribution that ``tokens`` were sampled from.

    There is at least one sampled token. Messages name the server ``url``. Every token id is below ``vocab_size``, or
    that is None: it is not known.
    """
    shape = len(tokens), sampling.reported
    if tops is None or tops.ids.shape != shape or tops.logprobs.shape != shape:
        got = None if tops is None else (tops.ids.shape, tops.logprobs.shape)
        raise ReplyError(f"{url} gave likeliest tokens of shape {got}, expected {shape}")
    is_there, is_sampled = tops.ids >= 0, tops.ids == tokens[:, None]
    if tops.ids.min() < -1 or (vocab_size is not None and tops.ids.max() >= vocab_size):
        raise ReplyError(
            f"{url} gave likeliest tokens from {tops.ids.min()} to {tops.ids.max()}, outside the vocabulary"
        )
    if (is_there != np.isfinite(tops.logprobs)).any() or (tops.logprobs[:, 1:] > tops.logprobs[:, :-1]).any():
        raise ReplyError(
            f"{url} gave likeliest tokens that are not in order, or whose log-probabilities are not finite"
        )
    mass, among = _masses(tops), is_sampled.any(axis=1)
    if mass.max() > 1.0 + ROUNDING:
        raise ReplyError(f"{url} gave likeliest tokens whose probabilities sum to {mass.max():.4f}, expected at most 1")
    gaps = np.abs(np.where(is_sampled, tops.logprobs - logprobs[:, None], 0.0)).max()
    left_out = np.where(among, -np.inf, logprobs - tops.logprobs[:, -1]).max()
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


def _masses(tops: Tops) -> np.ndarray:
    """Returns the sum of the reported tokens' probabilities at each position, float64 [t]."""
    return np.exp(tops.logprobs).sum(axis=1, dtype=np.float64)
