"""The requests of a stream of responses: all at once, or turn by turn while other responses are sampled."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from rljax.rollout.servers.pool import Group
from rljax.rollout.servers.requests import Request, ServerInfo, check_prompts, response_seed
from rljax.rollout.turns import TurnQueue
from rljax.rollout.types import SamplingParams


class Ask(NamedTuple):
    """A request, and facts about it that are not sent."""

    place: tuple[int, int]  # the ``prompt_index`` and the ``sample_index`` of the response
    name: str  # the name of the response in messages
    request: Request  # the request itself
    group: Group  # the requests that should go to one server, because it has computed a part of their prompts


class RequestSource(Protocol):
    """The requests of one stream of responses. Only one thread uses it."""

    @property
    def is_over(self) -> bool:
        """Whether there will be no further request."""

    def take(self) -> Iterable[Ask]:
        """Returns the requests that came since the last call. Raises the error that ended the source, if any."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called, on any thread, whenever ``take`` or ``is_over`` may have news."""


class ListedRequests:
    """Requests that are all known from the start."""

    def __init__(self, requests: Sequence[Request], group_size: int = 1, *, first: int = 0) -> None:
        """Takes ``requests``. Each ``group_size`` in a row have one prompt. Their numbers count from ``first``."""
        self._requests, self._group_size, self._first = requests, group_size, first
        self.is_over = False

    def take(self) -> Iterable[Ask]:
        """Returns all requests the first time, and none from then on."""
        if self.is_over:
            return []
        self.is_over = True
        groups: defaultdict[int, Group] = defaultdict(Group)
        return [
            Ask(divmod(number, self._group_size), f"response {number}", request, groups[i // self._group_size])
            for i, (number, request) in enumerate(enumerate(self._requests, self._first))
        ]

    def watch(self, wake: Callable[[], None]) -> None:
        """Does nothing."""


class QueuedTurns:
    """The turns of trajectories, requested while other turns are sampled. The turns of a trajectory form a group."""

    def __init__(
        self,
        queue: TurnQueue,
        sampling: SamplingParams,
        seed: int | None,
        info: Callable[[], ServerInfo],
        routes: tuple[int, int, int] | None = None,
    ) -> None:
        """Takes nothing from ``queue`` yet.

        ``sampling`` has the most tokens of a turn as ``max_response_tokens``. Each turn gets its own seed from
        ``seed``. If that is None, it is left to the servers. ``info`` returns the description of the server which takes
        the shortest sequences now. ``routes`` are those that servers must report, as :class:`Request` has them.
        """
        self._queue, self._sampling, self._seed, self._info, self._routes = queue, sampling, seed, info, routes
        self._groups: defaultdict[int, Group] = defaultdict(Group)

    @property
    def is_over(self) -> bool:
        """Whether all trajectories have ended."""
        return self._queue.is_over

    def take(self) -> Iterable[Ask]:
        """Yields the requests of the turns that wait.

        Raises ValueError if a turn is too long for the servers, and the errors of ``TurnQueue.take``.
        """
        for key, turn, tokens, max_tokens in self._queue.take():
            info, name = self._info(), f"turn {turn} of trajectory {key}"
            limit = min(max_tokens, self._sampling.max_response_tokens)
            check_prompts([tokens], limit, info, self._sampling.stop_token_ids, name=f"the prompt of {name}")
            sampling = dataclasses.replace(self._sampling, max_response_tokens=limit)
            seed = None if self._seed is None else response_seed(self._seed, key, turn)
            request = Request(tokens, sampling, seed, None, self._routes, info.vocab_size)
            yield Ask((key, turn - 1), name, request, self._groups[key])

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called at each change of the queue."""
        self._queue.watch(wake)
