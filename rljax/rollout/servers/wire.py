"""Requests to an HTTP server and its replies as plain data, for every kind of server."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from rljax.errors import OtherPromptError, ReplyError
from rljax.policy.config import route_dtype
from rljax.rollout.form import ServerForm
from rljax.rollout.servers.tops import ROUNDING, check_tops
from rljax.rollout.types import SamplingParams
from rljax.tokens import TokenRecord, as_stored, join


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    prompt: np.ndarray  # the token ids, int32 [s]
    sampling: SamplingParams
    seed: int | None = None  # the seed of this one response; None leaves the choice to the server
    # The number of likeliest tokens whose log-probabilities are reported at each position of the prompt, besides the
    # prompt's own token. They are those at temperature 1. None: nothing is reported of the prompt.
    prompt_logprobs: int | None = None
    routes: tuple[int, int, int] | None = None  # the (layers, k, experts) of a mixture whose routes are reported
    vocab_size: int | None = None  # the most tokens that the server can report at a position; None: not known
    # Further sampling settings in the server's own words, which make it decode given tokens.
    forced: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Completion(TokenRecord):
    """One sampled response as the server reports it. Fields that were not asked for are empty."""

    finish_reason: str = ""  # "stop", "length", or "abort" if the server gave the response up
    spans: tuple[tuple[str, int, int], ...] | None = None  # the (weight version tag, start, end) of each part
    # The log-probabilities by token id at each position of the prompt, its own token among them; {} at position 0.
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True)
class ServerInfo:
    """The description that a server gives of itself. An empty string or None means that it is not known."""

    url: str
    model: str = ""  # the name that the server gives its model
    root: str = ""  # the model directory that the server was started with, as the server names it
    version: str = ""  # the version of the server's software
    dtype: str = ""  # the dtype of weights and activations
    vocab_size: int | None = None  # the size of the vocabulary: every token id is smaller
    max_model_len: int | None = None  # the longest prompt plus response (tokens)
    block_size: int | None = None  # the size of a block of the prefix cache (tokens)
    head_dtype: str = ""  # the dtype in which the LM head computes
    form: ServerForm = field(default_factory=ServerForm)  # the form in which the server holds weights and cache
    has_first_weights: bool = False  # whether the server still has the weights of ``root`` that it was started with


class Wire(Protocol):
    """The requests and replies of one kind of server, without any I/O."""

    name: str  # the name of the kind in messages
    routes: Sequence[str]  # the paths that may sample a response, the best first; a server has at least one of them
    own_routes: Sequence[str]  # better paths, of rljax's plugin: a server may lack them, and no router passes them on
    model: str  # the name of the model at servers that rljax starts
    paused_route: str  # the path at which a server says whether it is paused, or "" if there is none

    def body(self, route: str, request: Request, model: str) -> dict[str, Any]:
        """Returns the JSON body of ``request`` for ``route``, at a server that calls its model ``model``."""

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads the bytes of a reply of ``route`` to ``request``.

        It runs on the event loop or on another thread, once for each response. So no Python may run for each token
        of the response. It raises ReplyError if the reply is not a completion. The message begins with ``route``.
        """


class Span(msgspec.Struct):
    """A part of a response in a reply: the tokens from ``start`` up to but not including ``end``."""

    version: str
    start: int
    end: int


