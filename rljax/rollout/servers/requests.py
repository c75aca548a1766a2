"""Requests to an HTTP server and its replies as plain data, for every kind of server. Nothing here sends them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from rljax.rollout.engine import TurnQueue
from rljax.rollout.types import SamplingParams, ServerForm
from rljax.tokens import TokenRecord, join


@dataclass(frozen=True)
class Request:
    """The request for one response."""

    prompt: np.ndarray  # the token ids, int32 [s]
    sampling: SamplingParams
    seed: int | None = None  # the seed of this one response; None leaves the choice to the server
    # The number of likeliest tokens whose log-probabilities are reported at each position of the prompt, besides the
    # prompt's own token. They are those at temperature 1. None: nothing is reported of the prompt.
    prompt_logprobs: int | None = None
    routes: tuple[int, int, int] | None = None  # the (layers, k, experts) of a mixture: a token's k are reported
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
    cached: int | None = None  # the number of prompt tokens from the server's prefix cache; None: it does not tell


@dataclass(frozen=True)
class ServerInfo:
    """The description that a server gives of itself. An empty string or None means that it is not known."""

    url: str
    model: str = ""  # the name that the server gives its model
    root: str = ""  # the model directory that the server was started with, as the server names it
    version: str = ""  # the version of the server's software
    platform: str = ""  # the kind of its devices, as rljax's plugin describes it
    dtype: str = ""  # the dtype of weights and activations
    vocab_size: int | None = None  # the size of the vocabulary: every token id is smaller
    max_model_len: int | None = None  # the longest prompt plus response (tokens)
    block_size: int | None = None  # the size of a block of the prefix cache (tokens)
    head_dtype: str = ""  # the dtype in which the LM head computes
    form: ServerForm = field(default_factory=ServerForm)  # the form in which the server holds weights and cache
    is_broken: bool = False  # whether its last update broke off, so that it cannot sample before a whole one
    has_first_weights: bool = False  # whether the server still has the weights of ``root`` that it was started with


class Remote(Protocol):
    """A server as the handshake, the verification and a ``Backend`` use it, on the event loop of the fleet."""

    url: str  # the address
    route: str  # the path at which the server samples
    model: str  # the name that the server gives its model
    platform: str  # the platform that rljax's plugin describes, or ""

    async def call(self, method: str, path: str, *, timeout_s: float = 300.0, **content: Any) -> dict[str, Any]:
        """Sends one request that samples no response, without a retry, and returns the reply's JSON object.

        ``content`` is ``params`` and ``json`` as httpx takes them. The whole reply may take ``timeout_s`` seconds. It
        raises ServerGoneError if no answer comes or the server is not healthy, and ReplyError if the answer is no JSON.
        For any other status than 200 it raises ServerRefusedError with the server's message.
        """

    async def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns a completion of each request, whatever the server's state. Raises the errors of :meth:`call`."""


@dataclass
class Group:
    """Requests whose prompts begin alike. ``home`` is the server that computes this beginning, or None at first."""

    home: Remote | None = None


class Ask(NamedTuple):
    """A request, and facts about it that are not sent."""

    place: tuple[int, int]  # the ``prompt_index`` and the ``sample_index`` of the response
    name: str  # the name of the response in messages
    request: Request  # the request itself
    group: Group  # the requests that should go to one server, because it has computed a part of their prompts


TakeAsks = Callable[[], Iterable[Ask]]
"""A function that returns the requests that came since its last call. It may raise the error that ended them."""


def turn_asks(
    queue: TurnQueue,
    sampling: SamplingParams,
    seed: int | None,
    info: Callable[[], ServerInfo],
    routes: tuple[int, int, int] | None = None,
) -> TakeAsks:
    """Returns a function that makes a request of each turn that waits in ``queue``. A problem's turns form a group.

    The function raises ValueError if a turn is too long for the servers, and the errors of ``TurnQueue.take``.

    Args:
      queue: The turns of trajectories, requested while other turns are sampled.
      sampling: The settings, with the most tokens of a turn as ``max_response_tokens``.
      seed: The seed from which each turn gets its own. None: it is left to the servers.
      info: The function that returns the description of the server with the smallest ``max_model_len`` now.
      routes: The sizes of the routes that servers must report, as :class:`Request` has them.
    """
    groups: defaultdict[int, Group] = defaultdict(Group)

    def take() -> Iterator[Ask]:
        for key, turn, tokens, max_tokens in queue.take():
            shortest_info, name = info(), f"turn {turn} of trajectory {key}"
            limit = min(max_tokens, sampling.max_response_tokens)
            check_prompts([tokens], limit, shortest_info, sampling.stop_token_ids, name=f"the prompt of {name}")
            own_seed = None if seed is None else response_seed(seed, key, turn)
            limited = dataclasses.replace(sampling, max_response_tokens=limit)
            request = Request(tokens, limited, own_seed, None, routes, shortest_info.vocab_size)
            yield Ask((key, turn - 1), name, request, groups[key // queue.group_size])

    return take


def make_asks(
    prompts: Sequence[np.ndarray],
    n: int,
    sampling: SamplingParams,
    seed: int | None,
    routes: tuple[int, int, int] | None = None,
    vocab_size: int | None = None,
) -> list[Ask]:
    """Returns ``n`` requests for each prompt, in order. Each has a seed of its own unless ``seed`` is None.

    The requests for a prompt form a group. The other arguments are fields of :class:`Request`.
    """
    asks: list[Ask] = []
    for i, prompt in enumerate(prompts):
        group = Group()
        for j in range(n):
            own_seed = None if seed is None else response_seed(seed, i, j)
            request = Request(prompt, sampling, own_seed, None, routes, vocab_size)
            asks.append(Ask((i, j), f"response {len(asks)}", request, group))
    return asks


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
    """Returns one completion from parts, each of which continues the part before.

    If there are several, prompt scores and routes are dropped, and ``cached`` is that of the first part.
    """
    *before, last = parts
    if not before:
        return last
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
    return Completion(
        whole.ids, whole.prompt_length, whole.columns, last.finish_reason, tuple(spans), cached=parts[0].cached
    )


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
    """Raises ValueError for prompts that are empty or too long for a server, and for ids outside its vocabulary.

    ``name`` is the name of a single prompt for the message. If it is "", the message has the prompt's number.
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
