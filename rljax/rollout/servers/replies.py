"""Replies of servers: spans of versions, likeliest tokens as arrays, and the checks of a completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from rljax.errors import OtherPromptError, ReplyError
from rljax.policy.config import route_dtype
from rljax.rollout.servers.requests import Completion, Request
from rljax.rollout.types import SamplingParams
from rljax.tokens import TOPS, T, TokenRecord, as_stored, blank

ROUNDING = 1e-3
"""The largest error of a log-probability (nats), or of a sum of probabilities, that counts as rounding."""
_NEVER = -9999.0  # vLLM's value for the logarithm of 0, and its own endpoint's for NaN. SGLang's value is lower.
_TIES = 16  # The most tokens beyond ``top_k`` that a server may keep because they tie with the last one.


class Span(msgspec.Struct):
    """The tokens of a response, from ``start`` up to but not including ``end``, that one weight version sampled."""

    version: str
    start: int
    end: int


def as_spans(spans: Iterable[Span] | None) -> tuple[tuple[str, int, int], ...] | None:
    """Returns the spans of a reply as ``Completion.spans`` has them, or None if there are none."""
    return tuple((span.version, span.start, span.end) for span in spans or ()) or None


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

    ``counts`` has the number of reported tokens at each position. ``ids`` and ``logprobs`` (nats) list these tokens,
    position by position. The first token of a position, which was sampled, may be there twice. Of tokens with equal
    log-probabilities the one that is reported first is taken. The first ``before`` entries of the result are fills, for
    the prompt's tokens. No Python runs for each token.
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
    order = np.argsort(-of_rows, axis=1, kind="stable")[:, :k]  # the highest scores first
    kept[rows], kept_scores[rows] = (np.take_along_axis(x, order, axis=1) for x in (tokens[rows], of_rows))
    is_none = kept_scores <= _NEVER
    kept[is_none], kept_scores[is_none] = -1, -np.inf
    return whole


def _spread(values: np.ndarray, is_reported: np.ndarray, gap: float) -> np.ndarray:
    """Returns an array with ``values``, in order, where ``is_reported`` is true, and with ``gap`` elsewhere."""
    spread = np.full(is_reported.shape, gap, values.dtype)
    spread[is_reported] = values
    return spread


def _as_integers(values: Iterable[int], dtype: Any) -> np.ndarray:
    return values.astype(dtype) if isinstance(values, np.ndarray) else np.fromiter(values, dtype)


def without_ties(reply: T) -> T:
    """Returns the reply, its log-probabilities normalised over the reported tokens where a server has kept ties.

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

    The response must have a token. Messages name the server ``url``. Every token id must be below ``vocab_size``;
    None: it is not known.
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
    """Raises ReplyError if too few tokens are reported: fewer than k, or not all tokens of a cut distribution."""
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


def check_own_prompt(route: str, is_own: bool) -> None:
    """Raises OtherPromptError unless ``is_own``: the reply of ``route`` answers the prompt of its request."""
    if not is_own:
        raise OtherPromptError(f"{route} gave the reply to another prompt than the request has")