def as_spans(spans: Iterable[Span] | None) -> tuple[tuple[str, int, int], ...] | None:
    """Returns the spans of a reply as ``Completion.spans`` has them, or None if there are none."""
    return tuple((span.version, span.start, span.end) for span in spans or ()) or None


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
    """Returns the completion of a reply of ``route`` to ``request``. Raises ReplyError if an array is of other tokens.

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


def make_requests(
    prompts: Sequence[np.ndarray],
    n: int,
    sampling: SamplingParams,
    seed: int | None,
    routes: tuple[int, int, int] | None = None,
    vocab_size: int | None = None,
) -> list[Request]:
    """Returns ``n`` requests for each prompt, in order. Each has a seed of its own unless ``seed`` is None.

    The other arguments are fields of :class:`Request`.
    """
    return [
        Request(prompt, sampling, None if seed is None else response_seed(seed, i, j), None, routes, vocab_size)
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]


def remaining_request(request: Request, parts: Sequence[Completion]) -> Request:
    """Returns the request for the rest of a response that servers gave up after ``parts``, with a seed of its own."""
    tokens = [part.response for part in parts]
    count = sum(map(len, tokens))
    if not count:
        return request
    return dataclasses.replace(
        request,
        prompt=np.concatenate([request.prompt, *tokens]),
        sampling=dataclasses.replace(
            request.sampling, max_response_tokens=request.sampling.max_response_tokens - count
        ),
        seed=None if request.seed is None else response_seed(request.seed, count, 0),
    )


def join_parts(parts: Sequence[Completion]) -> Completion:
    """Returns one completion from parts, each of which continues the one before.

    The scores of the prompt and the routes are dropped. It raises ReplyError if a part with tokens does not name the
    weights that sampled it.
    """
    *before, last = parts
    if not before:
        return last
    if any(part.spans is None and len(part.response) for part in parts):
        raise ReplyError("the weights that sampled a part of a response are not named")
    spans: list[tuple[str, int, int]] = []
    at = 0
    for part in parts:
        for tag, start, end in part.spans or ():
            if spans and spans[-1][0] == tag:
                spans[-1] = tag, spans[-1][1], at + end
            else:
                spans.append((tag, at + start, at + end))
        at += len(part.response)
    first = parts[0].without("routes")
    whole = join([first, *(part.without("routes").cut(part.prompt_length) for part in parts[1:])], first.prompt_length)
    return Completion(whole.ids, whole.prompt_length, whole.columns, last.finish_reason, tuple(spans))


def check_own_prompt(route: str, is_own: bool) -> None:
    """Raises OtherPromptError unless the reply answers the prompt of its request."""
    if not is_own:
        raise OtherPromptError(f"{route} gave the reply to another prompt than that of the request")


def check_completion(
    url: str, completion: Completion, request: Request, vocab_size: int | None, *, may_be_part: bool = False
) -> None:
    """Raises ReplyError if a completion cannot be the answer to ``request``, so that no step trains on it.

    Messages name the server ``url``. Every token id is below ``vocab_size``, or that is None: it is not known.
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
    if not np.isfinite(reported).all():
        raise ReplyError(f"{url} gave a log-probability of {reported[~np.isfinite(reported)][0]}")
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


def response_seed(seed: int, prompt: int, sample: int) -> int:
    """Returns the 31-bit seed of one response, a hash of the request's seed, the prompt's and the sample's number."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def shortest(infos: Iterable[ServerInfo]) -> ServerInfo:
    """Returns the description of the server with the smallest ``max_model_len``. None counts as no limit."""
    return min(infos, key=lambda info: info.max_model_len or math.inf)


def check_prompts(
    prompts: Sequence[np.ndarray],
    max_response_tokens: int,
    info: ServerInfo,
    stop_token_ids: Sequence[int] = (),
    *,
    name: str = "",
) -> None:
    """Raises ValueError for prompts that a server would silently shorten, and for token ids out of its range.

    ``name`` is the name of the only prompt in the message. With "" the message has the prompt's number.
    """
    limit, vocab = info.max_model_len, info.vocab_size
    for i, prompt in enumerate(prompts):
        called = name or f"prompt {i}"
        if len(prompt) < 1 or (limit is not None and len(prompt) > limit - max_response_tokens):
            most = "any number" if limit is None else limit - max_response_tokens
            raise ValueError(
                f"{called} has {len(prompt)} tokens; with {max_response_tokens} of response it must have 1 to {most} "
                f"(the servers' max_model_len is {limit})"
            )
        if vocab is not None and (prompt.min() < 0 or prompt.max() >= vocab):
            raise ValueError(f"{called} has token ids outside 0..{vocab - 1}")
    if vocab is not None and any(not 0 <= token < vocab for token in stop_token_ids):
        raise ValueError(f"stop_token_ids {tuple(stop_token_ids)} are outside 0..{vocab - 1}")
