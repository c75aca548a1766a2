"""The responses of a step: sampled, scored as they arrive, and turned into the trainer's sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from rljax.algorithms.advantages import compute_advantages, groups_with_loss, groups_with_signal
from rljax.data.prompts import Problem, PromptStream
from rljax.data.tokenizer import Tokenizer
from rljax.policy.model import Params
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine, check_wanted
from rljax.rollout.types import Response, SamplingParams
from rljax.run.config import Config
from rljax.run.stop import StopRequest
from rljax.run.timers import Timers
from rljax.trainer.packing import TrainSequence

_TICK_S = 0.25  # between two questions whether to give up


class Scored(NamedTuple):
    """A response to a problem, and its reward.

    Attributes:
      prompt: The token ids of the prompt, int32 [p].
      response: The response.
      text: The text of the response, without special tokens.
      reward: The reward.
    """

    prompt: np.ndarray
    response: Response
    text: str
    reward: float

    @property
    def place(self) -> tuple[int, int]:
        """The position of the problem, and the position (0 .. n-1) among the responses to it."""
        return self.response.prompt_index, self.response.sample_index


@dataclass
class Rollouts:
    """The responses of a step.

    Attributes:
      prompts: The token ids of each prompt, b vectors int32 [p].
      responses: The responses to each prompt, [b][g].
      rewards: The rewards, float32 [b, g].
    """

    prompts: list[np.ndarray]
    responses: list[list[Response]]
    rewards: np.ndarray

    def all(self) -> list[Response]:
        """Returns all responses, prompt by prompt."""
        return [response for group in self.responses for response in group]

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(response.length for response in self.all())


class Sampled(NamedTuple):
    """The rollouts of one step, and what sampling them took.

    Attributes:
      rollouts: The responses in the order of the problems.
      row: The counts and seconds of their sampling, for the row of the step.
    """

    rollouts: Rollouts
    row: Row


def step_seed(seed: int, step: int) -> int:
    """Returns an independent 32-bit seed for each step of a run."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


class Sampler:
    """Samples responses to problems, and has each scored as soon as it arrives.

    Attributes:
      rewards: The pool that scores responses.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        params: SamplingParams,
        n: int,
        *,
        seed: int = 0,
        stop: StopRequest | None = None,
        counts_mixed: bool = False,
    ) -> None:
        """Puts the parts together and samples nothing yet.

        Args:
          engine: The engine; it has a policy before anything is sampled.
          tokenizer: The tokenizer of the policy.
          rewards: The pool that scores responses.
          params: The temperature, the length limit and the stop tokens.
          n: The number of responses to each problem.
          seed: The seed of the run.
          stop: The stop request of the run. None: sampling is never given up.
          counts_mixed: Whether a batch reports ``rollout/mixed_fraction``.
        """
        self._engine, self._tokenizer, self.rewards = engine, tokenizer, rewards
        self._params, self._n, self._seed = params, n, seed
        self._stop, self._counts_mixed = stop or StopRequest(), counts_mixed

    def sample(self, problems: Sequence[Problem], step: int) -> Sampled:
        """Samples the rollouts of ``step``, which decides their seed.

        Raises:
          RuntimeError: The engine returned another number of responses, or is broken.
          StoppedWaitingError: The run was asked to stop, and sampling is given up.
        """
        prompts = self._encoded(problems)
        samples = self._engine.generate(prompts, self._n, self._params, seed=step_seed(self._seed, step))
        by_place: dict[tuple[int, int], Scored] = {}
        for one in self._scored(problems, prompts, samples):
            by_place[one.place] = one
        rollouts = arrange(by_place, len(problems), self._n)
        row: Row = {**self.rewards.pop_metrics(), **samples.metrics}
        if self._tokenizer.template_stop is not None:
            row["response_length/missed_stop_fraction"] = missed_stop_fraction(rollouts, self._tokenizer.template_stop)
        if self._counts_mixed:
            row["rollout/mixed_fraction"] = mixed_fraction(rollouts)
        return Sampled(rollouts, row)

    def scored(self, problems: Sequence[Problem], seed: int) -> Iterator[Scored]:
        """Samples responses and yields them scored, in the order in which they arrive.

        Args:
          problems: The problems; each ``prompt`` is the text that is tokenised.
          seed: The seed of the sampling.

        Raises:
          RuntimeError: The engine is broken.
          StoppedWaitingError: The run was asked to stop, and sampling is given up.
        """
        prompts = self._encoded(problems)
        return self._scored(problems, prompts, self._engine.generate(prompts, self._n, self._params, seed=seed))

    def _encoded(self, problems: Sequence[Problem]) -> list[np.ndarray]:
        return [self._tokenizer.encode(problem["prompt"]) for problem in problems]

    def _scored(
        self, problems: Sequence[Problem], prompts: Sequence[np.ndarray], responses: Iterable[Response]
    ) -> Iterator[Scored]:
        waiting: deque[tuple[Response, str, Future[float]]] = deque()

        def first_scored() -> Scored:
            response, text, reward = waiting.popleft()
            while not wait([reward], _TICK_S).done:
                check_wanted(self._stop)
            self._stop.progress()
            return Scored(prompts[response.prompt_index], response, text, reward.result())

        for response in responses:
            check_wanted(self._stop)
            text, problem = self._tokenizer.decode(response.token_ids), problems[response.prompt_index]
            waiting.append((response, text, self.rewards.submit(problem, text, response.truncated)))
            while waiting and waiting[0][2].done():
                yield first_scored()
        while waiting:
            yield first_scored()


class Batches(Protocol):
    """The batches of the steps, in their order and each once."""

    def start(self, step: int) -> None:
        """Allows sampling to begin, now that the policy after ``step`` is published."""

    def take(self, timers: Timers) -> Sampled:
        """Returns the batch of the next step.

        Raises:
          RuntimeError: The engine is broken or gone for good.
          StoppedWaitingError: The run was asked to stop, and sampling is given up.
        """

    def paused(
        self, params: Params, policy_version: int, timers: Timers, *, drains: bool
    ) -> AbstractContextManager[None]:
        """Opens a block in which the caller publishes ``params`` as ``policy_version``.

        No batch begins inside the block.

        Args:
          params: The parameters that are published.
          policy_version: Their version, which is the number of the last step taken.
          timers: The timers of that step.
          drains: Whether the batch under way ends before the block, so that the caller alone uses the engine.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream after the problems of the last batch taken."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the stream from ``state_dict``; called before ``start``."""

    def close(self) -> None:
        """Gives up the batch under way, and waits for its end."""


