"""The protocol between the training loop and an engine that samples for it. It fits every kind of engine.

Requests for the turns of trajectories come to an engine by a queue. One side runs the environments. It puts a request
for each turn into the queue, and says which trajectories have ended. The other side is ``RolloutEngine.answer``. It
takes the requests and samples one turn for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from rljax.errors import StoppedWaitingError
from rljax.rollout.types import Response, SamplingParams

_LOOK_S = 0.25  # The time between two checks whether the run gives the responses up (seconds).


@dataclass(frozen=True)
class Samples:
    """The responses to one request, and the metrics of sampling them. Iterating over it yields the responses."""

    responses: Iterator[Response]  # the responses as they complete, in any order; it can be used once
    # Counts and seconds (``rollout/*``, ``time/*_s``) for the row of a step, complete once ``responses`` has ended.
    metrics: dict[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Response]:
        return self.responses


class RolloutEngine(Protocol):
    """An engine that samples responses with the last published policy."""

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples ``n`` responses to each prompt.

        Args:
          prompts: The token ids of each prompt, int32 [s].
          n: The number of responses to each prompt.
          sampling: The settings of the sampling.
          seed: The seed, which fixes the samples as far as the engine can. On the embedded engine the same seed,
            weights and prompts give the same responses.

        Returns:
          The responses and their metrics. An error may come from this call, or from iterating over the responses.

        Raises:
          ValueError: The engine cannot take a prompt, or this number of prompts.
          RuntimeError: The engine is broken or gone for good.
          StoppedWaitingError: The run was asked to stop, and the engine would have to wait for servers or responses.
        """

    def answer(self, queue: TurnQueue, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the turns that ``queue`` asks for, until all its trajectories have ended.

        Each response has the number of its trajectory as ``prompt_index``, and the number of its turn minus 1 as
        ``sample_index``. Requests may be put at any time while the responses are iterated, also from other threads. By
        default all open trajectories go on together, in rounds of ``answer_round``. Each round has its own seed, and
        waits until each open trajectory has a request. The metrics are the sums over the rounds.

        ``sampling`` has the most tokens of a turn as ``max_response_tokens``. The seed fixes the samples as far as the
        engine can. With rounds this is so only if an environment always answers the same turn in the same way. The
        errors are those of ``generate``, and the error that was given to ``queue.fail``.
        """
        metrics: dict[str, float] = {}

        def responses() -> Iterator[Response]:
            number = 0
            while requests := queue.take_round():
                own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
                samples = self.answer_round(requests, sampling, seed=own_seed)
                yield from samples
                for name, value in samples.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + value
                number += 1

        return Samples(responses(), metrics)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples one turn for each of one or more ``requests``. Settings and errors are as in ``answer``.

        An engine with an ``answer`` of its own need not have this method.
        """
        raise RuntimeError("this engine answers no rounds")

    def prepare(self, params: Any, policy_version: int) -> None:
        """Does the part of the next ``publish`` that can be done while responses are sampled.

        By default it does nothing. Raises RuntimeError if the parameters cannot be published.
        """
        return

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Makes ``params`` the policy of all later samples, and returns once the engine is proven to use them.

        The parameters are float32 masters, or the base model with adapters merged in. The result has the metrics since
        the publish before (``time/*_s``, ``publish/*``, ``rollout/*``). It has no metrics of sampling, and no key of
        :class:`Samples`.

        Raises:
          RuntimeError: The engine does not sample from ``params``.
          StoppedWaitingError: The run was asked to stop, and the engine would have to wait for servers.
        """

    def close(self) -> None:
        """Releases the engine's resources. It may be called twice."""


AHEAD: ContextVar[int | None] = ContextVar("AHEAD", default=None)
"""The step whose batch the calling thread samples in advance; None on the thread that publishes.

Only that thread may use the published parameters. For any other, the trainer may have reused their buffers."""


class Stopping(Protocol):
    """The view of the run for an engine that waits for servers or responses. Any thread may call the methods."""

    def is_requested(self) -> bool:
        """Returns whether the run was asked to stop, so that no new wait may begin."""

    def gives_up(self) -> bool:
        """Returns whether work under way must be given up now, such as responses that are being sampled."""

    def progress(self) -> None:
        """Reports progress, or a wait that has a limit of its own, so that the run does not count as stuck."""


def check_wanted(stop: Stopping | None, meanwhile: str = "responses were sampled") -> None:
    """Raises StoppedWaitingError if the work under way must be given up. ``meanwhile`` describes it in the message."""
    if stop is not None and stop.gives_up():
        raise StoppedWaitingError(f"asked to stop while {meanwhile}")


class TurnRequest(NamedTuple):
    """The request for one turn of a trajectory."""

    key: int  # the number of the trajectory
    turn: int  # the number of the turn in the trajectory, from 1
    # All tokens of the trajectory so far, int32 [s]. The turn continues them.
    tokens: np.ndarray
    max_tokens: int  # the most tokens of the turn

    def check_room(self, room: int, owner: str) -> None:
        """Raises ValueError if the tokens and the turn may exceed ``room`` tokens. The message names its ``owner``."""
        if len(self.tokens) + self.max_tokens > room:
            before = f"turn {self.turn} of trajectory {self.key} would have {len(self.tokens)} tokens before it"
            raise ValueError(f"{before} and up to {self.max_tokens} of its own; {owner} {room}")


class TurnQueue:
    """The requests that wait for an engine. All methods may be called from any thread.

    A trajectory is open until ``end`` is called for it. While an open trajectory has no waiting request, either the
    engine samples its turn or its environment works. So a further request may still come.
    """

    def __init__(self, keys: int | Iterable[int], stop: Stopping | None = None, group_size: int = 1) -> None:
        """Opens all trajectories, whose numbers are ``keys``. An integer means that many, numbered from 0.

        ``stop`` says whether waits are given up. None: they never are. Each ``group_size`` numbers in a row, from 0 on,
        are trajectories of one problem.
        """
        self.group_size = group_size
        self._open, self._stop = set(range(keys) if isinstance(keys, int) else keys), stop
        self._waiting: dict[int, TurnRequest] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether all trajectories have ended."""
        with self._changed:
            return not self._open

    def put(self, request: TurnRequest) -> None:
        """Adds the request for the next turn of an open trajectory, of which no request may be waiting."""
        with self._changed:
            assert request.key in self._open
            assert request.key not in self._waiting
            self._waiting[request.key] = request
            self._changed.notify_all()
        self._wake()

    def end(self, key: int) -> None:
        """Ends a trajectory, and drops its waiting request. It may be called twice.

        A request that the engine has taken is still answered.
        """
        with self._changed:
            self._open.discard(key)
            self._waiting.pop(key, None)
            self._changed.notify_all()
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Makes every waiting or later call of ``take`` and ``take_round`` raise ``error``.

        The side that runs the environments calls it if it cannot go on.
        """
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called after each change, on the thread that made the change.

        It replaces the function of an earlier call.
        """
        self._wake = wake

    def take(self) -> list[TurnRequest]:
        """Removes the requests that wait now, and returns them in order of key.

        Raises StoppedWaitingError if the run gives the responses up, and the error that was given to ``fail``.
        """
        return self._take(lambda: True)

    def take_round(self) -> list[TurnRequest]:
        """Waits until each open trajectory has a waiting request. Removes and returns them in order of key.

        The list is empty once all trajectories have ended. It raises the errors of :meth:`take`.
        """
        return self._take(lambda: len(self._waiting) == len(self._open))

    def _take(self, is_ready: Callable[[], bool]) -> list[TurnRequest]:
        with self._changed:
            while True:
                check_wanted(self._stop)
                if self._error is not None:
                    raise self._error
                if is_ready():
                    break
                self._changed.wait(_LOOK_S)
            taken = [self._waiting[key] for key in sorted(self._waiting)]
            self._waiting.clear()
        return taken