def make_completion(
    route: str,
    request: Request,
    tokens: np.ndarray,
    arrays: dict[str, np.ndarray],
    *,
    are_others: bool,
    experts: np.ndarray | None = None,
    **facts: Any,
) -> Completion:
    """Returns the completion of a reply of ``route`` to ``request``. Raises ReplyError if an array does not fit it.

    Args:
      route: The path at the server, with which messages begin.
      request: The request that the reply answers.
      tokens: The sampled tokens, int32 [r].
      arrays: The arrays for :meth:`TokenRecord.add`, ``rollout_logprobs`` among them.
      are_others: A mark that the log-probabilities are of other tokens, which only an aborted reply may have.
      experts: The experts of all tokens but the last, unsigned integers [s + r - 1, layers, k], or None.
      facts: The other fields of the completion, by name.
    """
    count, scored = len(tokens), len(arrays["rollout_logprobs"])
    if scored != count or (are_others and facts["finish_reason"] != "abort"):
        raise ReplyError(f"{route} gave {count} tokens and log-probabilities of {scored} others")
    if "top_ids" in arrays and len(arrays["top_ids"]) != len(request.prompt) + count:
        got, k = len(arrays["top_ids"]) - len(request.prompt), request.sampling.reported
        raise ReplyError(f"{route} gave likeliest tokens of shape {(got, k)}, expected {(count, k)}")
    if experts is not None and request.routes is not None:
        layers, k, most = request.routes
        shape = len(request.prompt) + count - 1, layers, k
        if experts.shape != shape or experts.dtype.kind != "u":
            said = f"expected unsigned integers {shape}"
            raise ReplyError(f"{route} gave routes {experts.dtype} {experts.shape}, {said}")
        if experts.max(initial=0) >= most:
            raise ReplyError(f"{route} gave the expert number {experts.max()}, expected at most {most - 1}")
        arrays = {**arrays, "routes": as_stored(experts.astype(route_dtype(most), copy=False))}
    return Completion.of(request.prompt, tokens, arrays, **facts)


def check_completion(
    url: str, completion: Completion, request: Request, vocab_size: int | None, *, may_be_part: bool = False
) -> None:
    """Raises ReplyError if a completion cannot be the answer to ``request``, so that no step trains on it.

    Messages name the server ``url``. Every token id must be below ``vocab_size``; None: it is not known.
    ``may_be_part``: Whether the server may have given the response up after any number of tokens.
    """
    tokens, finish = completion.response, completion.finish_reason
    longest = request.sampling.max_response_tokens
    is_part = may_be_part and finish == "abort"
    if not is_part and finish not in ("stop", "length"):
        raise ReplyError(f"{url} ended a response with {finish!r}")
    count, logprobs = len(tokens), completion["rollout_logprobs"]
    if not (0 if is_part else 1) <= count <= longest - is_part:
        raise ReplyError(f"{url} gave {count} tokens and {count} log-probabilities, asked for 1 to {longest}")
    if is_part and not count:
        return
    if tokens.min() < 0 or (vocab_size is not None and tokens.max() >= vocab_size):
        raise ReplyError(f"{url} gave token ids from {tokens.min()} to {tokens.max()}, outside the vocabulary")
    stops = np.isin(tokens, request.sampling.stop_token_ids)
    if stops[:-1].any() or (finish == "stop" and not stops[-1]) or (is_part and stops[-1]):
        raise ReplyError(f"{url} ended a response of {len(tokens)} tokens with {finish!r}, not at its first stop token")
    if finish == "length" and len(tokens) != longest:
        raise ReplyError(f"{url} ended a response at {len(tokens)} tokens, its limit was {longest}")
    of_prompt = [value for top in completion.prompt_logprobs for value in top.values()]
    reported = np.concatenate([logprobs, np.array(of_prompt, np.float64)])
    is_none = ~np.isfinite(reported)
    is_none[:count] |= logprobs <= _NEVER
    if is_none.any():
        raise ReplyError(f"{url} gave a log-probability of {reported[is_none][0]}")
    if reported.max() > ROUNDING:
        raise ReplyError(
            f"{url} gives logits (a log-probability of {reported.max():.3g}): it must give log-probabilities of the "
            "distribution sampled from (vLLM: --logprobs-mode processed_logprobs)"
        )
    places = [0, *(place for _, start, end in completion.spans or () for place in (start, end)), len(tokens)]
    if completion.spans is not None and (places[::2] != places[1::2] or sorted(set(places)) != places[::2]):
        raise ReplyError(f"{url} gave weight versions of other tokens: {completion.spans}, of {len(tokens)}")
    if request.sampling.reported:
        check_tops(url, completion, request.sampling, vocab_size)
    if request.routes is not None and "routes" not in completion.columns:
        raise ReplyError(f"{url} does not report the experts of its tokens (vLLM: --enable-return-routed-experts)")
