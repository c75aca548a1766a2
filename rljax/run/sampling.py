"""The responses of a step: sampled, scored as they arrive, and turned into the trainer's sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rljax.algorithms.advantages import compute_advantages, groups_with_loss, groups_with_signal
from rljax.data.prompts import Problem
from rljax.data.tokenizer import Tokenizer
from rljax.errors import stop_sampling
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import Response, SamplingParams
from rljax.run.config import Config
from rljax.trainer.packing import TrainSequence

_TICK_S = 0.25  # between two questions whether to give up


class Scored(NamedTuple):
    """One response to a problem, and its reward."""

    prompt: np.ndarray  # int32 [p]
    response: Response
    text: str  # of the response, special tokens removed
    reward: float

    @property
    def place(self) -> tuple[int, int]:
        """(position of its problem, 0 .. n-1 among the responses to it)."""
        return self.response.prompt_index, self.response.sample_index


@dataclass
class Rollouts:
    """The responses of a step, [b][g]."""

    prompts: list[np.ndarray]  # int32 [p] each
    responses: list[list[Response]]
    rewards: np.ndarray  # float32 [b, g]
    metrics: dict[str, float] = field(default_factory=dict)  # of sampling them (``Samples.metrics``)

    def all(self) -> list[Response]:
        """Row by row."""
        return [response for group in self.responses for response in group]


def step_seed(seed: int, step: int) -> int:
    """An independent 32-bit seed for each step of a run."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def score_responses(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    n: int = 1,
    seed: int = 0,
    gives_up: Callable[[], bool] = lambda: False,
    metrics: dict[str, float] | None = None,
) -> Iterator[Scored]:
    """Samples ``n`` responses to each problem and yields them scored; each goes to the pool as soon as it arrives.

    Args:
      engine: with a published policy, or one that its server was started with.
      tokenizer: of the policy.
      problems: each ``prompt`` as the text that is tokenised.
      rewards: scores them.
      sampling: temperature, length limit and stop tokens.
      n: responses to each problem.
      seed: of the sampling.
      gives_up: asked with every response, and while rewards are waited for; true ends it.
      metrics: gets what the engine counted (``Samples.metrics``) once the last response is there.

    Raises:
      StoppedWaitingError: ``gives_up`` said so, or the engine.
    """
    prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]
    waiting: deque[tuple[Response, str, Future[float]]] = deque()

    def first_scored() -> Scored:
        response, text, reward = waiting.popleft()
        while not wait([reward], _TICK_S).done:
            stop_sampling(gives_up)
        return Scored(prompts[response.prompt_index], response, text, reward.result())

    samples = engine.generate(prompts, n, sampling, seed=seed)
    for response in samples:
        stop_sampling(gives_up)
        text = tokenizer.decode(response.token_ids)
        waiting.append((response, text, rewards.submit(problems[response.prompt_index], text, response.truncated)))
        while waiting and waiting[0][2].done():
            yield first_scored()
    if metrics is not None:
        metrics.update(samples.metrics)
    while waiting:
        yield first_scored()


def sample_batch(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    sampling: SamplingParams,
    problems: Sequence[Problem],
    step: int,
    progressed: Callable[[], None],
    is_unwanted: Callable[[], bool],
    *,
    group_size: int,
    run_seed: int,
    gives_up: Callable[[], bool],
) -> Rollouts:
    """The scored rollouts of one step, ``group_size`` responses to each problem.

    Args:
      engine: as ``score_responses``, as the next three.
      tokenizer: likewise.
      rewards: likewise.
      sampling: likewise.
      problems: likewise.
      step: that they are for; with ``run_seed`` it gives the seed of the sampling.
      progressed: called with each response.
      is_unwanted: asked as ``gives_up`` is.
      group_size: responses to each problem.
      run_seed: of the run.
      gives_up: true ends it.

    Raises:
      RuntimeError: the engine returned another number of responses.
      StoppedWaitingError: given up.
    """

    def ends() -> bool:
        return is_unwanted() or gives_up()

    metrics: dict[str, float] = {}

    def counted() -> Iterator[Scored]:
        seed = step_seed(run_seed, step)
        for one in score_responses(
            engine, tokenizer, problems, rewards, sampling, n=group_size, seed=seed, gives_up=ends, metrics=metrics
        ):
            progressed()
            yield one

    return replace(collect_rollouts(counted(), len(problems), group_size), metrics=metrics)


def collect_rollouts(scored: Iterable[Scored], count: int, group_size: int) -> Rollouts:
    """The scored responses to ``count`` problems, ``group_size`` to each, in the order of the problems.

    Raises:
      RuntimeError: the engine returned another number of responses.
    """
    by_place = {one.place: one for one in scored}
    if len(by_place) != count * group_size:
        raise RuntimeError(f"the engine returned {len(by_place)} responses, expected {count * group_size}")
    groups = [[by_place[i, j] for j in range(group_size)] for i in range(count)]
    return Rollouts(
        [group[0].prompt for group in groups],
        [[one.response for one in group] for group in groups],
        np.asarray([[one.reward for one in group] for group in groups], np.float32),
    )


def rollout_row(rollouts: Rollouts, policy_version: int) -> Row:
    """What the host sees of a batch, over all responses, before anything is dropped."""
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
    """Share of the responses that more than one policy version sampled."""
    return float(np.mean([len(response.versions) > 1 for response in rollouts.all()]))


def training_sequences(rollouts: Rollouts, config: Config, policy_version: int) -> list[TrainSequence]:
    """Each response with its advantage, and whether its group carries loss."""
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
    """Policy versions between the one that sampled each token and the trainer's, int32 [t]."""
    behind = np.zeros(response.length, np.int32)
    for span in response.versions:
        behind[span.start : span.end] = policy_version - span.version
    return behind
