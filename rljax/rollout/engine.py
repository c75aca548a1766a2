"""The one protocol between the training loop and whatever samples for it.

The loop knows nothing else of an engine: no URL, no cache, no dtype. A new engine is a class with these five methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rljax.rollout.types import Response, SamplingParams


class RolloutEngine(Protocol):
    """Samples responses with the last published policy."""

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int
    ) -> Iterator[Response]:
        """Yields the ``len(prompts) * n`` responses **as they complete**, in any order.

        Args:
          prompts: int32 vectors of token ids.
          n: responses per prompt (``group_size``).
          sampling: how to sample them.
          seed: fixes the samples as far as the engine can; the same seed, weights and prompts give the same responses
            on the embedded engine.

        Raises:
          ValueError: a prompt, or the number of prompts, that this engine cannot take.
          RuntimeError: the engine is broken or gone for good.
          StoppedWaitingError: the run was asked to stop and the engine would have to wait for servers or responses.
        """

    def prepare(self, params: Any, policy_version: int) -> None:
        """Does what a ``publish`` of the same arguments, which follows, can do while responses are still sampled.

        Raises RuntimeError where the weights cannot be published.
        """

    def publish(self, params: Any, policy_version: int) -> None:
        """Makes ``params`` (the policy's pytree: float32 masters, or merged adapters) the policy of all later samples.

        Returns only when the engine is proven to sample from them. Raises RuntimeError when it does not, and
        StoppedWaitingError as ``generate`` does.
        """

    def pop_metrics(self) -> dict[str, float]:
        """What happened since the last call (``time/*_s``, ``publish/*``, ``rollout/*``), for the step's row."""

    def close(self) -> None:
        """Releases its resources; may be called twice."""
