"""The responses of a step: sampled, scored as they arrive, and turned into the trainer's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.algorithms.advantages import compute_advantages, groups_with_loss, groups_with_signal
from rljax.data.prompts import Problem
from rljax.data.tokenizer import Tokenizer
from rljax.report.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import Response, SamplingParams
from rljax.run.config import Config
from rljax.trainer.packing import TrainSequence


@dataclass
class Rollouts:
    """The responses of a step, [b][g]."""

    prompts: list[np.ndarray]  # int32 [p] each
    responses: list[list[Response]]
    rewards: np.ndarray  # float32 [b, g]

    def all(self) -> list[Response]:
        """Row by row."""
        return [response for group in self.responses for response in group]


def step_seed(seed: int, step: int) -> int:
    """An independent 32-bit seed for each step of a run."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def sample_and_score(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    group_size: int,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    *,
    seed: int,
) -> Rollouts:
    """Samples ``group_size`` responses to each problem; each goes to the reward pool as soon as it arrives.

    Raises:
      RuntimeError: the engine returned another number of responses.
    """
    prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]
    responses: list[list[Any]] = [[None] * group_size for _ in problems]
    scores: list[list[Any]] = [[None] * group_size for _ in problems]
    count = 0
    for response in engine.generate(prompts, group_size, sampling, seed=seed):
        i, j = response.prompt_index, response.sample_index
        count += responses[i][j] is None
        responses[i][j] = response
        scores[i][j] = rewards.submit(problems[i], tokenizer.decode(response.token_ids), response.truncated)
    if count != len(problems) * group_size:
        raise RuntimeError(f"the engine returned {count} responses, expected {len(problems) * group_size}")
    return Rollouts(
        prompts, responses, np.asarray([[score.result() for score in group] for group in scores], np.float32)
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
