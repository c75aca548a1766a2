"""Problems for rollouts: grain shuffles and repeats them; a position is the whole state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grain

from rljax.data.toy import HELD_OUT, AdditionProblems

Problem = dict[str, str]
# (problem, decoded response, truncated) -> reward
Reward = Callable[[Problem, str, bool], float]


@dataclass(frozen=True)
class DataConfig:
    """What is trained on.

    Attributes:
      task: "toy", the embedded addition task (see rljax/data/toy.py).
      batch_size: prompts a step.
      max_prompt_tokens: longest prompt (tokens).
      seed: of the drawn problems and their order.
    """

    task: Literal["toy"] = "toy"
    batch_size: int = 64
    max_prompt_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def training_problems(config: DataConfig) -> Sequence[Problem]:
    """The problems of the task's training split."""
    return AdditionProblems("train", seed=config.seed)


def held_problems(config: DataConfig) -> Sequence[Problem]:
    """The problems held back for evaluation; none of them is trained on."""
    return AdditionProblems("held", HELD_OUT, seed=config.seed)


class PromptStream:
    """An endless, shuffled stream of batches, reshuffled each epoch; the same seed gives the same stream."""

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int):
        """Raises ValueError when there are fewer problems than a batch takes."""
        if len(problems) < batch_size:
            raise ValueError(f"a batch takes {batch_size} problems, but there are only {len(problems)}")
        self._dataset: Any = grain.MapDataset.source(problems).seed(seed).shuffle().repeat()
        self._batch_size = batch_size
        self._batches = 0

    def next_batch(self) -> list[Problem]:
        """The next ``batch_size`` problems."""
        start = self._batches * self._batch_size
        self._batches += 1
        return [self._dataset[i] for i in range(start, start + self._batch_size)]

    def state_dict(self) -> dict[str, int]:
        """The global position: it does not depend on the number of processes."""
        return {"problems_drawn": self._batches * self._batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where ``state_dict`` was taken. Raises ValueError when the batch size cannot have led there."""
        drawn = int(state["problems_drawn"])
        if drawn % self._batch_size:
            raise ValueError(f"{drawn} problems were drawn so far, not a multiple of batch_size = {self._batch_size}")
        self._batches = drawn // self._batch_size