class BatchesInTurn:
    """Batches that are sampled when they are asked for."""

    def __init__(self, stream: PromptStream, sampler: Sampler) -> None:
        """Samples nothing yet.

        Args:
          stream: The problems in their order.
          sampler: The sampler of the run.
        """
        self._stream, self._sampler, self._step = stream, sampler, 0

    def start(self, step: int) -> None:
        """Makes the next batch that of ``step`` + 1."""
        self._step = step

    def take(self, timers: Timers) -> Sampled:
        """Samples the batch of the next step."""
        self._step += 1
        with timers.phase("rollout"):
            return self._sampler.sample(self._stream.next_batch(), self._step)

    def paused(
        self, params: Params, policy_version: int, timers: Timers, *, drains: bool
    ) -> AbstractContextManager[None]:
        """Opens an empty block: no batch is ever under way."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the stream."""
        self._stream.load_state_dict(state)

    def close(self) -> None:
        """Does nothing: no batch is ever under way."""


def arrange(by_place: Mapping[tuple[int, int], Scored], count: int, group_size: int) -> Rollouts:
    """Puts scored responses into the order of their problems.

    Args:
      by_place: The responses by the position of their problem, and by their position among the responses to it.
      count: The number of problems.
      group_size: The number of responses to each problem.

    Raises:
      RuntimeError: There is another number of responses.
    """
    if len(by_place) != count * group_size:
        raise RuntimeError(f"the engine returned {len(by_place)} responses, expected {count * group_size}")
    groups = [[by_place[i, j] for j in range(group_size)] for i in range(count)]
    return Rollouts(
        [group[0].prompt for group in groups],
        [[one.response for one in group] for group in groups],
        np.asarray([[one.reward for one in group] for group in groups], np.float32),
    )


def rollout_row(rollouts: Rollouts, policy_version: int) -> Row:
    """Returns the metrics of a batch, over all responses, before anything is dropped.

    Args:
      rollouts: The responses of the step.
      policy_version: The policy version that is trained from.
    """
    responses = rollouts.all()
    lengths = np.asarray([response.length for response in responses], np.float64)
    truncated = np.asarray([response.truncated for response in responses])
    staleness = np.asarray([policy_version - response.oldest_version for response in responses])
    return {
        "reward/mean": float(rollouts.rewards.mean()),
        "reward/std": float(rollouts.rewards.std()),
        "reward/groups_with_signal": float(groups_with_signal(rollouts.rewards).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_fraction": float(truncated.mean()),
        "rollout/policy_version": int(policy_version - staleness.max()),
        "rollout/staleness": float(staleness.mean()),
    }


def mixed_fraction(rollouts: Rollouts) -> float:
    """Returns the fraction of the responses that more than one policy version sampled."""
    return float(np.mean([len(response.versions) > 1 for response in rollouts.all()]))


def missed_stop_fraction(rollouts: Rollouts, stop: int) -> float:
    """Returns the fraction of the responses that hold the token ``stop`` but do not end with it."""
    responses = rollouts.all()
    inner = (one.token_ids if one.truncated else one.token_ids[:-1] for one in responses)
    return float(np.mean([bool((tokens == stop).any()) for tokens in inner]))


def training_sequences(rollouts: Rollouts, config: Config, policy_version: int) -> list[TrainSequence]:
    """Returns each response with its advantage, and whether its group carries loss.

    Args:
      rollouts: The responses of the step.
      config: The configuration of the run.
      policy_version: The policy version that is trained from.
    """
    lengths = np.asarray([[response.length for response in group] for group in rollouts.responses])
    advantages = compute_advantages(
        rollouts.rewards,
        config.advantage,
        lengths=lengths,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    signal = groups_with_loss(advantages)
    return [
        TrainSequence(
            prompt,
            response.token_ids,
            response.logprobs,
            float(advantages[i, j]),
            bool(signal[i]),
            staleness_of(response, policy_version),
            routes=response.routes if config.rollout.router_replay == "r3" else None,
        )
        for i, (prompt, group) in enumerate(zip(rollouts.prompts, rollouts.responses, strict=True))
        for j, response in enumerate(group)
    ]


def staleness_of(response: Response, policy_version: int) -> np.ndarray:
    """Returns the policy versions from the one that sampled each token to ``policy_version``, int32 [t]."""
    behind = np.zeros(response.length, np.int32)
    for span in response.versions:
        behind[span.start : span.end] = policy_version - span.version
    return behind
