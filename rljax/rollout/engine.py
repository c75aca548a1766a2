"""The protocol between the training loop and an engine that samples for it. It fits every kind of engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rljax.errors import StoppedWaitingError
from rljax.rollout.types import Response, SamplingParams

if TYPE_CHECKING:
    from rljax.rollout.turns import TurnQueue, TurnRequest


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
        waits until each trajectory has a request. The metrics are the sums over the rounds.

        ``sampling`` has the most tokens of a turn as ``max_response_tokens``. The seed fixes the samples as far as the
        engine can. With rounds this is so only if an environment always answers the same turn in the same way. It
        raises the errors of ``generate``, and the error that was given to ``queue.fail``.
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
        """Samples one turn for each of ``requests``, at least one. Settings and errors are as in ``answer``.

        By default it calls ``generate``, and cuts a response with more tokens than its request's ``max_tokens``.
        """
        samples = self.generate([request.tokens for request in requests], 1, sampling, seed=seed)
        return as_turns(samples, requests)

    def prepare(self, params: Any, policy_version: int) -> None:
        """Does the part of the next ``publish`` that can be done while responses are sampled.

        By default it does nothing. Raises RuntimeError if the parameters cannot be published.
        """
        return

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Makes ``params`` the policy of all later samples, and returns once the engine is proven to use them.

        The parameters are float32 masters, or the base with adapters merged into it. The result has the metrics since
        the publish before (``time/*_s``, ``publish/*``, ``rollout/*``). It has no metrics of sampling, and no key of
        :class:`Samples`.

        Raises:
          RuntimeError: The engine does not sample from ``params``.
          StoppedWaitingError: The run was asked to stop, and the engine would have to wait for servers.
        """

    def close(self) -> None:
        """Releases the engine's resources. It may be called twice."""


def as_turns(samples: Samples, requests: Sequence[TurnRequest], n: int = 1) -> Samples:
    """Returns ``samples`` with the numbers and the limits of ``requests``, for ``RolloutEngine.answer``.

    ``samples`` has one response to each request, and ``n`` requests in a row share each of its prompts. A response that
    is longer than ``max_tokens`` is cut.
    """

    def responses() -> Iterator[Response]:
        for response in samples:
            request = requests[response.prompt_index * n + response.sample_index]
            turn = replace(response, prompt_index=request.key, sample_index=request.turn - 1)
            yield turn.first(request.max_tokens)

    return Samples(responses(), samples.metrics)


AHEAD: ContextVar[int | None] = ContextVar("AHEAD", default=None)
"""The step for which this thread samples ahead; None on the thread that publishes, which alone may use the policy.

Another thread must not use it: the trainer may have reused the buffers of the policy that was published last."""


class Stopping(Protocol):
    """The two questions about the end of a run that an engine asks while it waits. Any thread may call both methods."""

    def is_requested(self) -> bool:
        """Returns whether the run was asked to stop, so that no new wait may begin."""

    def gives_up(self) -> bool:
        """Returns whether work under way must be given up now, such as responses that are being sampled."""


def check_wanted(stop: Stopping) -> None:
    """Raises StoppedWaitingError if the responses under way must be given up."""
    if stop.gives_up():
        raise StoppedWaitingError("asked to stop while responses were sampled")
