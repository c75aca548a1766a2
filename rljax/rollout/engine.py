"""The protocol between the training loop and whatever samples for it: no URL, no cache, no dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rljax.errors import StoppedWaitingError
from rljax.rollout.types import Response, SamplingParams


@dataclass(frozen=True)
class Samples:
    """The responses to one request, and what sampling them took. Iterating over it yields the responses."""

    responses: Iterator[Response]  # as they complete, in any order; it can be used once
    # Counts and seconds (``rollout/*``, ``time/*_s``) for the row of a step, complete once ``responses`` has ended.
    metrics: dict[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Response]:
        return self.responses


class RolloutEngine(Protocol):
    """An engine that samples responses with the last published policy."""

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples ``n`` responses (``group_size``) to each prompt, int32 [s].

        The seed fixes the samples as far as the engine can. On the embedded engine the same seed, weights and prompts
        give the same responses. Errors come from this call or from the iteration.

        Raises:
          ValueError: The engine cannot take a prompt, or this number of prompts.
          RuntimeError: The engine is broken or gone for good.
          StoppedWaitingError: The run was asked to stop, and the engine would have to wait for servers or responses.
        """

    def prepare(self, params: Any, policy_version: int) -> None:
        """Does the part of the next ``publish`` that can be done while responses are sampled. Raises RuntimeError.

        By default there is none.
        """
        return

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Makes ``params`` the policy of all later samples, and returns once the engine is proven to use them.

        The parameters are float32 masters, or merged adapters. The result has the figures of all but sampling since the
        publish before (``time/*_s``, ``publish/*``, ``rollout/*``). :class:`Samples` has none of their keys.

        Raises:
          RuntimeError: The engine does not sample from ``params``.
          StoppedWaitingError: The run was asked to stop, and the engine would have to wait for servers.
        """

    def close(self) -> None:
        """Releases the engine's resources. It may be called twice."""


class Stopping(Protocol):
    """The answers that whoever waits needs about the end of a run. Both methods may be called from any thread."""

    def is_requested(self) -> bool:
        """Returns whether the run was asked to stop, so that nothing new is waited for."""

    def gives_up(self) -> bool:
        """Returns whether what is under way is given up now, such as the responses that are being sampled."""


def check_wanted(stop: Stopping) -> None:
    """Raises StoppedWaitingError if what is sampled is given up."""
    if stop.gives_up():
        raise StoppedWaitingError("asked to stop while responses were sampled")
